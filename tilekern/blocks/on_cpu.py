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
_TASK, _PROGRAM, _ITERATION = 250, 15, 60  # cycles until a task, each of its programs, and an iteration computes
_ROW, _REDUCED = 1.5, 6  # cycles of a loop over the vectors of a row, and of combining the lanes of its vectors
_RUN = (0, 5, 25, 150)  # cycles until the first bytes of a long run arrive that no earlier run announced, by level
_SHORT_RUN = (0, 1, 4, 10)  # the same of the shortest runs, of which a core waits for some ten at once
_AHEAD = 2048  # bytes of a run: during shorter ones the CPU already loads from the next runs
_LATENCY = (0, 10, 50, 300)  # cycles that a step waits for its first run, if no earlier run announced it
_STREAMS = 4  # rows that the CPU prefetches side by side
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
    overhead = _TASK * tasks + _PROGRAM * tiling.programs + _ITERATION * tiling.iterations
    cycles = np.maximum(vector, 0.5 * vector + moved) + waiting + _spilled(tiling) + overhead
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
        tile, tiles = access.tile, part.tiles
        level = _level(tiling.arrays if part.distance is None else part.distance)
        runs = np.ceil(tile.size / access.run) * tiles
        is_announced = _is_announced(access)
        run = access.run * access.itemsize
        late = np.maximum(np.choose(level, _SHORT_RUN), np.choose(level, _RUN) * np.minimum(run / _AHEAD, 1))
        per_run = np.where(is_announced, 2, late)
        lines = np.where(is_announced, 1, _lines(access, run))
        busy = busy + part.bytes * lines / np.choose(level, _RATES) + runs * per_run
        waiting = waiting + np.where(is_announced, 0, np.choose(level, _LATENCY)) * tiles
    return busy + sum(map(_accessed_lanes, tiling.accesses)), waiting


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
    return access.times * (vectors * _OPERATION + tile.rows * _ROW)


def _is_announced(access: TileAccess) -> Number:
    """True if the CPU prefetches: whole rows follow each other, or the next tile continues each of a few rows.

    The next iteration has the next tile, or the next program, which usually belongs to the same task.
    """
    is_whole = access.run >= access.extents[-1] if access.extents else True
    last = max((n for n, moves in enumerate(access.moved_by) if moves), default=-1)
    is_continued = last >= 0 and access.streamed_by[last]
    return is_whole | (is_continued & (access.tile.rows <= _STREAMS))


def _spilled(tiling: Tiling) -> Number:
    """Cycles of storing and loading what a program holds and the first level does not: tiles, and packed operands."""
    packed = greatest(np.where(p.m < _GEMV, 0, p.k * p.n * p.itemsizes[1]) for p in tiling.products)
    held = tiling.held.bytes_of_buffers + packed
    passes = np.maximum(tiling.programs, tiling.iterations)
    return np.where(2 * held <= _L1, 0.0, 2.0 * held * passes / _rate(2 * held))
