"""Windows: the part of an array that is in VMEM for an access of the block IR, dim by dim.

    at        one known position                → the dim is squeezed; the index map computes the position
    tiled     a whole tile at a known position  → a block of the tile's size; the index map computes its number
    static    constant positions                → all of the dim is in VMEM, sliced at constant positions
    aligned   a tile at an unknown multiple     → all of the dim is in VMEM, sliced at multiples of the tile's size
    rows      any positions                     → all of the dim is in VMEM, accessed row by row

*Known* means that index maps can compute it, see `scalars`. An input has one operand for each of its windows. An
output has one window for all of its accesses.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import field
from typing import Literal

from tilekern.ir.core import Value, cdiv
from tilekern.ir.memory import Dim, MemoryOp, Position
from tilekern.ir.records import record
from tilekern.lower.mosaic.plan.scalars import Scalars

Kind = Literal["at", "tiled", "static", "aligned", "rows"]


@record
class WindowDim:
    """One dim of a window.

    Attributes:
      kind: see the module.
      size: the elements of a tile, for "tiled" and "aligned"; 1 for "at".
      key: the key of the position, for "at" and "tiled"; equal keys mean equal positions.
      position, operands: the position, and the values of its terms.
    """

    kind: Kind
    size: int = 0
    key: Hashable = None
    position: Position = field(default=Position(), compare=False)
    operands: tuple[Value, ...] = field(default=(), compare=False)


@record
class Window:
    """The part of an array that is in VMEM for an access."""

    param: Value
    dims: tuple[WindowDim, ...]


def window_of(op: MemoryOp, scalars: Scalars) -> Window:
    """The narrowest window of an access."""
    shape = op.ref.ref.shape
    pairs = zip(op.access.dims, shape, strict=True)
    return Window(op.ref, tuple(_role(dim, length, op, scalars) for dim, length in pairs))


def _role(dim: Dim, length: int, op: MemoryOp, scalars: Scalars) -> WindowDim:
    position = dim.position
    if dim.kind == "gather" or length == 0:
        return WindowDim("rows") if length else WindowDim("static")
    if not position.terms:
        return WindowDim("static")
    key = scalars.position_key(position, op.positions)
    if dim.kind == "index":
        return WindowDim("rows") if key is None else WindowDim("at", 1, key, position, op.positions)
    if not position.is_multiple_of(dim.size):
        return WindowDim("rows")
    if key is None:
        return WindowDim("aligned", dim.size)
    return WindowDim("tiled", dim.size, key, position, op.positions)


def merge(windows: Sequence[Window]) -> Window:
    """The narrowest window that contains several windows of one array."""
    first = windows[0]
    window_dims = tuple(_merged(window_dims) for window_dims in zip(*(w.dims for w in windows), strict=True))
    return Window(first.param, window_dims)


def _merged(window_dims: Sequence[WindowDim]) -> WindowDim:
    if len(set(window_dims)) == 1:
        return window_dims[0]
    kinds = {r.kind for r in window_dims}
    sizes = {r.size for r in window_dims}
    if kinds <= {"tiled", "aligned"} and len(sizes) == 1:
        return WindowDim("aligned", window_dims[0].size)
    return WindowDim("rows")


def make_resident(window: Window, scalars: Scalars, axes: frozenset[Value] | None = None) -> Window:
    """The window with all dims in VMEM as a whole; given `axes`, only the dims that move along any of `axes`."""
    return Window(
        window.param,
        tuple(
            resident_dim(window_dim) if axes is None or axes & _axes(window_dim, scalars) else window_dim
            for window_dim in window.dims
        ),
    )


def resident_dim(window_dim: WindowDim) -> WindowDim:
    """The dim of a window with all of the array's dim in VMEM."""
    return {"tiled": WindowDim("aligned", window_dim.size), "at": WindowDim("rows")}.get(window_dim.kind, window_dim)


def axes_of(window: Window, scalars: Scalars) -> frozenset[Value]:
    """The indices, of the grid and of stepped loops, that move a window's block."""
    return frozenset[Value]().union(*(_axes(window_dim, scalars) for window_dim in window.dims))


def _axes(window_dim: WindowDim, scalars: Scalars) -> frozenset[Value]:
    return frozenset[Value]().union(*(scalars.axes(window_dim.operands[t.operand]) for t in window_dim.position.terms))


def tiles(length: int, size: int) -> int:
    """The number of tiles of a dim; 1 for an empty dim, which is never read."""
    return max(1, cdiv(length, size))
