"""The seconds of a tiling on a GPU: many programs at once on each multiprocessor, as many as its registers hold.

Only ratios matter, so all GPUs have the clock and the rates of a multiprocessor of an H100, whose sources
`estimate/gpu/rates.py` names. `_OPERATION` and the constants behind it are fitted to estimates of the kernels of
`bench/plain_kernels.py` for sm_90, see record 0091.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from tilekern.blocks.tiling import Number, Product, TileAccess, TileOp, Tiling, greatest
from tilekern.lower.backend import Device
from tilekern.lower.triton.calibration import (
    DOT_WARPS,
    ELEMENTS_PER_THREAD,
    LARGE_DOT,
    LARGE_DOT_WARPS,
    MAX_DEFAULT_WARPS,
)
from tilekern.lower.triton.legalize.refuse import LARGEST_TILE

_CYCLE = 1 / 1.8e9
_LANES, _FUNCTIONS = 128, 16  # results of an operation, and of a function such as exp, in a cycle
_WARP, _SHUFFLE = 32, 27  # lanes; cycles until a lane has what another one of its warp had, and combines it
_OF_THREAD = 16  # bytes of a row that a thread has at least, if the row is long enough
_SECTOR = 32  # bytes of a transfer
_L2, _PORT = 36, 64  # bytes a cycle from the L2 cache, if all multiprocessors load, and if one does
_RESIDENT = 32  # programs
_THREADS, _REGISTERS = 2048, 65536
_MOST, _OWN = 255, 30  # registers of a thread, and those of them that hold no tiles
_FEW_THREADS = 128  # with fewer a program alone does not keep a multiprocessor busy
_SMALLEST = 16  # rows, columns and depth of a product on matrix units

_OPERATION, _ADDRESS, _REDUCED, _TRANSPOSED = 0.2, 0.2, 6.0, 6.0  # instructions of a lane
_EXACT, _OPERANDS = 0.9, 1.0  # share of float32's peak of its products, and cycles of 128 lanes to load an operand
_NARROW = 0.6  # share of the peak that other products reach
_WIDE, _FROM_REGISTERS = 64, 0.63  # rows of a product from shared memory; share of the peak of products of fewer rows
_START, _WAIT = 1800, 400  # cycles until a program runs, and until a load delivers
_NOT_AHEAD = 1.75  # of products whose operands are not loaded one iteration ahead
_ITERATION = 10  # cycles of an iteration of a fold that computes nothing
_BARRIERS, _ISSUED = 800, 150  # cycles of a product that computes nothing: of float32, and of others
_SPILLED = 8.0  # cycles to store and load the registers of 128 lanes, one warp each cycle
_SPILLED_OPERAND = 40.0  # the same for programs with products: an operand is loaded for each of its uses
_ONE_TILE = 1.25  # registers for a lane of the largest tile, which is loaded as a whole
_IN_TURNS = 4  # operands of a product of float32 for one register, since only some are loaded at a time


def seconds(device: Device, tiling: Tiling) -> Number:
    """The estimated time of a call; 1,000 times as much and more for tiles that the target refuses."""
    programs, threads = np.maximum(tiling.programs, 1), 32 * _warps(tiling)
    wanted = _registers(tiling, threads)
    registers = np.minimum(wanted, _MOST)
    resident = np.clip(np.minimum(_THREADS // threads, _REGISTERS // (registers * threads)), 1, _RESIDENT)
    spilled = _spilled(tiling, wanted, threads) * (_SPILLED_OPERAND if tiling.products else _SPILLED)
    products = sum(_product(device, p, threads) for p in tiling.products)
    lanes = sum(map(_lanes, tiling.ops)) + sum(map(_addresses, tiling.accesses)) + _ITERATION * tiling.iterations
    computed = (lanes + products + spilled) / programs
    moved = sum(map(_requested, tiling.accesses)) / programs
    latency = (
        _START
        + _WAIT * (1 + tiling.iterations / programs)
        + sum(_shuffles(op, threads) for op in tiling.ops) / programs
    )
    alone_computed, alone_moved = computed * np.maximum(1, _FEW_THREADS / threads), moved / _PORT
    # Without barriers a warp computes while others load.
    warps = np.where(_has_barriers(tiling, threads), 1, threads / _WARP)
    alone = latency + np.maximum(alone_computed, alone_moved) + np.minimum(alone_computed, alone_moved) / warps
    rounds = np.ceil(programs / (device.cores * resident))
    cycles = np.maximum(np.ceil(programs / device.cores) * np.maximum(computed, moved / _L2), rounds * alone)
    cycles = cycles * np.where(_ahead(tiling) > device.fast_memory, _NOT_AHEAD, 1.0)
    excess = np.maximum(_operands(tiling) / device.fast_memory, _largest(tiling) / LARGEST_TILE)
    time = np.maximum(cycles * _CYCLE, _from_memory(tiling) / device.bandwidth)
    return time * np.where(excess > 1, 1e3 * excess, 1.0)


def _has_barriers(tiling: Tiling, threads: Number) -> Number:
    """True for programs in which all warps wait for loads together.

    Warps wait if they combine lanes with each other. They also wait for the operands of a product outside of loops; the
    operands of a product in a loop are loaded one iteration ahead.
    """
    if tiling.products:
        return tiling.iterations == 0
    itemsize = min((access.itemsize for access in tiling.accesses), default=4)
    return greatest(_crosses_warps(op, threads, _OF_THREAD // itemsize) * 1 for op in tiling.ops) > 0


def _crosses_warps(op: TileOp, threads: Number, of_thread: int) -> Number:
    """True if an op combines lanes of several warps. Threads lie along rows first, each with some lanes of a row."""
    of_row = np.minimum(op.tile.inner / of_thread, threads)
    crosses = of_row > _WARP if op.reduces_inner else threads > np.maximum(of_row, _WARP)
    return crosses & bool(op.reduces) & (threads > _WARP)


def _shuffles(op: TileOp, threads: Number) -> Number:
    """Cycles that all programs together wait for the lanes of rows to be combined, which the threads of a row share."""
    if not op.reduces_inner:
        return 0
    of_row = np.clip(threads / np.maximum(op.tile.rows, 1), 1, np.minimum(op.tile.inner, _WARP))
    return op.times * np.log2(of_row) * _SHUFFLE


def _lanes(op: TileOp) -> Number:
    if op.tile.is_operand and op.transposes:
        return 0  # the product reads it transposed
    instructions = _TRANSPOSED if op.transposes else _REDUCED if op.reduces else _OPERATION
    return op.times * np.ceil(op.tile.size * (1 / _FUNCTIONS if op.is_function else instructions / _LANES))


def _addresses(access: TileAccess) -> Number:
    return access.times * access.tile.size * _ADDRESS / _LANES


def _product(device: Device, p: Product, threads: Number) -> Number:
    if max(p.itemsizes) >= 4:
        operands = _OPERANDS * _exact_operands(p, threads) * threads
        return p.times * (_BARRIERS + (p.batch * p.m * p.n * p.k / _EXACT + operands) / _LANES)
    m, n, k = (np.maximum(size, _SMALLEST) for size in (p.m, p.n, p.k))
    from_registers = 1.0 if device.matrix_unit in ("mma", "mfma") else np.where(m < _WIDE, _FROM_REGISTERS, 1.0)
    flops = device.flops / device.cores * _CYCLE * _NARROW * from_registers
    return p.times * (_ISSUED + p.batch * 2 * m * n * k / flops)


def _warps(tiling: Tiling) -> Number:
    """The number of warps that `lower.triton` chooses for a program without launch options."""
    if tiling.products:
        largest_result = greatest(p.batch * p.m * p.n for p in tiling.products)
        return np.where(largest_result >= LARGE_DOT, LARGE_DOT_WARPS, DOT_WARPS)
    warps = 2 ** np.ceil(np.log2(_largest(tiling) / (32 * ELEMENTS_PER_THREAD)))
    return np.clip(warps, 1, MAX_DEFAULT_WARPS)


def _largest(tiling: Tiling) -> Number:
    """Lanes of the largest tile, at least 1."""
    return greatest(x.tile.size for x in (*tiling.ops, *tiling.accesses)) + 0 * tiling.programs


def _registers(tiling: Tiling, threads: Number) -> Number:
    """Registers that a thread needs. In products of float32 it holds all rows and columns that its results need."""
    of_products = greatest(_exact_operands(p, threads) / _IN_TURNS for p in tiling.products)
    held = _OWN + tiling.held.bytes_of_registers / 4 / threads + of_products
    return np.maximum(held, _loaded_registers(tiling, threads))


def _loaded_registers(tiling: Tiling, threads: Number) -> Number:
    """Registers that a thread needs to load the largest tile as a whole; operands of products are in shared memory."""
    largest = 0 if tiling.products else greatest(access.tile.bytes for access in tiling.accesses)
    return _OWN + _ONE_TILE * largest / 4 / threads


def _spilled(tiling: Tiling, registers: Number, threads: Number) -> Number:
    """How often 128 lanes are stored and loaded for want of registers.

    If a tile cannot be loaded as a whole, ptxas keeps the results of all ops in memory, not only what does not fit.
    """
    excess = np.maximum(registers - _MOST, 0) * threads / _LANES * np.maximum(tiling.programs, tiling.iterations)
    everything = sum(x.times * x.tile.size for x in (*tiling.ops, *tiling.accesses)) / _LANES
    return np.maximum(excess, everything * (_loaded_registers(tiling, threads) > _MOST))


def _exact_operands(p: Product, threads: Number) -> Number:
    """Elements of the operands of a product of float32 that a thread needs; 0 for other products."""
    return 2 * p.k * np.sqrt(p.batch * p.m * p.n / threads) if max(p.itemsizes) >= 4 else 0


def _operands(tiling: Tiling) -> Number:
    """Bytes of shared memory that the operands of a product take: at least as many must fit."""
    return greatest(p.batch * p.k * (p.m * p.itemsizes[0] + p.n * p.itemsizes[1]) for p in tiling.products)


def _ahead(tiling: Tiling) -> Number:
    """Bytes of shared memory that loops with products take to load tiles one iteration ahead."""
    if not tiling.products:
        return 0
    grid = len(tiling.grid)
    return 2 * sum(access.tile.bytes for access in tiling.accesses if len(access.loops) > grid)


def _moved(access: TileAccess) -> Number:
    """Bytes of the sectors that all programs load or store. Lanes behind the end of an array move nothing."""
    dims = zip(access.sizes, access.extents, access.kinds, strict=True)
    lanes = [np.minimum(n, e) if kind == "block" else n for n, e, kind in dims if kind in ("block", "gather")]
    size = math.prod(lanes)
    run = np.minimum(access.run, size)
    return access.times * np.ceil(size / run) * np.ceil(run * access.itemsize / _SECTOR) * _SECTOR


def _requested(access: TileAccess) -> Number:
    """Bytes that a multiprocessor is busy with: the bytes that move, or the bytes of all lanes if these are more."""
    return np.maximum(_moved(access), access.times * access.tile.bytes)


def _from_memory(tiling: Tiling) -> Number:
    """Bytes between memory and the L2 cache: for each array the bytes that programs access, but at most the array."""
    by_array = defaultdict[int, list[TileAccess]](list)
    for access in tiling.accesses:
        by_array[access.array].append(access)
    return sum(np.minimum(sum(map(_moved, accesses)), accesses[0].array_bytes) for accesses in by_array.values())
