"""The seconds of a tiling on a TPU: the programs of a grid run one after another, while the next blocks are fetched.

A loop runs inside of the kernel, over arrays that are in vector memory as a whole, if they fit; otherwise its
iterations are steps of the grid, or of a pipeline. The constants are fitted to estimates of the kernels of
`bench/plain_kernels.py` for v6e, see record 0091.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tilekern.blocks.tiling import Number, Product, Tile, TileAccess, TileOp, Tiling, greatest, times
from tilekern.lower.backend import Device
from tilekern.lower.mosaic.calibration import EXPOSED_BYTES
from tilekern.lower.mosaic.chip import LANES, SUBLANES

_CYCLE = 1 / 1.6e9  # of all chips; only ratios matter
_STEP = 0.4e-6  # seconds of a step of the grid in which nothing is fetched or computed
_ITERATION = 140  # cycles of an iteration of a fold that computes nothing
_OPERATION, _FUNCTION, _REDUCED, _TRANSPOSED, _ACCESS = 0.1, 0.5, 0.5, 3.5, 0.1  # cycles of a register
_SHIFTED, _ROW = 1.0, 8.0  # cycles of a register that is not aligned, and of a row that an index vector chooses
_DELIVERED = 80  # cycles until the matrix units deliver
_PASSES = {4: 6}  # of products of bfloat16 for one product, by bytes of an element
_IN_MEMORY = 0.25  # share of the tiles that a program holds outside of registers


def seconds(device: Device, tiling: Tiling) -> Number:
    """The estimated time of a call; 1,000 times as much and more for tiles that vector memory does not hold."""
    cycles = sum(map(_lanes, tiling.ops)) + sum(map(_accessed, tiling.accesses)) + _ITERATION * tiling.iterations
    compute = cycles * _CYCLE + sum(_product(device, p) for p in tiling.products)
    windows = _windows(tiling)
    held = tiling.held.bytes * _IN_MEMORY
    whole = sum(_buffers(w, tiling) * _resident_bytes(w, tiling) for w in windows) + held
    is_exposed = (_pipelines(tiling) == 1) & (tiling.programs <= 1) & (whole >= EXPOSED_BYTES)
    resident = (whole <= device.fast_memory) & np.logical_not(is_exposed)
    excess = (2 * sum(map(_block_bytes, windows)) + held) / device.fast_memory
    steps = np.maximum(np.maximum(tiling.programs, tiling.iterations * np.logical_not(resident)), 1)
    by_program = sum(_fetched_bytes(w, tiling) for w in windows)
    by_iteration = sum(_block_bytes(w) * w.times for w in _windows(tiling, by_loops=True))
    fetch = np.where(resident, by_program, by_iteration) / device.bandwidth
    busy = np.maximum(np.maximum(fetch, compute), steps * _STEP)
    # The first step of a pipeline waits for its blocks, and nothing else happens during its last one.
    alone = np.minimum(np.where(resident, 1, _pipelines(tiling)) / steps, 1)
    time = busy * (1 - alone) + (fetch + compute + steps * _STEP) * alone
    rearranged = sum(map(_rearranged_bytes, windows)) / device.bandwidth
    return (time / device.cores + rearranged) * np.where(excess > 1, 1e3 * excess, 1.0)


def _registers(tile: Tile) -> Number:
    """Registers that a tile takes."""
    if len(tile.shape) < 2:
        return np.ceil(tile.size / LANES)
    *outer, rows, columns = tile.shape
    return math.prod(outer) * np.ceil(rows / SUBLANES) * np.ceil(columns / LANES)


def _lanes(op: TileOp) -> Number:
    if op.transposes:
        cycles = 0.0 if op.tile.is_operand else _TRANSPOSED  # a product reads its operands transposed
    else:
        cycles = _REDUCED if op.reduces_inner else _FUNCTION if op.is_function else _OPERATION
    return op.times * _registers(op.tile) * cycles


def _accessed(access: TileAccess) -> Number:
    cycles = _registers(access.tile) * (_ACCESS if all(access.aligned) else _ACCESS + _SHIFTED)
    return access.times * (cycles + (_ROW * access.tile.rows if "gather" in access.kinds else 0))


def _product(device: Device, p: Product) -> Number:
    unit, passes = device.matrix_size, _PASSES.get(max(p.itemsizes), 1)
    flops = 2 * p.m * np.ceil(p.k / unit) * np.ceil(p.n / unit) * unit**2 * passes
    return p.times * p.batch * (flops / device.flops + _DELIVERED * _CYCLE)


def _windows(tiling: Tiling, by_loops: bool = False) -> list[TileAccess]:
    """One access for each part of an array that is fetched or stored on its own.

    Args:
      tiling: the work.
      by_loops: True if each loop fetches its own parts, even parts that an earlier loop fetched, too.
    """
    windows = dict[object, TileAccess]()
    for access in tiling.accesses:
        loops = access.path if by_loops else ()
        windows.setdefault((access.array, access.refetched_by, access.aligned, loops), access)
    return list(windows.values())


def _pipelines(tiling: Tiling) -> Number:
    """The pipelines that start if loops fetch their blocks: a single loop is part of the grid, others start anew."""
    outermost = [loops for loops in tiling.folds if len(loops) == len(tiling.grid) + 1]
    return sum(times(loops[:-1]) for loops in outermost) if len(outermost) > 1 else 1


def _buffers(access: TileAccess, tiling: Tiling) -> Number:
    """2 for an array of which the grid visits several parts, and fetches one while another is used; else 1."""
    pairs = zip(tiling.grid, access.refetched_by, strict=False)
    return 1 + (times([loop for loop, moves in pairs if moves]) > 1)


def _rearranged_bytes(access: TileAccess) -> Number:
    """Bytes that XLA reads and writes around the call if the tiles of an array are not whole tiles of memory.

    The last two dims of a block are multiples of a tile of memory, or whole. If not, XLA splits the dim: it copies the
    array once in its own layout, and if the last dim is split once more, into rows of whole registers.
    """
    own = _padded_bytes(access.extents, access.itemsize)
    tiled = [n for n, kind in enumerate(access.kinds) if kind == "block" and access.aligned[n]][-2:]
    units = dict(zip(reversed(tiled), (LANES, SUBLANES), strict=False))
    split = {n: (access.sizes[n] % u != 0) & (access.sizes[n] < access.extents[n]) for n, u in units.items()}
    of_lanes = split.get(tiled[-1], False) if tiled else False
    padding = np.ceil(access.sizes[tiled[-1]] / LANES) * LANES / np.maximum(access.sizes[tiled[-1]], 1) if tiled else 1
    copied = np.where(of_lanes, own * (3 + padding), 2 * own)
    return np.where(greatest(split.values()) > 0, copied, 0)


def _padded_bytes(sizes: Sequence[Number], itemsize: int) -> Number:
    """Bytes of a part of an array in whole registers."""
    *outer, rows, columns = (1, 1, *sizes)
    padded_rows = np.ceil(rows / SUBLANES) * SUBLANES if len(sizes) > 1 else 1
    return math.prod(outer) * padded_rows * np.ceil(columns / LANES) * LANES * itemsize


def _block_bytes(access: TileAccess) -> Number:
    """Bytes of the part of an array that one access needs: all of a dim whose position is known only at run time."""
    dims = zip(access.sizes, access.extents, access.aligned, access.kinds, strict=True)
    whole = ("gather", "along")
    sizes = [e if kind in whole or not aligned else np.minimum(n, e) for n, e, aligned, kind in dims]
    return _padded_bytes(sizes, access.itemsize)


def _resident_bytes(access: TileAccess, tiling: Tiling) -> Number:
    """Bytes of the part of an array that one program needs, with the tiles of all iterations."""
    grid = len(tiling.grid)
    pairs = zip(access.loops[grid:], access.refetched_by[grid:], strict=True)
    block = _block_bytes(access)
    visited = np.maximum(times([loop for loop, moves in pairs if moves]), 1)
    return np.minimum(block * visited, np.maximum(_padded_bytes(access.extents, access.itemsize), block))


def _fetched_bytes(access: TileAccess, tiling: Tiling) -> Number:
    """Bytes that all programs fetch or store. A block stays while only axes advance that do not move it."""
    moving = [n for n, moves in enumerate(access.refetched_by[: len(tiling.grid)], 1) if moves]
    return _resident_bytes(access, tiling) * np.maximum(times(tiling.grid[: max(moving, default=0)]), 1)
