"""The seconds of a tiling on a CPU, by a nominal core: the same numbers on every machine.

Blocks decide the order of sums, and so bits. All hosts of a job must choose the same blocks, so nothing here is
measured on the machine. Only ratios matter.
"""

from __future__ import annotations

import numpy as np

from tilekern.blocks.reuse import traffic
from tilekern.blocks.tiling import Number, Product, Tile, TileAccess, TileOp, Tiling, greatest
from tilekern.lower.backend import Device
from tilekern.lower.llvm.calibration import MAX_TASKS

THREADS = 8
"""Threads of a nominal CPU: with fewer programs some of them are idle."""

_CYCLE = 1 / 3e9
_VECTOR = _LINE = 64  # bytes
_L1, _L2, _L3 = 32 << 10, 1 << 20, 32 << 20
_HELD = 0.75  # the part of a level that still has what it was last given
_RATES = (64.0, 28.0, 10.0, 4.0)  # bytes a cycle of one thread, from each level and from memory
_FUNCTION = 10  # cycles of a vector of a function such as exp
_OPERATION = 0.6  # cycles of a vector of any other op
_TASK, _PROGRAM, _ITERATION = 250, 15, 20  # cycles until a task, each of its programs, and an iteration computes
_EXPOSED = 0.2  # the part of the computation during which few bytes arrive
_ROW, _REDUCED = 1.5, 6  # cycles of a loop over the vectors of a row, and of combining the lanes of its vectors

# The measurements behind the numbers from here to `_LATENCY` are in docs/measurements/pieces-of-rows-on-cpus.md: an
# AMD EPYC of Zen 4, one thread, 2026-11-28. By level: of the first cache, the second, the third, and of memory.
_BESIDE = (64.0, 10.0, 8.0, 4.0)  # bytes a cycle while lines that come from memory evict those of the first level
_RUN = (0, 5, 25, 340)  # cycles of 2 KiB beyond the rate, of pieces of rows that no earlier one announced
_SHORT_RUN = (0, 1, 4, 10)  # the same of the shortest runs, of which a core waits for some ten at once
_START = (0, 10, 100, 1200)  # cycles until the CPU has learned to prefetch rows side by side, for all of a tile's rows
_STREAMS = 8  # rows of a load, or of a store, that the CPU prefetches side by side
_AHEAD = 2048  # bytes that the CPU loads ahead: of a run, and of all rows of a tile that the next tile continues
_TOO_MUCH = 5 * _AHEAD  # bytes of a tile so large that no run of it is loaded ahead
_GAP = 256  # bytes between two runs that the CPU prefetches with them
_LATENCY = (0, 10, 50, 300)  # cycles that a step waits for its first run, if no earlier run announced it
_TRANSPOSED = (1.0, 3.5)  # cycles of an element, of tiles of few and of many rows
_FEW_ROWS = 32  # whose lines of the cache do not evict each other
_PACK, _SUM = 1.5, 1.5  # cycles to pack a vector of the right operand; to load and store a vector of sums
_MULTIPLY = {4: 1.8, 2: 2.7, 1: 2.7}  # vectors that are multiplied and added in a cycle, by bytes of an element
_GEMV = 8  # rows of the left operand from which the right one is packed


def seconds(device: Device, tiling: Tiling) -> Number:
    """The estimated time of a call, by the nominal core whatever the device is."""
    vector = sum(map(_lanes, tiling.ops)) + sum(map(_product, tiling.products))
    moved, waiting = _moved(tiling)
    tasks = np.minimum(tiling.programs, MAX_TASKS)
    compute = vector + _ITERATION * tiling.iterations
    overhead = _TASK * tasks + _PROGRAM * tiling.programs
    cycles = np.maximum(compute, _EXPOSED * compute + moved) + waiting + _spilled(tiling) + overhead
    waves = np.maximum(tiling.programs, 1) / THREADS
    return cycles * _CYCLE / THREADS * np.ceil(waves) / waves


def _rate(nbytes: Number) -> Number:
    """Bytes a cycle from the smallest level that holds so many."""
    return np.choose(_level(nbytes), _RATES)


def _vectors(tile: Tile) -> Number:
    return tile.rows * np.ceil(tile.inner * tile.itemsize / _VECTOR)


def _lanes(op: TileOp) -> Number:
    tile = Tile(op.tile.shape, max(op.tile.itemsize, 4))
    if op.transposes:
        return op.times * tile.size * np.where(tile.inner <= _FEW_ROWS, *_TRANSPOSED)
    row = _REDUCED if op.reduces_inner else np.where(tile.inner * tile.itemsize > _VECTOR, _ROW, 0)
    return op.times * (_vectors(tile) * (_FUNCTION if op.is_function else _OPERATION) + tile.rows * row)


def _product(p: Product) -> Number:
    wide = np.ceil(p.n * 4 / _VECTOR)
    multiply = p.m * p.k * wide / _MULTIPLY.get(max(p.itemsizes), _MULTIPLY[4] / 2)
    right = p.k * wide * np.where(p.m < _GEMV, _VECTOR / _RATES[1], _PACK)
    return p.times * p.batch * (multiply + right + p.m * wide * _SUM)


