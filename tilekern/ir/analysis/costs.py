"""The work of a Func: operations and bytes, counted as XLA's `HloCostAnalysis` counts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from tilekern.ir.analysis.iterations import Iterations
from tilekern.ir.compute import Bitcast, Constant, Convert, Dot, Reduce, Select
from tilekern.ir.control import Fold, Hoist, Switch, While
from tilekern.ir.core import Array, Axis, Block, Func, Op, Value, unknown_op
from tilekern.ir.debug import Assert, Print
from tilekern.ir.derivatives import Custom, Stop
from tilekern.ir.dynamic import DynamicSlice, DynamicUpdateSlice, Take
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Atomic, Load, MemoryOp
from tilekern.ir.ordering import ArgReduce, LinearScan, Scan, Sort, TopK
from tilekern.ir.records import record
from tilekern.ir.shape import Broadcast, Concatenate, Iota, Pad, Reshape, Reverse, Slice, Transpose
from tilekern.ir.types import DType, kind_of

TRANSCENDENTAL = frozenset(
    """
    pow atan2 exp exp2 expm1 log log2 log1p sqrt rsqrt cbrt logistic sin cos tan asin acos atan sinh cosh tanh
    asinh acosh atanh erf erfc erf_inv lgamma
    """.split()  # noqa: SIM905 -- the formatter gives each name of a list a line
)
"""Float functions that XLA counts apart, for each is several floating-point operations."""


@record
class Cost:
    """The work of a call of a kernel, in all its programs. Of the target, only its blocks have an influence.

    Attributes:
      flops: floating-point operations: one for each element of an arithmetic op or a comparison of floats, and two for
        each product of a dot, also of integers. Other ops on integers, conversions and selects count 0.
      transcendentals: elements of functions such as exp, log, sqrt and tanh, which do not count as flops.
      bytes_accessed: bytes of arrays that are read, plus bytes of arrays that are written. An array counts once,
        however many programs load it. If all loads together are less than the array, the loads count.

    Example:
      >>> import jax, jax.numpy as jnp, tilekern as tk
      >>> @tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
      ... def gelu(x, out, *, block: tk.Block = 128):
      ...     i = tk.parallel(x.shape[0], block)
      ...     out[i] = x[i] * jnp.tanh(x[i])
      >>> gelu.trace(jnp.ones(1000)).cost()
      Cost(flops=1000, transcendentals=1000, bytes_accessed=8000)
    """

    flops: int
    transcendentals: int
    bytes_accessed: int


@record
class Work:
    """The work of a call of a kernel in more detail.

    Attributes:
      cost: operations, and bytes of arrays that count once.
      dots: by the dtype of the left operand the operations of dots, a part of `cost.flops`.
      accessed: bytes that loads and stores move, however often they move the same element.
    """

    cost: Cost
    dots: Mapping[DType, int]
    accessed: int


@record
class OpWork:
    """The work of one op in all programs.

    Attributes:
      flops: operations of floats, with the operations of dots.
      dots: operations of a dot.
      transcendentals: elements of functions such as exp.
      elements: elements that an access reads or writes.
      array: the array of an access.
    """

    flops: float
    dots: float
    transcendentals: float
    elements: float
    array: Value | None

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the array."""
        return 0 if self.array is None else self.array.ref.dtype.itemsize


def work_by_op(func: Func, arrays: Mapping[Value, Array] | None = None) -> Mapping[Op, OpWork]:
    """The work of each op. All branches of a switch count. The arguments are as in `work_of`."""
    counts = _Counts(Iterations(func, arrays))
    counts.block(func.body, math.prod(_tiles(axis) for axis in func.axes))
    works: dict[Op, OpWork] = {}
    for op, times in counts.times.items():
        work = _of_op(op, times)
        array = op.ref if isinstance(op, MemoryOp) else None
        elements = sum(n for key, n in work.items() if isinstance(key, tuple) and key[0] in ("r", "w"))
        dots = work["flops"] if isinstance(op, Dot) else 0.0
        works[op] = OpWork(work.get("flops", 0.0), dots, work.get("transcendentals", 0.0), elements, array)
    return works


def cost_of(func: Func) -> Cost:
    """The cost of a Func; see `work_of`."""
    return work_of(func).cost


