"""Layout of an array in HBM for a window: XLA's rearrangement of the array around the call, and Pallas' blocks.

Mosaic requires that the last two dims of a block are multiples of (8, 128), or whole. So single positions and rows come
first, tiles last. The dim of a tile of another size is split into tiles and elements, which makes the tile whole. In
order of preference:

    unchanged    with a unit dim if only one dim is tiled
    folded       a single position is folded into the last dim: [B, T, N, H] as [B, T, N * H], blocks (1, T tile, H);
                 XLA's own reshapes of a projection cancel with this reshape
    rearranged   XLA transposes, splits and pads dims, which reads and writes the array once
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp

from tilekern.errors import TargetError
from tilekern.ir.core import round_up
from tilekern.ir.records import record
from tilekern.ir.types import DType
from tilekern.lower.mosaic.chip import LANES, SUBLANES, padded_bytes
from tilekern.lower.mosaic.plan.windows import Window, WindowDim, tiles

Use = Literal["place", "tile", "row", "lane", "unit", "fold"]


@record
class LayoutDim:
    """One dim of the rearranged array.

    Attributes:
      dim: the dim of the array that this dim comes from; -1 for a unit dim.
      use: "place" is squeezed, and the index map computes its position; "tile" numbers the tiles of a split dim, and is
        squeezed if the index map computes the tile, else whole; "row" is whole, and accessed row by row; "lane" is
        whole, or one tile of a dim that is not split; "unit" has one element; "fold" is a dim with the dim before it
        folded in.
      length: the elements of the dim.
      block: the elements of a block along the dim.
    """

    dim: int
    use: Use
    length: int
    block: int


@record
class Layout:
    """The layout of a window's array in HBM.

    Attributes:
      window: the window.
      dims: the dims of the rearranged array.
      padded: the shape of the array after XLA has padded it.
      parts: (dim of the array, size) of each dim after the splits.
      permutation: the numbers of the parts in the order of `dims`.
    """

    window: Window
    dims: tuple[LayoutDim, ...]
    padded: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]
    permutation: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rearranged array."""
        return tuple(d.length for d in self.dims)

    @property
    def block(self) -> tuple[int | None, ...]:
        """The block shape for Pallas; None for a squeezed dim."""
        return tuple(None if is_squeezed(d, self.window.dims) else d.block for d in self.dims)

    @property
    def buffer(self) -> tuple[int, ...]:
        """The shape of a block in VMEM."""
        return tuple(n for n in self.block if n is not None)

    @property
    def block_bytes(self) -> int:
        """The bytes of a block in VMEM, in the compiler's unit of 1 KiB."""
        size = padded_bytes(self.buffer, self.window.param.ref.dtype)
        return round_up(size, 1024)

    @property
    def needs_copy(self) -> bool:
        """True if XLA has to copy the array: it is padded or permuted, or its last two dims change."""
        shape = self.window.param.ref.shape
        tiled = len(shape) < 2 or self.has_folded_dim or self.shape[-2:] == shape[-2:]
        return self.padded != shape or not self._in_order or not tiled

    @property
    def _in_order(self) -> bool:
        return self.permutation == tuple(range(len(self.permutation)))

    @property
    def has_folded_dim(self) -> bool:
        """True if a single position is folded into the last dim."""
        return any(d.use == "fold" for d in self.dims)

    def rearrange(self, array: Any) -> Any:
        """The array in this layout."""
        shape = self.window.param.ref.shape
        if self.padded != shape:
            array = jnp.pad(array, [(0, p - n) for n, p in zip(shape, self.padded, strict=True)])
        array = jnp.reshape(array, [n for _, n in self.parts])
        if not self._in_order:
            array = jnp.transpose(array, self.permutation)
        return jnp.reshape(array, self.shape)

    def restore(self, array: Any) -> Any:
        """The array in its own shape, from the array in this layout."""
        array = jnp.reshape(array, [self.parts[n][1] for n in self.permutation])
        if not self._in_order:
            array = jnp.transpose(array, [self.permutation.index(n) for n in range(len(self.permutation))])
        array = jnp.reshape(array, self.padded)
        shape = self.window.param.ref.shape
        return array if self.padded == shape else array[tuple(slice(n) for n in shape)]


def check_blocks(layout: Layout) -> None:
    """Refuse blocks that Mosaic cannot address.

    Source: "Grids and BlockSpecs" of the Pallas documentation: on TPUs the last two dims of a block must be divisible
    by 8 and 128, or equal the dims of the array.

    Raises:
      TargetError: the layout breaks the rule.
    """
    views = [v for v in layout.dims if not is_squeezed(v, layout.window.dims)]
    for view, unit in zip(views[-2:], (SUBLANES, LANES), strict=True):
        if view.block % unit and view.block < view.length:
            raise TargetError(
                f"a block of {layout.window.param.name} is not aligned to the tiles of vector memory",
                expected=f"a multiple of {unit} elements, or all {view.length} of the dim",
                got=f"{view.block} elements, in blocks of {list(layout.buffer)} of {list(layout.shape)}",
                fix="take blocks that are multiples of (8, 128), or report this: XLA should have split the dim",
            )