def _moved(tiling: Tiling) -> tuple[Number, Number]:
    """Cycles of all accesses, each byte from the level that has it: beside other work, and waiting."""
    busy, waiting = 0.0, 0.0
    for part in traffic(tiling):
        access = part.access
        level = _level(tiling.arrays if part.distance is None else part.distance)
        run = _run(access) * access.itemsize
        is_linear = _is_linear(access)
        lines = np.where(is_linear, 1, _lines(access, run))
        busy = busy + part.bytes * (lines / np.choose(level, _BESIDE) + _late(access, level, run) / run)
        if not access.stores:  # a core goes on while a store waits for its line
            is_announced = is_linear | _is_side_by_side(access)
            waiting = waiting + np.where(is_announced, 0, np.choose(level, _LATENCY)) * part.tiles
    return busy + sum(map(_accessed_lanes, tiling.accesses)), waiting


def _late(access: TileAccess, level: Number, run: Number) -> Number:
    """Cycles that a run of some bytes takes beyond the rate of the level."""
    alone = np.maximum(np.choose(level, _SHORT_RUN), np.choose(level, _RUN) * run / _AHEAD)
    of_rows = _late_part(access) * alone + np.choose(level, _START) * _part_of_rows(access)
    at_most = np.where(_is_side_by_side(access), of_rows, np.inf), np.where(_is_linear(access), 2, np.inf)
    return np.minimum(alone, np.minimum(*at_most))


def _run(access: TileAccess) -> Number:
    """Elements that one loop accesses side by side: a loop loads all parts of a row, and stores one part."""
    return access.run if access.stores else access.run_of_rows


def _is_linear(access: TileAccess) -> Number:
    """True if the runs follow each other in memory.

    A loop that stores a part of each row leaves gaps. The CPU prefetches the lines of short gaps between few runs, too,
    so such stores count as linear.
    """
    if not access.extents:
        return True
    rows, row = access.tile.rows, access.extents[-1]
    if not access.shares_rows:
        return (access.run >= row) | (_is_continued(access) & (rows <= 1))
    is_region = access.run_of_rows >= rows * row
    has_short_gaps = ((row - access.run) * access.itemsize <= _GAP) & (rows * row * access.itemsize <= _AHEAD)
    return is_region & ((rows <= 1) | has_short_gaps if access.stores else True)


def _is_continued(access: TileAccess) -> bool:
    """True if the next tile continues each row of a tile.

    The next iteration has the next tile, or the next program, which usually belongs to the same task.
    """
    last = max((n for n, moves in enumerate(access.moved_by) if moves), default=-1)
    return last >= 0 and access.streamed_by[last]


def _is_side_by_side(access: TileAccess) -> Number:
    """True if the next tile continues each of a few rows, which the CPU then prefetches."""
    return _is_continued(access) & (access.tile.rows <= _STREAMS)


def _late_part(access: TileAccess) -> Number:
    """The part of the runs, of rows side by side, that is not loaded ahead: 0 of small tiles, 1 of too large ones."""
    return np.clip((access.tile.bytes - _AHEAD) / (_TOO_MUCH - _AHEAD), 0, 1)


def _part_of_rows(access: TileAccess) -> Number:
    """A run as a part of all rows of its tiles, from the first element of a row to the last one."""
    row = access.extents[-1] if access.extents else 1
    return access.run / np.maximum(row * access.tile.rows, 1)


def _lines(access: TileAccess, run: Number) -> Number:
    """Bytes of the lines of the cache that a run of some bytes touches, for each byte of it."""
    row = access.extents[-1] * access.itemsize if access.extents else _LINE
    return np.maximum(_LINE / run, 1) if row % _LINE == 0 else (run + _LINE - access.itemsize) / run


def _level(nbytes: Number) -> Number:
    """The number of the smallest level that holds so many bytes, and a third more."""
    return sum((nbytes > _HELD * size) * 1 for size in (_L1, _L2, _L3))


def _accessed_lanes(access: TileAccess) -> Number:
    """Cycles of the instructions that load or store tiles."""
    tile = access.tile
    vectors = tile.size if access.gathers else _vectors(tile)
    row = np.where(tile.inner * tile.itemsize > _VECTOR, _ROW, 0)
    return access.times * access.rows_of_use * (vectors * _OPERATION + tile.rows * row)


def _spilled(tiling: Tiling) -> Number:
    """Cycles of storing and loading what a program holds and the first level does not: tiles, and packed operands."""
    packed = greatest(np.where(p.m < _GEMV, 0, p.k * p.n * p.itemsizes[1]) for p in tiling.products)
    held = tiling.held.bytes_of_buffers + packed
    passes = np.maximum(tiling.programs, tiling.iterations)
    return np.where(2 * held <= _L1, 0.0, 2.0 * held * passes / _rate(2 * held))
