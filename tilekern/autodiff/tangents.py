"""Tangents of the pure ops: one rule a class of op. Formulas, and conventions at ties and edges, are JAX's.

Only floats have tangents. The tangent of a value of dtype `d` has the dtype `accumulator(d)`, so that sums are wide.
Every rule is linear in tangents, by ops that `cotangents` transposes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from tilekern import source
from tilekern.autodiff.elementwise import ROWS, Point, moved
from tilekern.autodiff.order import order_of
from tilekern.autodiff.scans import other_factors, scanned, shifted
from tilekern.errors import NotDifferentiableError
from tilekern.ir.compute import Bitcast, Constant, Convert, Dot, Reduce, Select
from tilekern.ir.core import Op, Value
from tilekern.ir.derivatives import Custom, Stop
from tilekern.ir.dynamic import DynamicSlice, DynamicUpdateSlice, Take
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.make import Make
from tilekern.ir.ordering import ArgReduce, LinearScan, Scan, Sort, TopK
from tilekern.ir.shape import Broadcast, Concatenate, Iota, Pad, Reshape, Reverse, Slice, Transpose
from tilekern.ir.types import BF16, DType, TileType, accumulator, is_float8, kind_of

Moving = Sequence[Value | None]
Rule = Callable[[Any, Sequence[Value], Value, Moving, Make], Value | None]


def tangents(
    op: Op, primals: Sequence[Value], results: Sequence[Value], moving: Moving, make: Make
) -> list[Value | None]:
    """The tangent of each result of a pure op; None stands for zero.

    Args:
      op: an op of the Func that is differentiated.
      primals: its operands in the new function.
      results: its results in the new function.
      moving: the tangent of each operand, of dtype `accumulator(dtype)`.
      make: adds ops to the new function.

    Raises:
      NotDifferentiableError: the op has no rule, at the user's line.
    """
    if is_flat(op) or all(t is None for t in moving):
        return [None for _ in op.results]
    rule = RULES.get(type(op))
    if rule is None:
        raise no_rule(op, op.name)
    return [rule(op, primals, results[0], moving, make)]


def is_flat(op: Op) -> bool:
    """True for a pure op whose tangent is zero: its results are no floats, or change only in steps."""
    if isinstance(op, FLAT) or all(kind_of(r.tile.dtype) != "float" for r in op.results):
        return True
    return isinstance(op, Elementwise) and not any(ROWS.get(op.function, (True,)))


def wide(tile: TileType) -> TileType:
    """The type of a tangent or a cotangent of a tile of floats."""
    return TileType(tile.shape, accumulator(tile.dtype))


def dot_dtype(dtype: DType) -> DType:
    """The dtype of both operands of a dot of a tangent, or a cotangent, by a tile of `dtype`."""
    return BF16 if is_float8(dtype) else dtype


def no_rule(op: Op, name: str) -> NotDifferentiableError:
    """The error for an op without a rule, at the user's line."""
    with source.at(op.loc):
        return NotDifferentiableError(
            f"{name} has no derivative rule",
            expected="functions whose derivatives are functions of the language",
            got=f"{name} of {op.operands[0].type}",
            fix="stop the gradient of its operand with jax.lax.stop_gradient, or state the kernel's rule with defjvp",
        )


# --- the rules -------------------------------------------------------------------------------------------------------


def _elementwise(op: Elementwise, primals: Sequence[Value], result: Value, moving: Moving, make: Make) -> Value | None:
    row = ROWS.get(op.function)
    if row is None:
        raise no_rule(op, op.function)
    dtype = accumulator(result.tile.dtype)
    point = Point(make, op.function, [make.convert(v, dtype) for v in primals], result)
    return moved(point, row, moving)


def _select(op: Select, primals: Sequence[Value], result: Value, moving: Moving, make: Make) -> Value:
    return make.select(primals[0], *_whole(moving, primals, make)[1:])


def _convert(op: Convert, primals: Sequence[Value], result: Value, moving: Moving, make: Make) -> Value:
    assert moving[0] is not None
    return make.convert(moving[0], accumulator(op.dtype))


def _dot(op: Dot, primals: Sequence[Value], result: Value, moving: Moving, make: Make) -> Value:
    """The sum of the dots in which one operand is replaced by its tangent, in the dtype of the other operand."""
    terms: list[Value] = []
    for side, tangent in enumerate(moving):
        if tangent is not None:
            sides = [tangent, primals[1]] if side == 0 else [primals[0], tangent]
            dtype = dot_dtype(primals[1 - side].tile.dtype)
            terms.append(make.again(op, *(make.convert(v, dtype) for v in sides)))
    return reduce(lambda a, b: make.of("add", a, b), terms)