def is_squeezed(dim: LayoutDim, window_dims: Sequence[WindowDim]) -> bool:
    """True if the block in VMEM lacks a dim of the layout."""
    return dim.use == "place" or (dim.use == "tile" and window_dims[dim.dim].kind == "tiled")


def layout_of(window: Window, whole: bool = False) -> Layout:
    """The layout of a window's array in HBM.

    Args:
      window: the window.
      whole: True if all blocks must be whole, so that XLA pads the array; otherwise Pallas clips the last blocks.
    """
    ragged = any(r.size > 1 and n % r.size for r, n in zip(window.dims, window.param.ref.shape, strict=True))
    folded = None if whole and ragged else _folded(window)
    return folded or _general(window, whole)


def packing(dtype: DType) -> int:
    """The rows of a native tile of VMEM: 8 for 32-bit elements, 16 for 16 bits, 32 for 8 bits."""
    return SUBLANES * max(1, 4 // dtype.itemsize)


def _folded(window: Window) -> Layout | None:
    """[..., N, H] as [..., N * H], for a single position n and all of H, a multiple of the lanes; else None."""
    shape, window_dims = window.param.ref.shape, window.dims
    if (
        len(shape) < 3
        or window_dims[-2].kind != "at"
        or window_dims[-1].kind != "static"
        or shape[-1] % LANES
        or not shape[-1]
    ):
        return None
    kinds = [r.kind for r in window_dims[:-2]]
    front = [k in ("at", "rows") for k in kinds]
    vectors = [d for d in range(len(kinds)) if not front[d]]
    if front != sorted(front, reverse=True) or len(vectors) != 1:
        return None
    rows = vectors[0]
    if not _fits(window_dims[rows], shape[rows], SUBLANES):
        return None
    dims = [_plain(d, window_dims[d], shape[d]) for d in range(len(kinds))]
    folded = LayoutDim(len(shape) - 1, "fold", shape[-2] * shape[-1], shape[-1])
    parts = tuple(enumerate(shape))
    return Layout(window, (*dims, folded), shape, parts, tuple(range(len(shape))))


def _fits(window_dim: WindowDim, length: int, unit: int) -> bool:
    """True if Mosaic accepts the dim, unchanged, as one of the last two of a block."""
    if window_dim.kind == "tiled":
        return window_dim.size % unit == 0 or (tiles(length, window_dim.size) == 1 and window_dim.size == length)
    return window_dim.kind == "static" or (window_dim.kind == "aligned" and window_dim.size % unit == 0)


def _plain(d: int, window_dim: WindowDim, length: int) -> LayoutDim:
    """A dim that is neither split nor padded by XLA."""
    match window_dim.kind:
        case "at":
            return LayoutDim(d, "place", length, 1)
        case "rows":
            return LayoutDim(d, "row", length, length)
        case "tiled":
            return LayoutDim(d, "lane", length, window_dim.size)
        case "aligned":
            return LayoutDim(d, "lane", length, window_dim.size * tiles(length, window_dim.size))
        case "static":
            return LayoutDim(d, "lane", length, length)


def _general(window: Window, whole: bool) -> Layout:
    shape, window_dims = window.param.ref.shape, window.dims
    last = [d for d, window_dim in enumerate(window_dims) if window_dim.kind in ("tiled", "aligned", "static")][-2:]
    units = dict(zip(reversed(last), (LANES, packing(window.param.ref.dtype)), strict=False))
    padded, parts = list(shape), list[tuple[int, int]]()
    front, back = list[tuple[int, LayoutDim]](), list[tuple[int, LayoutDim]]()
    for d, (window_dim, length) in enumerate(zip(window_dims, shape, strict=True)):
        unit = units.get(d)
        if window_dim.kind in ("at", "rows"):
            front.append((len(parts), _plain(d, window_dim, length)))
            parts.append((d, length))
        elif (
            window_dim.kind == "static"
            or (unit is None and window_dim.kind == "tiled")
            or _fits(window_dim, length, unit or 1)
        ):
            if whole and window_dim.kind != "static":
                length = padded[d] = tiles(length, window_dim.size) * window_dim.size
            back.append((len(parts), _plain(d, window_dim, length)))
            parts.append((d, length))
        else:
            count = tiles(length, window_dim.size)
            padded[d] = count * window_dim.size
            front.append((len(parts), LayoutDim(d, "tile", count, count)))
            back.append((len(parts) + 1, LayoutDim(d, "lane", window_dim.size, window_dim.size)))
            parts += [(d, count), (d, window_dim.size)]
    units_added = [LayoutDim(-1, "unit", 1, 1)] * max(0, 2 - len(back))
    dims = (*(v for _, v in front), *units_added, *(v for _, v in back))
    return Layout(window, dims, tuple(padded), tuple(parts), tuple(n for n, _ in (*front, *back)))
