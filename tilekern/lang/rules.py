"""How JAX's pure primitives become IR ops: a table by primitive name.

A rule takes the `Emitter`, the equation and its operands, and returns the results. Elementwise primitives need no rule:
the elementwise table names them. What is in neither table is refused by the importer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilekern._jax import JaxprEqn
from tilekern.errors import UnsupportedError
from tilekern.ir.compute import Convert, Dot, Monoid, Reduce, Select, splat
from tilekern.ir.core import Builder, Op, Value
from tilekern.ir.elementwise import TABLE, Elementwise
from tilekern.ir.shape import Broadcast, Concatenate, Iota, Pad, Reshape, Reverse, Slice, Transpose
from tilekern.ir.types import BOOL, DType, TileType
from tilekern.lang.functions import precision_of
from tilekern.source import UNKNOWN, Loc


class Emitter(Builder):
    """A builder that knows the user's line and JAX's implicit broadcasting."""

    def __init__(self) -> None:
        super().__init__()
        self.loc: Loc = UNKNOWN

    def op(self, kind: Callable[..., Op], *operands: Value, **attributes: Any) -> Value:
        """Append an op at the user's line; its result."""
        return self.one(kind(operands=operands, loc=self.loc, **attributes))

    def elementwise(self, function: str, *operands: Value) -> Value:
        """Append an elementwise op, its operands broadcast to one shape."""
        return self.op(Elementwise, *self.broadcast(*operands), function=function)

    def broadcast(self, *operands: Value) -> list[Value]:
        """Operands of one shape: scalars and dims of size 1 are repeated, as JAX does implicitly."""
        shapes = [v.tile.shape for v in operands]
        rank = max(map(len, shapes))
        whole = [shape for shape in shapes if len(shape) == rank]
        shape = tuple(max(sizes) if 0 not in sizes else 0 for sizes in zip(*whole, strict=True))
        return [self.broadcast_to(v, shape) for v in operands]

    def broadcast_to(self, value: Value, shape: tuple[int, ...]) -> Value:
        """A scalar, or a tile of the same rank, repeated to `shape`."""
        if value.tile.shape == shape:
            return value
        return self.op(Broadcast, value, shape=shape, dims=tuple(range(len(value.tile.shape))))

    def convert(self, value: Value, dtype: DType) -> Value:
        """A cast where one is needed."""
        return value if value.tile.dtype == dtype else self.op(Convert, value, dtype=dtype)

    def splat(self, number: Any, like: TileType) -> Value:
        """A tile of one number."""
        return self.one(splat(number, like, loc=self.loc))


Rule = Callable[[Emitter, JaxprEqn, list[Value]], Value | list[Value]]