def work_of(func: Func, arrays: Mapping[Value, Array] | None = None) -> Work:
    """The work of a Func.

    A grid's lanes outside of its extents do not count. Folds count their tiles, by bounds that depend on indices
    exactly or by a sample of programs, and by bounds that depend on data as if these were random (`Iterations`). A
    while counts once, and a switch as its most costly branch, as in XLA.

    Args:
      func: the Func.
      arrays: by param, arrays whose values are known: bounds that are loaded from them count exactly.
    """
    counts = _Counts(Iterations(func, arrays))
    work = counts.block(func.body, math.prod(_tiles(axis) for axis in func.axes))
    moved_bytes = accessed = 0.0
    for param in func.params:
        ref = param.ref
        whole = math.prod(ref.shape)
        written = whole if ref.role in ("zeros", "sum") else min(work["w", param], whole)
        moved_bytes += (min(work["r", param], whole) + written) * ref.dtype.itemsize
        accessed += (work["r", param] + work["w", param]) * ref.dtype.itemsize
    cost = Cost(round(work["flops"]), round(work["transcendentals"]), round(moved_bytes))
    dots = {op.operands[0].tile.dtype for op in func.walk() if isinstance(op, Dot)}
    return Work(cost, {dtype: round(work["dot", dtype]) for dtype in dots}, round(accessed))


def _tiles(axis: Axis) -> float:
    """The number of tiles; the last tile counts by its part inside of the extent."""
    return axis.extent / axis.block


type _Counter = Counter[object]


class _Counts:
    def __init__(self, iterations: Iterations) -> None:
        self._iterations = iterations
        self.times: dict[Op, float] = {}

    def block(self, block: Block, times: float) -> _Counter:
        """The flops of a block that runs `times` times, and for each array the elements read and written."""
        work = Counter[object]()
        for op in block.ops:
            self.times[op] = times
            inner = times * self._iterations.of(op) if isinstance(op, Fold) else times
            regions = [self.block(region, inner) for region in op.regions]
            if isinstance(op, Switch):
                regions = [_most(regions)]
            for part in (*regions, _of_op(op, times)):
                work.update(part)
        return work


def _most(branches: Iterable[_Counter]) -> _Counter:
    """For each kind of work, the greatest count of any branch."""
    greatest = Counter[object]()
    for counts in branches:
        greatest |= counts
    return greatest


def _of_op(op: Op, times: float) -> Mapping[object, Any]:
    match op:
        case Dot():
            lhs = op.operands[0].tile
            flops = times * 2 * op.result.tile.size * math.prod(lhs.shape[d] for d in op.contract[0])
            return {"flops": flops, ("dot", lhs.dtype): flops}
        case MemoryOp():
            elements = times * math.prod(op.access.shape)
            ways = "r" if isinstance(op, Load) else "rw" if isinstance(op, Atomic) else "w"
            return {(way, op.ref): elements for way in ways}
        case Elementwise() | Reduce() | ArgReduce() | Scan() | LinearScan() | Sort() | TopK():
            kind = "transcendentals" if isinstance(op, Elementwise) and op.function in TRANSCENDENTAL else "flops"
            return {kind: times * _operations(op)} if _on_floats(op) else {}
        case _ if isinstance(op, _FREE):
            return {}
        case _:
            raise unknown_op(op, __name__)


# Ops that XLA does not count. The ops of their blocks count.
_FREE = (
    *(Constant, Iota, Convert, Bitcast, Select, Stop, Custom),
    *(Broadcast, Reshape, Transpose, Slice, Reverse, Concatenate, Pad, DynamicSlice, DynamicUpdateSlice, Take),
    *(Fold, While, Switch, Hoist, Print, Assert),
)


def _on_floats(op: Op) -> bool:
    return kind_of(op.operands[0].tile.dtype) == "float"


def _operations(op: Op) -> int:
    """The number of operations on elements in an op on floats; a sort takes one for each element and halving."""
    tile = op.operands[0].tile
    if isinstance(op, Reduce | ArgReduce):
        return max(0, tile.size - op.results[0].tile.size)
    if isinstance(op, LinearScan):
        return 2 * tile.size
    return tile.size * tile.shape[op.dim].bit_length() if isinstance(op, Sort | TopK) else tile.size
