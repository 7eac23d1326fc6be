"""Transposition of the pure ops that are linear in some operands: one rule a class of op.

The cotangent of a value of dtype `d` has the dtype `accumulator(d)`, as its tangent has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Literal

from tilekern.autodiff.order import Define, is_permutation, order_of, put_back
from tilekern.autodiff.scans import shifted
from tilekern.autodiff.tangents import dot_dtype, wide
from tilekern.ir.compute import Bitcast, Constant, Convert, Dot, Reduce, Select
from tilekern.ir.core import Op, Value, unknown_op
from tilekern.ir.derivatives import Custom, Stop
from tilekern.ir.dynamic import DynamicSlice, DynamicUpdateSlice, Take
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.make import Make
from tilekern.ir.ordering import ArgReduce, LinearScan, Scan, Sort, TopK
from tilekern.ir.records import record
from tilekern.ir.shape import Broadcast, Concatenate, Iota, Pad, Reshape, Reverse, Slice, Transpose
from tilekern.ir.types import BOOL, TileType, accumulator

Fixed = Sequence[Value | None]


@record
class Site:
    """An op to transpose: `fixed` holds the operands in which the op is not linear, None for its linear operands."""

    fixed: Fixed
    linear: Sequence[bool]
    make: Make
    define: Define

    def operand(self, number: int) -> Value:
        """Operand number `number`, in which the op is not linear."""
        value = self.fixed[number]
        assert value is not None
        return value


Rule = Callable[[Any, Site, Value], list[Value | None]]


def cotangents(
    op: Op, fixed: Fixed, linear: Sequence[bool], cotangent: Value, make: Make, define: Define
) -> list[Value | None]:
    """The cotangent of each operand in which a pure op is linear; None for other operands.

    Args:
      op: an op of the Func that is transposed, linear in the marked operands together.
      fixed: the operands in which it is not linear, in the new function; None for linear operands.
      linear: True for each operand in which the op is linear.
      cotangent: the cotangent of its result, of dtype `accumulator(dtype)`.
      make: adds ops to the new function.
      define: maps a value of the new function to the op that defines it, an argument to None.
    """
    rule = RULES.get(type(op))
    assert rule is not None, f"{op.name} is linear in no operand"
    operand_cotangents = rule(op, Site(fixed, linear, make, define), cotangent)
    return [c if is_linear else None for c, is_linear in zip(operand_cotangents, linear, strict=True)]


def is_linear(op: Op, linear: Sequence[bool]) -> bool:
    """True if the result of a pure op is linear in the marked operands together, but for a constant."""
    match op:
        case Elementwise():
            if op.function in ("mul", "div"):
                return tuple(linear) in ((True, False), (False, op.function == "mul"))
            return op.function in ("add", "sub", "neg")
        case Dot():
            return not all(linear)
        case Reduce() | Scan():
            return op.monoid == "sum"
        case LinearScan():
            return not linear[0]
        case Sort():
            return not any(linear[: op.num_keys])
        case _ if isinstance(op, NOT_LINEAR):
            return False
        case _ if type(op) in RULES:
            return True
        case _:
            raise unknown_op(op, __name__)


# --- arithmetic ------------------------------------------------------------------------------------------------------


def _elementwise(op: Elementwise, at: Site, c: Value) -> list[Value | None]:
    of, dtype = at.make.of, c.tile.dtype
    match op.function:
        case "add":
            return [c, c]
        case "sub":
            return [c, of("neg", c) if at.linear[1] else None]
        case "neg":
            return [of("neg", c)]
        case "mul":
            assert tuple(at.linear) in ((True, False), (False, True)), "a product of linear values is not linear"
            factor = at.make.convert(at.operand(at.linear.index(False)), dtype)
            return [of("mul", c, factor)] * 2
        case "div":
            assert not at.linear[1], "a quotient is not linear in its divisor"
            return [of("div", c, at.make.convert(at.operand(1), dtype)), None]
        case _:
            raise AssertionError(f"{op.function} is linear in no operand")


def _select(op: Select, at: Site, c: Value) -> list[Value | None]:
    predicate = at.operand(0)
    on_true = at.make.select(predicate, c, 0) if at.linear[1] else None
    return [None, on_true, at.make.select(predicate, 0, c) if at.linear[2] else None]


def _convert(op: Convert, at: Site, c: Value) -> list[Value | None]:
    return [at.make.convert(c, accumulator(op.operands[0].tile.dtype))]


def _dot(op: Dot, at: Site, c: Value) -> list[Value | None]:
    """The cotangent of the result times the fixed operand, contracted along the free dims of the fixed operand."""
    assert tuple(at.linear) in ((True, False), (False, True)), "a product of linear values is not linear"
    side: Literal[0, 1] = 0 if at.linear[0] else 1
    far: Literal[0, 1] = 1 if at.linear[0] else 0
    dtype = dot_dtype(at.operand(far).tile.dtype)
    batch = len(op.batch[side])
    begin = batch + (len(op.free(0)) if far else 0)
    free = tuple(range(begin, begin + len(op.free(far))))
    factors = [at.make.convert(at.operand(far), dtype), at.make.convert(c, dtype)]
    contract, pairs = (op.free(far), free), (op.batch[far], tuple(range(batch)))
    # The dims of the product: batch, contracted dims as the other side orders them, free dims of the linear side. The
    # sides stay in their order, so that a product of matrices needs no transposition.
    paired = dict(zip(op.contract[far], op.contract[side], strict=True))
    inner = tuple(paired[d] for d in sorted(paired))
    order = (*op.batch[side], *inner, *op.free(side))
    if side == 0:
        factors, contract, pairs = factors[::-1], contract[::-1], pairs[::-1]
        order = (*op.batch[side], *op.free(side), *inner)
    product = at.make.add(Dot, *factors, contract=contract, batch=pairs, precision=op.precision)
    whole = at.make.transpose(product, tuple(order.index(d) for d in range(len(order))))
    return [whole, whole]


def _reduce(op: Reduce, at: Site, c: Value) -> list[Value | None]:
    assert op.monoid == "sum", f"reduce {op.monoid} is not linear"
    shape = op.operands[0].tile.shape
    return [at.make.broadcast(c, shape, tuple(d for d in range(len(shape)) if d not in op.dims))]


def _scan(op: Scan, at: Site, c: Value) -> list[Value | None]:
    assert op.monoid == "sum", f"scan {op.monoid} is not linear"
    return [at.make.add(Scan, c, monoid="sum", dim=op.dim, reverse=not op.reverse)]


def _linear_scan(op: LinearScan, at: Site, c: Value) -> list[Value | None]:
    """g_i = c_i + a_{i+1} g_{i+1}: a linear scan the other way, with the factors of the next elements."""
    assert not at.linear[0], "a linear scan is not linear in its factors"
    factors = shifted(at.operand(0), op.dim, 1 if op.reverse else -1, 0, at.make)
    return [None, at.make.add(LinearScan, factors, c, dim=op.dim, reverse=not op.reverse)]


# --- movement to fixed places ----------------------------------------------------------------------------------------


def _broadcast(op: Broadcast, at: Site, c: Value) -> list[Value | None]:
    shape = op.operands[0].tile.shape
    of_operand = dict(zip(op.dims, shape, strict=True))
    dims = tuple(d for d, n in enumerate(op.shape) if n not in (1, of_operand.get(d)))
    total = at.make.add(Reduce, c, monoid="sum", dims=dims) if dims else c
    return [at.make.reshape(total, shape)]


def _reshape(op: Reshape, at: Site, c: Value) -> list[Value | None]:
    return [at.make.reshape(c, op.operands[0].tile.shape)]


def _transpose(op: Transpose, at: Site, c: Value) -> list[Value | None]:
    return [at.make.transpose(c, tuple(op.permutation.index(d) for d in range(len(op.permutation))))]


def _reverse(op: Reverse, at: Site, c: Value) -> list[Value | None]:
    return [at.make.again(op, c)]


def _slice(op: Slice, at: Site, c: Value) -> list[Value | None]:
    """Zeros around, and between, the elements that the slice takes."""
    pairs = zip(op.start, c.tile.shape, op.stride, op.operands[0].tile.shape, strict=True)
    high = tuple(n - start - (max(count - 1, 0) * stride + min(count, 1)) for start, count, stride, n in pairs)
    return [_padded(at.make, c, op.start, high, tuple(n - 1 for n in op.stride))]


def _padded(make: Make, x: Value, low: tuple[int, ...], high: tuple[int, ...], interior: tuple[int, ...]) -> Value:
    if not any((*low, *high, *interior)):
        return x
    zero = make.number(0, TileType((), x.tile.dtype))
    return make.add(Pad, x, zero, low=low, high=high, interior=interior)


def _concatenate(op: Concatenate, at: Site, c: Value) -> list[Value | None]:
    parts, begin = list[Value | None](), 0
    for value, is_linear in zip(op.operands, at.linear, strict=True):
        end = begin + value.tile.shape[op.dim]
        parts.append(at.make.part(c, op.dim, begin, end) if is_linear else None)
        begin = end
    return parts


def _pad(op: Pad, at: Site, c: Value) -> list[Value | None]:
    return [_unpadded(op, at.make, c) if at.linear[0] else None, _padding(op, at.make, c) if at.linear[1] else None]


def _unpadded(op: Pad, make: Make, c: Value) -> Value:
    """The elements of `c` at the places of the operand; zeros for elements that were cut off."""
    shape = op.operands[0].tile.shape
    low, high = (tuple(-n for n in amounts) for amounts in (op.low, op.high))
    grown = _padded(make, c, tuple(max(n, 0) for n in low), tuple(max(n, 0) for n in high), (0,) * len(shape))
    start = tuple(max(-n, 0) for n in low)
    stop = tuple(n - max(-h, 0) for n, h in zip(grown.tile.shape, high, strict=True))
    stride = tuple(n + 1 for n in op.interior)
    if (start, stop, stride) == ((0,) * len(shape), grown.tile.shape, (1,) * len(shape)):
        return grown
    return make.add(Slice, grown, start=start, stop=stop, stride=stride)


def _padding(op: Pad, make: Make, c: Value) -> Value:
    """The sum of `c` over the places of the padding."""
    inside = make.number(False, TileType(op.operands[0].tile.shape, BOOL))
    is_padding = make.again(op, inside, make.number(True, TileType((), BOOL)))
    chosen = make.select(is_padding, c, 0)
    return make.add(Reduce, chosen, monoid="sum", dims=tuple(range(len(c.tile.shape))))


# --- movement to computed places -------------------------------------------------------------------------------------


def _dynamic_slice(op: DynamicSlice, at: Site, c: Value) -> list[Value | None]:
    zeros = at.make.number(0, wide(op.operands[0].tile))
    starts = [at.operand(n) for n in range(1, len(op.operands))]
    return [at.make.add(DynamicUpdateSlice, zeros, c, *starts), *(None for _ in starts)]


def _dynamic_update_slice(op: DynamicUpdateSlice, at: Site, c: Value) -> list[Value | None]:
    starts = [at.operand(n) for n in range(2, len(op.operands))]
    sizes = op.operands[1].tile.shape
    zeros = at.make.number(0, TileType(sizes, c.tile.dtype))
    of_tile = at.make.again(op, c, zeros, *starts) if at.linear[0] else None
    of_update = at.make.add(DynamicSlice, c, *starts, sizes=sizes) if at.linear[1] else None
    return [of_tile, of_update, *(None for _ in starts)]


def _take(op: Take, at: Site, c: Value) -> list[Value | None]:
    """For each place, the sum of the elements that were taken from it; a permutation is undone, without sums."""
    indices, shape = at.operand(1), op.operands[0].tile.shape
    if op.along and indices.tile.shape == shape and is_permutation(indices, op.dim, at.define):
        return [put_back(c, indices, op.dim, at.make), None]
    place = at.make.of("min", at.make.of("max", indices, 0), shape[op.dim] - 1)
    add_up = _along if op.along else _table
    return [add_up(place, c, op.dim, shape, at.make), None]


def _along(place: Value, c: Value, dim: int, shape: tuple[int, ...], make: Make) -> Value:
    """Sums by place along a dim, each line by its own places: compared with a further dim, behind `dim`."""
    count = c.tile.shape[dim]
    if count == 0:
        return make.number(0, TileType(shape, c.tile.dtype))
    grown = (*shape[:dim], count, *shape[dim:])
    dims = tuple(d for d in range(len(grown)) if d != dim + 1)
    is_place = make.of("eq", make.broadcast(place, grown, dims), make.lanes(grown, dim + 1))
    chosen = make.select(is_place, make.broadcast(c, grown, dims), 0)
    return make.reshape(chosen, shape) if count == 1 else make.reduce(chosen, "sum", dim)


def _table(place: Value, c: Value, dim: int, shape: tuple[int, ...], make: Make) -> Value:
    """Sums by place along a dim, all lines by the same places: a dot with the one-hot tile of the places."""
    outer, inner = shape[:dim], shape[dim + 1 :]
    count, length = prod(place.tile.shape), shape[dim]
    rows, places = make.reshape(c, (*outer, count, *inner)), make.reshape(place, (count,))
    if count == 1:
        is_place = make.of("eq", make.broadcast(make.reshape(place, ()), shape, ()), make.lanes(shape, dim))
        return make.select(is_place, make.broadcast(rows, shape, tuple(range(len(shape)))), 0)
    lanes = (count, length)
    is_place = make.of("eq", make.along(places, lanes, 0), make.lanes(lanes, 1))
    one_hot = make.convert(is_place, c.tile.dtype)
    sums = make.add(Dot, one_hot, rows, contract=((0,), (dim,)))
    order = (*range(1, dim + 1), 0, *range(dim + 1, len(shape)))
    return make.transpose(sums, order)


def _sort(op: Sort, at: Site, c: Value) -> list[Value | None]:
    """The picked operand gets the cotangent; it is no key."""
    assert not any(at.linear[: op.num_keys]), "a sort is not linear in its keys"
    keys = [at.operand(n) for n in range(op.num_keys)]
    operand_cotangents: list[Value | None] = [None for _ in op.operands]
    operand_cotangents[op.pick] = put_back(c, order_of(op, keys, at.make), op.dim, at.make)
    return operand_cotangents


RULES: dict[type[Op], Rule] = {
    Elementwise: _elementwise,
    Select: _select,
    Convert: _convert,
    Dot: _dot,
    Reduce: _reduce,
    Scan: _scan,
    LinearScan: _linear_scan,
    Broadcast: _broadcast,
    Reshape: _reshape,
    Transpose: _transpose,
    Reverse: _reverse,
    Slice: _slice,
    Concatenate: _concatenate,
    Pad: _pad,
    DynamicSlice: _dynamic_slice,
    DynamicUpdateSlice: _dynamic_update_slice,
    Take: _take,
    Sort: _sort,
}
"""The rule of each class of op that is linear in some operand."""

NOT_LINEAR = (Constant, Iota, Bitcast, ArgReduce, TopK, Stop, Custom)
"""The other pure ops. A tangent has none of them on its way, for their own tangents are zero, or made of other ops."""