def _same(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    return operands[0]


def _aval(eqn: JaxprEqn) -> TileType:
    aval: Any = eqn.outvars[0].aval
    return TileType(tuple(aval.shape), np.dtype(aval.dtype))


def _convert(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    return emit.convert(operands[0], np.dtype(eqn.params["new_dtype"]))


def _broadcast_in_dim(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    shape, dims = tuple(eqn.params["shape"]), tuple(eqn.params["broadcast_dimensions"])
    return emit.op(Broadcast, operands[0], shape=shape, dims=dims)


def _reshape(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    return emit.op(Reshape, operands[0], shape=_aval(eqn).shape)


def _transpose(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    return emit.op(Transpose, operands[0], permutation=tuple(eqn.params["permutation"]))


def _iota(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    tile = _aval(eqn)
    return emit.op(Iota, shape=tile.shape, dtype=tile.dtype, dim=eqn.params["dimension"])


def _slice(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    start, stop = tuple(eqn.params["start_indices"]), tuple(eqn.params["limit_indices"])
    stride = tuple(eqn.params["strides"] or (1,) * len(start))
    return emit.op(Slice, operands[0], start=start, stop=stop, stride=stride)


def _split(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    axis, shape, parts, begin = eqn.params["axis"], operands[0].tile.shape, list[Value](), 0
    for size in eqn.params["sizes"]:
        start, stop = [0] * len(shape), list(shape)
        start[axis], stop[axis] = begin, begin + size
        strides = (1,) * len(shape)
        parts.append(emit.op(Slice, operands[0], start=tuple(start), stop=tuple(stop), stride=strides))
        begin += size
    return parts


def _concatenate(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    return emit.op(Concatenate, *operands, dim=eqn.params["dimension"])


def _pad(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    low, high, interior = (
        (tuple(n) for n in zip(*eqn.params["padding_config"], strict=True)) if _aval(eqn).shape else ((),) * 3
    )
    return emit.op(Pad, *operands, low=low, high=high, interior=interior)


def _reverse(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    return emit.op(Reverse, operands[0], dims=tuple(eqn.params["dimensions"]))


def _select_n(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    which, *cases = operands
    if which.tile.dtype != BOOL:
        raise UnsupportedError(
            "lax.select_n among more than two cases is not part of the language",
            expected="a bool predicate and two cases",
            got=f"which = {which.type}, {len(cases)} cases",
            fix="nest jnp.where",
        )
    which = emit.broadcast_to(which, cases[0].tile.shape)
    return emit.op(Select, which, cases[1], cases[0])


def _dot_general(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    contract, batch = eqn.params["dimension_numbers"]
    dtype = np.result_type(*(v.tile.dtype for v in operands)) if operands[0].type != operands[1].type else None
    sides = [emit.convert(v, dtype or v.tile.dtype) for v in operands]
    product = emit.op(
        Dot,
        *sides,
        contract=(tuple(contract[0]), tuple(contract[1])),
        batch=(tuple(batch[0]), tuple(batch[1])),
        precision=precision_of(eqn.params["precision"]),
    )
    return emit.convert(product, _aval(eqn).dtype)


def _integer_pow(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    """x**n by repeated squaring, as JAX defines it; 1 / x**-n for negative n."""
    power, base = abs(eqn.params["y"]), operands[0]
    result: Value | None = None
    while power:
        if power & 1:
            result = base if result is None else emit.elementwise("mul", result, base)
        power >>= 1
        if power:
            base = emit.elementwise("mul", base, base)
    one = emit.splat(1, operands[0].tile)
    if result is None:
        return one
    return emit.elementwise("div", one, result) if eqn.params["y"] < 0 else result


def _round(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    # RoundingMethod: AWAY_FROM_ZERO = 0, TO_NEAREST_EVEN = 1
    return emit.elementwise("round_even" if int(eqn.params["rounding_method"]) else "round_away", operands[0])


def _clamp(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    low, x, high = operands
    return emit.elementwise("min", emit.elementwise("max", x, low), high)


def _square(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    return emit.elementwise("mul", operands[0], operands[0])


def _one_minus_square(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    """1 - x², which the derivatives of tanh and its kin consist of, without cancellation: (1 - x) (1 + x)."""
    one = emit.splat(1, operands[0].tile)
    return emit.elementwise("mul", emit.elementwise("sub", one, operands[0]), emit.elementwise("add", one, operands[0]))


def _add_any(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    return emit.elementwise("add", *operands)


def _reduce(monoid: Monoid) -> Rule:
    def rule(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
        return emit.op(Reduce, operands[0], monoid=monoid, dims=tuple(eqn.params["axes"]))

    return rule


RULES: dict[str, Rule] = {
    "convert_element_type": _convert,
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "transpose": _transpose,
    "iota": _iota,
    "slice": _slice,
    "split": _split,
    "concatenate": _concatenate,
    "pad": _pad,
    "rev": _reverse,
    "select_n": _select_n,
    "dot_general": _dot_general,
    "integer_pow": _integer_pow,
    "round": _round,
    "clamp": _clamp,
    "square": _square,
    "one_minus_square": _one_minus_square,
    "add_any": _add_any,
    "reduce_sum": _reduce("sum"),
    "reduce_prod": _reduce("prod"),
    "reduce_max": _reduce("max"),
    "reduce_min": _reduce("min"),
    "reduce_and": _reduce("and"),
    "reduce_or": _reduce("or"),
    "copy": _same,
    "copy_p": _same,
    "stop_gradient": _same,
    "name": _same,
}


def apply(emit: Emitter, eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value] | None:
    """The results of an equation, or None if the language does not have its primitive."""
    name, values = eqn.primitive.name, list(operands)
    if name in RULES:
        results = RULES[name](emit, eqn, values)
        return results if isinstance(results, list) else [results]
    row = TABLE.get(name)
    if row is None:
        return None
    values = emit.broadcast(*values)
    if any(v.tile.dtype != values[0].tile.dtype for v in values):
        # Shifts and pow take an integer second operand of another dtype.
        values = [emit.convert(v, values[0].tile.dtype) for v in values]
    return [emit.op(Elementwise, *values, function=name)]
