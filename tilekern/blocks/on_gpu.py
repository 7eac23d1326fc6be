"""The seconds of a tiling on a GPU: many programs at once on each multiprocessor, as many as its registers hold.

Only ratios matter, so all GPUs have the clock and the rates of a multiprocessor of an H100, whose sources
`estimate/gpu/rates.py` names. `_OPERATION` and the constants behind it are fitted to estimates of the kernels of
`bench/plain_kernels.py` for sm_90, see record 0091.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from tilekern.blocks.tiling import Loop, Number, Product, Tile, TileAccess, TileOp, Tiling, greatest, times
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
_WIDE, _FROM_REGISTERS = 64, 0.63  # rows of a product from shared memory; share of the peak of products of fewer rows
_START, _WAIT = 1800, 400  # cycles until a program runs, and until a load delivers
_NOT_AHEAD = 1.75  # of products whose operands are not loaded one iteration ahead
_ITERATION = 10  # cycles of an iteration of a fold that computes nothing
_UNROLLED, _COPIES, _WHOLE = 300, 4, 1600  # instructions of copies of a loop's body, their least number, of all copies
_EXCHANGED = 100  # cycles until warps have what others stored to shared memory: a store, a barrier, a load
_DEPTH, _STEP_OF_DEPTH = 16, 33  # depth of a product from registers, and cycles until another one can add to it
_SHARED = 128  # bytes a cycle of shared memory
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
    shuffles = (
        sum(_shuffles(op, threads, _of_thread(tiling)) / _unrolled(tiling, op.loops, threads) for op in tiling.ops)
        / programs
    )
    waits = _WAIT * sum(times(loops) / _loads_in_flight(tiling, loops, threads) for loops in tiling.folds) / programs
    alone_computed, alone_moved = computed * np.maximum(1, _FEW_THREADS / threads), moved / _PORT
    # Without barriers a warp computes while others load.
    warps = np.where(_has_barriers(tiling, threads), 1, threads / _WARP)
    alone = np.maximum(alone_computed, alone_moved) + np.minimum(alone_computed, alone_moved) / warps
    # Operands that are loaded one iteration ahead arrive while the product before them is computed.
    alone = np.maximum(alone, waits + alone_moved) if tiling.products else alone + waits
    alone = alone + _START + _WAIT + shuffles + _exchanges(tiling, threads) / programs
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
    return greatest(_crosses_warps(op, threads, _of_thread(tiling)) * 1 for op in tiling.ops) > 0


def _of_thread(tiling: Tiling) -> int:
    """Lanes of a row that a thread loads at once, if it has as many."""
    return _OF_THREAD // min((access.itemsize for access in tiling.accesses), default=4)


def _threads_of_row(tile: Tile, threads: Number, of_thread: int) -> Number:
    """The threads of a warp that share a row: threads lie along rows first, each with some lanes of a row."""
    lanes = np.clip(tile.size / threads, 1, of_thread)
    return np.clip(tile.inner / lanes, 1, _WARP)


def _crosses_warps(op: TileOp, threads: Number, of_thread: int) -> Number:
    """True if an op combines lanes of several warps. Threads lie along rows first, each with some lanes of a row."""
    of_row = np.minimum(op.tile.inner / of_thread, threads)
    crosses = of_row > _WARP if op.reduces_inner else threads > np.maximum(of_row, _WARP)
    return crosses & bool(op.reduces) & (threads > _WARP)


def _shuffles(op: TileOp, threads: Number, of_thread: int) -> Number:
    """Cycles that all programs together wait for lanes to be combined, which the threads of a row or a column share."""
    if not op.reduces or len(op.tile.shape) < 2:
        return 0
    return op.times * np.log2(_combined(op, _threads_of_row(op.tile, threads, of_thread))) * _SHUFFLE


def _combined(op: TileOp, of_row: Number) -> Number:
    """The threads of a warp that combine what each has reduced: they share a row, or a column."""
    return of_row if op.reduces_inner else _WARP / of_row


def _unrolled(tiling: Tiling, loops: Sequence[Loop], threads: Number) -> Number:
    """The iterations of the innermost loop around an op that ptxas puts one behind another, so that they overlap.

    By the machine code of sums of rows, and of layer_norm, in tiles of 32 to 1,024 lanes; ptxas 12.8, compiled on
    2026-11-28.
    """
    is_innermost = not any(len(of_fold) > len(loops) for of_fold in tiling.folds)
    if len(loops) <= len(tiling.grid) or not is_innermost or tiling.products:
        return 1
    path = [loop.number for loop in loops]
    ops = [op for op in tiling.ops if [loop.number for loop in op.loops] == path]
    accesses = [access for access in tiling.accesses if list(access.path) == path]
    matrices = [op.tile for op in ops if len(op.tile.shape) > 1]
    of_row = greatest(_threads_of_row(tile, threads, _of_thread(tiling)) for tile in matrices)
    body = _ITERATION + sum(_instructions(op, threads, of_row) for op in ops)
    body = body + sum(_instructions_of(access, threads) for access in accesses)
    trips, copies = loops[-1].count, np.floor(_UNROLLED / body)
    partly = np.where(copies >= _COPIES, copies, 1)
    return np.clip(np.where(body * trips <= _WHOLE, trips, partly), 1, np.maximum(trips, 1))


def _loads_in_flight(tiling: Tiling, loops: Sequence[Loop], threads: Number) -> Number:
    """Iterations of a fold whose loads are in flight together.

    A load waits for a store before it, since they may be of one element, and for a barrier.
    """
    path = tuple(loop.number for loop in loops)
    if any(access.stores for access in tiling.accesses if access.path == path):
        return 1
    ops = [op for op in tiling.ops if tuple(loop.number for loop in op.loops) == path]
    has_barriers = greatest(_crosses_warps(op, threads, _of_thread(tiling)) * 1 for op in ops)
    return np.where(has_barriers > 0, 1, _unrolled(tiling, loops, threads))


def _instructions(op: TileOp, threads: Number, of_row: Number) -> Number:
    """Instructions of a thread for one run of an op.

    Args:
      op: the op.
      threads: threads of a program.
      of_row: threads that share a row of a matrix. Each has the row's elements of the vectors that rows make.
    """
    if len(op.tile.shape) < 2:
        return np.ceil(op.tile.size * np.maximum(of_row, 1) / threads)
    lanes, combined = np.ceil(op.tile.size / threads), _combined(op, of_row)
    sums = op.tile.rows * of_row if op.reduces_inner else op.tile.inner * _WARP / of_row
    return lanes + (2 * np.ceil(sums / threads) * np.log2(combined) if op.reduces else 0)


def _instructions_of(access: TileAccess, threads: Number) -> Number:
    """Instructions of a thread for an access: two for the address, and one for each 16 bytes that lie side by side."""
    lanes = np.clip(access.run, 1, _OF_THREAD // access.itemsize)
    return 2 + np.ceil(access.tile.size / lanes / threads)


def _exchanges(tiling: Tiling, threads: Number) -> Number:
    """Cycles that all programs together wait for other warps.

    Warps exchange what a reduction across them combines, and vectors that are combined with a matrix.
    """
    if tiling.products:
        return 0
    matrices = {tuple(loop.number for loop in op.loops) for op in tiling.ops if len(op.tile.shape) > 1}
    vectors = [a for a in tiling.accesses if not a.stores and len(a.tile.shape) == 1 and a.path in matrices]
    reduced = sum(op.times * _crosses_warps(op, threads, _of_thread(tiling)) for op in tiling.ops)
    return _EXCHANGED * (sum(a.times for a in vectors) * (threads > _WARP) + reduced)


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
    flops = device.flops / device.cores * _CYCLE
    matrix: Number = p.batch * 2 * m * n * k / flops
    if device.matrix_unit == "wgmma":
        narrow = np.maximum(matrix / _FROM_REGISTERS, _chain(p, m, n, k, threads))
        matrix = np.maximum(matrix, narrow * (m < _WIDE))
    elif device.matrix_unit == "mma":
        matrix = np.maximum(matrix, _chain(p, m, n, k, threads))
    return p.times * (_ISSUED + matrix)


def _chain(p: Product, m: Number, n: Number, k: Number, threads: Number) -> Number:
    """Cycles of a product from registers: its steps along the depth add to one sum, each when the one before ends.

    Before them the warps, in rows and columns, load their operands from shared memory: a row of warps the same columns.
    """
    warps = np.sqrt(threads / _WARP)
    loaded = p.batch * k * (m * p.itemsizes[0] + n * p.itemsizes[1]) * warps / _SHARED
    return loaded + k / _DEPTH * _STEP_OF_DEPTH


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
    run = np.maximum(np.minimum(access.run, size), 1)
    return access.times * np.ceil(size / run) * np.ceil(run * access.itemsize / _SECTOR) * _SECTOR


def _requested(access: TileAccess) -> Number:
    """Bytes that a multiprocessor is busy with: the bytes that move, or the bytes of all lanes, whichever are more.

    The lanes of warps that are behind the end of an array as a whole do not count. The padding of an operand does: its
    zeros are stored to shared memory, too.
    """
    dims = zip(access.sizes, access.extents, access.kinds, strict=True)
    lanes = [(n, np.minimum(n, e) if kind == "block" else n) for n, e, kind in dims if kind in ("block", "gather")]
    if access.is_operand:
        nbytes = access.itemsize * math.prod(np.maximum(n, _SMALLEST) for n, _ in lanes)
    else:
        of_warp = _WARP * _OF_THREAD // access.itemsize
        *outer, inner = lanes or [(1, 1)]
        whole_warps = np.minimum(inner[0], np.ceil(inner[1] / of_warp) * of_warp)
        nbytes = access.itemsize * math.prod(n for _, n in outer) * whole_warps
    return np.maximum(_moved(access), access.times * nbytes)


def _from_memory(tiling: Tiling) -> Number:
    """Bytes between memory and the L2 cache: for each array the bytes that programs access, but at most the array."""
    by_array = defaultdict[int, list[TileAccess]](list)
    for access in tiling.accesses:
        by_array[access.array].append(access)
    return sum(np.minimum(sum(map(_moved, accesses)), accesses[0].array_bytes) for accesses in by_array.values())
