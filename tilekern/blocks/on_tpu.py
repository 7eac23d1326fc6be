"""The seconds of a tiling on a TPU: the programs of a grid run one after another, while the next blocks are fetched.

A loop runs inside of the kernel, over arrays that are in vector memory as a whole, if they fit; otherwise its
iterations are steps of the grid, or of a pipeline. The constants are fitted to estimates of the kernels of
`bench/plain_kernels.py` for v6e, see record 0091.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tilekern.blocks.tiling import Loop, Number, Product, Tile, TileAccess, TileOp, Tiling, greatest, times
from tilekern.lower.backend import Device
from tilekern.lower.mosaic.calibration import EXPOSED_BYTES
from tilekern.lower.mosaic.chip import LANES, SUBLANES

_CYCLE = 1 / 1.6e9  # of all chips; only ratios matter
_STEP = 0.4e-6  # seconds of a step of the grid in which nothing is fetched or computed
_ITERATION = 15  # cycles of an iteration of a fold that computes nothing
_COMBINED = 140  # cycles until all lanes of a row are combined, or are rows of their own, while other units wait
_WINDOW = 80  # cycles of a step for each window: the scalar unit compares its index, starts and awaits its copies
_OPERATION, _FUNCTION, _REDUCED, _TRANSPOSED, _ACCESS = 0.25, 0.5, 0.5, 3.5, 0.1  # cycles of a register
_SHIFTED, _ROW = 1.0, 8.0  # cycles of a register that is not aligned, and of a row that an index vector chooses
_PASSES = {4: 6}  # of products of bfloat16 for one product, by bytes of an element
_IN_MEMORY = 0.25  # share of the tiles that a program holds outside of registers


def seconds(device: Device, tiling: Tiling) -> Number:
    """The estimated time of a call; 1,000 times as much and more for tiles that vector memory does not hold."""
    windows = _windows(tiling)
    ends = _ends(tiling)
    cycles = sum(_lanes(op, ends) for op in tiling.ops) + _ITERATION * tiling.iterations
    cycles = cycles + sum(_accessed(access, ends) for access in tiling.accesses)
    cycles = cycles + _COMBINED * sum(_in_turn(op.loops) for op in tiling.ops if op.reduces_inner or op.turns)
    compute = (cycles + _WINDOW * len(windows) * tiling.programs) * _CYCLE
    compute = compute + sum(_product(device, p) for p in tiling.products)
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


def _in_turn(loops: Sequence[Loop]) -> Number:
    """How often an op inside of loops waits for the same op of an iteration before it.

    A last tile that the axis does not fill runs behind the loop. With one tile before it there is no loop, so both wait
    together.
    """
    *outer, last = loops or [Loop(1, 1, 0)]
    is_pair = (last.count == 2) & (last.extent % np.maximum(last.block, 1) != 0)
    return times(outer) * np.where(is_pair, 1, last.count)


type _Ends = Sequence[tuple[Number, int]]
"""Sizes of tiles that are alone along a dim, each with the elements of the dim."""


def _ends(tiling: Tiling) -> _Ends:
    """The sizes that are longer than a dim: of such a tile libtpu knows which lanes are behind the end of the array."""
    pairs = [
        (size, extent)
        for access in tiling.accesses
        for size, extent, kind in zip(access.sizes, access.extents, access.kinds, strict=True)
        if kind == "block" and np.any(size > extent)
    ]
    return list({(str(size), extent): (size, extent) for size, extent in pairs}.values())


def _registers(tile: Tile, ends: _Ends) -> Number:
    """Registers that a tile takes, without registers that are behind the end of an array."""
    shape = list(tile.shape)
    for size, extent in ends:
        shape = [np.where((n == size) & (n > extent), extent, n) for n in shape]
    if len(shape) < 2:
        return np.ceil(math.prod(shape) / LANES)
    *outer, rows, columns = shape
    return math.prod(outer) * np.ceil(rows / SUBLANES) * np.ceil(columns / LANES)


def _lanes(op: TileOp, ends: _Ends) -> Number:
    if op.transposes:
        cycles = 0.0 if op.tile.is_operand else _TRANSPOSED  # a product reads its operands transposed
    else:
        cycles = _REDUCED if op.reduces_inner else _FUNCTION if op.is_function else _OPERATION
    return op.times * _registers(op.tile, ends) * cycles


def _accessed(access: TileAccess, ends: _Ends) -> Number:
    cycles = _registers(access.tile, ends) * (_ACCESS if all(access.aligned) else _ACCESS + _SHIFTED)
    return access.times * (cycles + (_ROW * access.tile.rows if "gather" in access.kinds else 0))


def _product(device: Device, p: Product) -> Number:
    unit, passes = device.matrix_size, _PASSES.get(max(p.itemsizes), 1)
    flops = 2 * p.m * np.ceil(p.k / unit) * np.ceil(p.n / unit) * unit**2 * passes
    # A unit delivers after as many cycles as it has rows.
    return p.times * (p.batch * flops / device.flops + unit * _CYCLE)


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
    pairs = zip(tiling.grid, access.placed_by, strict=False)
    return 1 + (times([loop for loop, moves in pairs if moves]) > 1)


def _rearranged_bytes(access: TileAccess) -> Number:
    """Bytes that XLA reads and writes around the call if the tiles of an array are not whole tiles of memory.

    The last two dims of a block are multiples of a tile of memory, or whole. If not, XLA splits the dim: it copies the
    array once in its own layout, and if the last dim is split once more, into rows of whole registers.
    """
    own, compact = _array_bytes(access), _compact_bytes(access)
    if (places := _places(access)) != sorted(places):
        return compact + own  # XLA moves the dims of which the kernel takes an element to the front
    tiled = [n for n, kind in enumerate(access.kinds) if kind == "block" and access.aligned[n]][-2:]
    units = dict(zip(reversed(tiled), (LANES, SUBLANES), strict=False))
    split = {n: (access.sizes[n] % u != 0) & (access.sizes[n] < access.extents[n]) for n, u in units.items()}
    of_lanes = split.get(tiled[-1], False) if tiled else False
    padded = np.where(of_lanes, own * _padding(access.sizes[tiled[-1]], access.extents[tiled[-1]]) if tiled else 1, own)
    if compact < own:
        return compact + padded
    return np.where(of_lanes, 3 * own + padded, np.where(greatest(split.values()) > 0, 2 * own, 0))


def _padding(size: Number, extent: int) -> Number:
    """The lanes of a row whose blocks are padded to whole registers, for each lane of the row in whole registers."""
    blocks = np.ceil(extent / np.maximum(size, 1))
    return blocks * np.ceil(size / LANES) / np.ceil(max(extent, 1) / LANES)


def _compact_bytes(access: TileAccess) -> Number:
    """Bytes of an array as XLA lays it out: it exchanges the last two dims if that leaves less of registers empty."""
    *outer, rows, columns = (1, 1, *access.extents)
    exchanged = _padded_bytes((*outer, columns, rows), access.itemsize)
    own = _padded_bytes((*outer, rows, columns), access.itemsize)
    return np.minimum(own, exchanged) if len(access.extents) > 1 else own


def _places(access: TileAccess) -> list[int]:
    """The dims in their order in memory: dims of which a tile has one element come first."""
    return sorted(range(len(access.kinds)), key=lambda n: access.kinds[n] != "index")


def _array_bytes(access: TileAccess) -> Number:
    """Bytes of an array in whole registers."""
    return _padded_bytes([access.extents[n] for n in _places(access)], access.itemsize)


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
    return _padded_bytes([sizes[n] for n in _places(access)], access.itemsize)


def _resident_bytes(access: TileAccess, tiling: Tiling) -> Number:
    """Bytes of the part of an array that one program needs, with the tiles of all iterations."""
    grid = len(tiling.grid)
    pairs = zip(access.loops[grid:], access.refetched_by[grid:], strict=True)
    block = _block_bytes(access)
    visited = np.maximum(times([loop for loop, moves in pairs if moves]), 1)
    return np.minimum(block * visited, np.maximum(_array_bytes(access), block))


def _fetched_bytes(access: TileAccess, tiling: Tiling) -> Number:
    """Bytes that all programs fetch or store. A block stays while only axes advance that do not move it."""
    moving = [n for n, moves in enumerate(access.placed_by[: len(tiling.grid)], 1) if moves]
    return _resident_bytes(access, tiling) * np.maximum(times(tiling.grid[: max(moving, default=0)]), 1)
