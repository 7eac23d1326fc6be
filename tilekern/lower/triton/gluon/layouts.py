"""Layouts of tiles in registers, as text.

A product of matrices decides the layout of its result, and of the tiles of its shape that are computed with it. A
reduction gives a slice of its operand's layout. All other tiles have Gluon's automatic layout, which Gluon infers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tilekern.ir.compute import Bitcast, Constant, Convert, Dot, Reduce, Select
from tilekern.ir.control import Fold, Switch
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Store
from tilekern.ir.records import record
from tilekern.ir.shape import Broadcast, Iota
from tilekern.lower.triton.emit.source_text import Expr

_POINTWISE = (Bitcast, Convert, Elementwise, Select)


@record
class Sliced:
    """The layout of a vector: a product's layout without one dim.

    Attributes:
      dim: the dim.
      columns: columns of the tile.
    """

    dim: int
    columns: int

    def __str__(self) -> str:
        return f"gl.SliceLayout({self.dim}, {matrix_layout(self.columns)})"


def matrix_layout(columns: int) -> str:
    """The name of the layout of products with so many columns."""
    return f"mma_{columns}"


def definition(columns: int, cluster: int = 1) -> str:
    """The statement that defines `matrix_layout`: each warp of a warpgroup has 16 of 64 rows.

    The source is PTX ISA, "wgmma", fragments. The thread blocks of a cluster divide the rows.
    """
    blocks = ", [[1, 0]]" if cluster > 1 else ""
    layout = f"gl.NVMMADistributedLayout([3, 0], [4, 1], [16, {columns}, 16]{blocks})"
    return f"{matrix_layout(columns)}: gl.constexpr = {layout}"


def vector_layout(warps: int, cluster: int = 1) -> str:
    """A layout of a vector that no tile decides; each thread block of a cluster has all of it."""
    return f"gl.BlockedLayout([1], [32], [{warps}], [0]{', [[0]]' if cluster > 1 else ''})"


def with_vector_layout(operands: Sequence[Expr], warps: int, cluster: int) -> list[Expr]:
    """The operands of a reduction; Gluon cannot infer the layout of a vector that is reduced to a scalar."""
    if len(operands[0].shape) != 1:
        return list(operands)
    return [Expr(f"tl.set_auto_layout({operands[0].text}, {vector_layout(warps, cluster)})", operands[0].shape)]


def row_layout(columns: int) -> str:
    """A layout of rows in which a thread of a warpgroup has 16 bytes of 16-bit elements side by side."""
    row_threads = min(columns // 8, 32)
    return f"gl.BlockedLayout([1, 8], [{32 // row_threads}, {row_threads}], [4, 1], [1, 0])"


def rows_at_once(rows: int, columns: int) -> int:
    """Rows of which a thread of a warpgroup has 16 elements; 8 at least, the unit of swizzles in shared memory."""
    return min(rows, max(8, 2048 // columns))


class Layouts:
    """The layouts of the values of a Func.

    Args:
      func: the Func.
      plain: the layout of stored vectors that are made of constants and consecutive numbers: Gluon cannot infer one.

    Attributes:
      numbers: vectors of consecutive numbers.
    """

    def __init__(self, func: Func, plain: str) -> None:
        self._shapes = {op.result.tile.shape for op in func.walk() if isinstance(op, Dot)}
        self.numbers = {op.result for op in func.walk() if isinstance(op, Iota) and len(op.shape) == 1}
        self._vectors: dict[Value, Sliced | str] = {}
        while self._propagate(func):
            pass
        undecided = _undecided(func)
        for op in func.walk():
            if isinstance(op, Store) and op.value in undecided:
                self._vectors.setdefault(op.value, plain)
        while self._propagate(func):
            pass

    @property
    def columns(self) -> list[int]:
        """The numbers of columns of all products."""
        return sorted({shape[1] for shape in self._shapes})

    def of(self, value: Value) -> str | None:
        """The layout of a value; None if Gluon infers it."""
        if value.tile.shape in self._shapes:
            return matrix_layout(value.tile.shape[1])
        layout = self._vectors.get(value)
        return None if layout is None else str(layout)

    def expanded(self, op: Broadcast) -> str | None:
        """The layout that a vector must have to be broadcast to the shape of a product."""
        if op.shape not in self._shapes or len(op.dims) != 1:
            return None
        return str(Sliced(1 - op.dims[0], op.shape[1]))

    def _propagate(self, func: Func) -> bool:
        """Hand layouts on from values to values; True if any vector got a layout."""
        before = len(self._vectors)
        for op in func.walk():
            for group in _alike(op):
                layout = next((self._vectors[v] for v in group if v in self._vectors), None)
                if layout is not None:
                    for value in group:
                        self._demand(value, layout)
            if isinstance(op, Broadcast) and len(op.dims) == 1 and op.shape in self._shapes:
                self._demand(op.operands[0], Sliced(1 - op.dims[0], op.shape[1]))
            if isinstance(op, Reduce) and op.operands[0].tile.shape in self._shapes and len(op.dims) == 1:
                self._demand(op.result, Sliced(op.dims[0], op.operands[0].tile.shape[1]))
        return len(self._vectors) > before

    def _demand(self, value: Value, layout: Sliced | str) -> None:
        """Give a vector a layout, if it has none; consecutive numbers are made anew in each layout."""
        if len(value.tile.shape) == 1 and value not in self.numbers:
            self._vectors.setdefault(value, layout)


def _undecided(func: Func) -> set[Value]:
    """Vectors that are made of scalars and consecutive numbers alone."""
    found = set[Value]()
    for op in func.walk():
        makes_vector = isinstance(op, (*_POINTWISE, Broadcast, Constant, Iota)) and len(op.result.tile.shape) == 1
        if makes_vector and all(v in found for v in op.operands if v.tile.shape):
            found.add(op.result)
    return found


def _alike(op: Op) -> Iterator[tuple[Value, ...]]:
    """Values with one layout: the result of a function and its operands, and the carries of a loop."""
    if isinstance(op, _POINTWISE):
        # An operand may be converted, but the result is where its first operand is.
        if any(len(v.tile.shape) == 1 for v in op.operands):
            yield from (((op.operands[n], op.result)) for n in range(len(op.operands)))
    elif isinstance(op, Fold):
        yield from zip(op.results, op.body.results, op.body.args[1:], strict=True)
    elif isinstance(op, Switch):
        yield from zip(op.results, *(region.results for region in op.regions), strict=True)