def _reduce(op: Reduce, primals: Sequence[Value], result: Value, moving: Moving, make: Make) -> Value:
    (x,), (tangent,) = primals, moving
    assert tangent is not None
    if op.monoid == "sum":
        return make.again(op, tangent)
    if op.monoid == "prod":
        factors = other_factors(make.convert(x, tangent.tile.dtype), op.dims, make)
        return make.add(Reduce, make.of("mul", tangent, factors), monoid="sum", dims=op.dims)
    dims_left = tuple(d for d in range(len(x.tile.shape)) if d not in op.dims)
    chosen = make.of("eq", x, make.broadcast(result, x.tile.shape, dims_left))
    count = make.add(Reduce, make.convert(chosen, tangent.tile.dtype), monoid="sum", dims=op.dims)
    total = make.add(Reduce, make.select(chosen, tangent, 0), monoid="sum", dims=op.dims)
    return make.of("div", total, count)


def _first(op: Op, primals: Sequence[Value], result: Value, moving: Moving, make: Make) -> Value:
    """The op itself on the tangent of its first operand; its other operands are positions."""
    assert moving[0] is not None
    return make.again(op, moving[0], *primals[1:])


def _joined(op: Op, primals: Sequence[Value], result: Value, moving: Moving, make: Make) -> Value:
    """The op itself on the tangents of all operands that are floats."""
    return make.again(op, *_whole(moving, primals, make))


def _scan(op: Scan, primals: Sequence[Value], result: Value, moving: Moving, make: Make) -> Value:
    (tangent,) = moving
    assert tangent is not None
    if op.monoid == "sum":
        return make.again(op, tangent)
    return scanned(op, make.convert(primals[0], tangent.tile.dtype), tangent, make)


def _linear_scan(op: LinearScan, primals: Sequence[Value], result: Value, moving: Moving, make: Make) -> Value:
    """dh_i = a_i dh_{i-1} + da_i h_{i-1} + db_i: a linear scan with the same factors."""
    factors, (dfactors, terms) = primals[0], moving
    if dfactors is not None:
        previous = shifted(result, op.dim, -1 if op.reverse else 1, 0, make)
        driven = make.of("mul", dfactors, previous)
        terms = driven if terms is None else make.of("add", driven, terms)
    assert terms is not None
    return make.again(op, factors, terms)


def _sort(op: Sort, primals: Sequence[Value], result: Value, moving: Moving, make: Make) -> Value | None:
    tangent = moving[op.pick]
    return None if tangent is None else make.take(tangent, order_of(op, primals, make), op.dim)


def _custom(op: Custom, primals: Sequence[Value], result: Value, moving: Moving, make: Make) -> Value | None:
    """The stated rule, in the dtypes of the operands."""
    if op.rule is None:
        with source.at(op.loc):
            raise NotDifferentiableError(
                "a function with a derivative of its own cannot be differentiated here",
                expected="a rule by jax.custom_jvp, which a kernel can compute",
                got=op.reason,
                fix="state the function's derivative with jax.custom_jvp, or the kernel's rule with defjvp",
            )
    whole = _whole(moving, primals, make)
    tangents = [make.convert(whole[n], primals[n].tile.dtype) for n in op.moving]
    (tangent,) = make.inline(op.rule, result, *primals[1:], *tangents)
    return make.convert(tangent, accumulator(result.tile.dtype))


def _whole(moving: Moving, primals: Sequence[Value], make: Make) -> list[Value]:
    """The tangent of each operand: zeros for a float that does not move; for other dtypes, the operand itself."""
    operand_tangents: list[Value] = []
    for tangent, value in zip(moving, primals, strict=True):
        if tangent is not None:
            operand_tangents.append(tangent)
        else:
            is_float = kind_of(value.tile.dtype) == "float"
            operand_tangents.append(make.number(0, wide(value.tile)) if is_float else value)
    return operand_tangents


FLAT = (Constant, Iota, Bitcast, ArgReduce, TopK, Stop)
"""Ops whose results count as constant, or change only in steps."""

RULES: dict[type[Op], Rule] = {
    Elementwise: _elementwise,
    Select: _select,
    Convert: _convert,
    Dot: _dot,
    Reduce: _reduce,
    **dict.fromkeys((Broadcast, Reshape, Transpose, Slice, Reverse, DynamicSlice, Take), _first),
    **dict.fromkeys((Concatenate, Pad, DynamicUpdateSlice), _joined),
    Scan: _scan,
    LinearScan: _linear_scan,
    Sort: _sort,
    Custom: _custom,
}
"""Maps each class of op to its rule; an op without a rule, and not in `FLAT`, has no derivative."""
