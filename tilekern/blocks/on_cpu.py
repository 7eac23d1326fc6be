"""The seconds of a tiling on a CPU, by a nominal core: the same numbers on every machine.

Blocks decide the order of sums, and so bits. All hosts of a job must choose the same blocks, so nothing here is
measured on the machine. Only ratios matter.
"""

from __future__ import annotations

import numpy as np

from tilekern.blocks.tiling import Number, Product, Tile, TileAccess, TileOp, Tiling
from tilekern.lower.backend import Device

THREADS = 8
"""Threads of a nominal CPU: with fewer programs some of them are idle."""

_CYCLE = 1 / 3e9
_VECTOR = 64  # bytes
_L1, _L2, _L3 = 32 << 10, 1 << 20, 32 << 20
_RATES = (64.0, 28.0, 10.0, 4.0)  # bytes a cycle of one thread, from each level and from memory
_FUNCTION = 10  # cycles of a vector of a function such as exp
_OPERATION = 0.6  # cycles of a vector of any other op
_PROGRAM, _ITERATION = 250, 60  # cycles until a program, and an iteration of a fold, computes
_ROW, _REDUCED = 0.5, 6  # cycles that a row costs, and that combining the lanes of its vectors costs
_RUN = 60  # cycles until the first bytes of a run arrive that no earlier run announced
_TRANSPOSED = (1.0, 3.5)  # cycles of an element, of tiles of few and of many rows
_FEW_ROWS = 32  # whose lines of the cache do not evict each other
_PACK, _SUM = 1.5, 1.5  # cycles to pack a vector of the right operand; to load and store a vector of sums
_MULTIPLY = {4: 1.8, 2: 2.7, 1: 2.7}  # vectors that are multiplied and added in a cycle, by bytes of an element
_GEMV = 8  # rows of the left operand from which the right one is packed


def seconds(device: Device, tiling: Tiling) -> Number:
    """The estimated time of a call, by the nominal core whatever the device is."""
    vector = sum(map(_lanes, tiling.ops)) + sum(map(_product, tiling.products))
    moved = sum(_moved(access, tiling.arrays) for access in tiling.accesses)
    overhead = _PROGRAM * tiling.programs + _ITERATION * tiling.iterations
    cycles = np.maximum(vector, 0.5 * vector + moved) + _spilled(tiling) + overhead
    waves = np.maximum(tiling.programs, 1) / THREADS
    return cycles * _CYCLE / THREADS * np.ceil(waves) / waves


def _rate(nbytes: Number) -> Number:
    """Bytes a cycle from the smallest level that holds so many."""
    return np.select([nbytes <= _L1, nbytes <= _L2, nbytes <= _L3], _RATES[:3], _RATES[3])


def _vectors(tile: Tile) -> Number:
    return tile.rows * np.ceil(tile.inner * tile.itemsize / _VECTOR)


def _lanes(op: TileOp) -> Number:
    tile = Tile(op.tile.shape, max(op.tile.itemsize, 4))
    if op.transposes:
        return op.times * tile.size * np.where(tile.inner <= _FEW_ROWS, *_TRANSPOSED)
    row = _REDUCED if op.reduces_inner else _ROW
    return op.times * (_vectors(tile) * (_FUNCTION if op.is_function else _OPERATION) + tile.rows * row)


def _product(p: Product) -> Number:
    wide = np.ceil(p.n * 4 / _VECTOR)
    multiply = p.m * p.k * wide / _MULTIPLY.get(max(p.itemsizes), _MULTIPLY[4] / 2)
    right = p.k * wide * np.where(p.m < _GEMV, _VECTOR / _RATES[1], _PACK)
    return p.times * p.batch * (multiply + right + p.m * wide * _SUM)


def _moved(access: TileAccess, arrays: int) -> Number:
    """Cycles of an access: an element comes from far away the first time, then from the level that holds the array."""
    tile = access.tile
    total = tile.bytes * access.times
    once = np.minimum(total, access.array_bytes)
    vectors = tile.size if access.gathers else _vectors(tile)
    lanes = access.times * (vectors * _OPERATION + tile.rows * _ROW)
    is_broken = access.run < access.extents[-1] if access.extents else False
    runs = np.ceil(tile.size / access.run) * access.times * np.where(is_broken, _RUN, 2)
    far = _RATES[3] if arrays > _L3 else _RATES[2]
    return once / far + (total - once) / np.minimum(_rate(access.array_bytes), _RATES[1]) + lanes + runs


def _spilled(tiling: Tiling) -> Number:
    """Cycles of storing and loading what a program holds and the first level does not."""
    held = tiling.held.bytes
    passes = np.maximum(tiling.programs, tiling.iterations)
    return np.where(2 * held <= _L1, 0.0, 2.0 * held * passes / _rate(2 * held))
