"""Import rules: a table from the names of JAX's pure primitives to functions that emit IR ops.

A rule takes the `Emitter`, the equation and its operands, and returns the results. Elementwise primitives need no rule:
the elementwise table names their ops. The importer refuses primitives that are in neither table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tilekern._jax import JaxprEqn
from tilekern.ir.compute import MONOIDS, Dot, Monoid, Reduce, Select
from tilekern.ir.core import Value
from tilekern.ir.derivatives import Stop
from tilekern.ir.elementwise import TABLE, Elementwise
from tilekern.ir.shape import Broadcast, Concatenate, Iota, Pad, Reshape, Reverse, Slice, Transpose
from tilekern.ir.types import BOOL, FOUR_BITS, kind_of
from tilekern.lang.emitter import Emitter, Rule, aval
from tilekern.lang.four_bits import narrowed
from tilekern.lang.functions import precision_of
from tilekern.lang.rules_bits import BITS
from tilekern.lang.rules_dynamic import DYNAMIC
from tilekern.lang.rules_ordering import ORDERING


def _same(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    return operands[0]


def _stop_gradient(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    (x,) = operands
    return emit.op(Stop, x) if kind_of(x.tile.dtype) == "float" else x


def _convert(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    dtype = np.dtype(eqn.params["new_dtype"])
    return narrowed(emit, operands[0], dtype) if dtype in FOUR_BITS else emit.convert(operands[0], dtype)


def _broadcast_in_dim(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    shape, dims = tuple(eqn.params["shape"]), tuple(eqn.params["broadcast_dimensions"])
    return emit.op(Broadcast, operands[0], shape=shape, dims=dims)


def _reshape(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    return emit.op(Reshape, operands[0], shape=aval(eqn).shape)


def _transpose(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    return emit.op(Transpose, operands[0], permutation=tuple(eqn.params["permutation"]))


def _iota(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    tile = aval(eqn)
    return emit.op(Iota, shape=tile.shape, dtype=tile.dtype, dim=eqn.params["dimension"])


def _empty(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    """Fill an array that is never read. Derivatives carry it for a branch where only the other branch has a value."""
    return emit.splat(0, aval(eqn))


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


def _stack(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    axis, shape = eqn.params["axis"], operands[0].tile.shape
    parts = [emit.op(Reshape, x, shape=(*shape[:axis], 1, *shape[axis:])) for x in operands]
    return emit.op(Concatenate, *parts, dim=axis)


def _unstack(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    axis: int = eqn.params["axis"]
    shape, parts = operands[0].tile.shape, list[Value]()
    for n in range(shape[axis]):
        start, stop = (*(0,) * axis, n, *(0,) * (len(shape) - axis - 1)), (*shape[:axis], n + 1, *shape[axis + 1 :])
        part = emit.op(Slice, operands[0], start=start, stop=stop, stride=(1,) * len(shape))
        parts.append(emit.op(Reshape, part, shape=(*shape[:axis], *shape[axis + 1 :])))
    return parts


def _tile(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    """Repeat a tile along each dim: broadcast along a new dim in front of it, then merge the two."""
    shape = operands[0].tile.shape
    copies = tuple(n for pair in zip(eqn.params["reps"], shape, strict=True) for n in pair)
    copied = emit.op(Broadcast, operands[0], shape=copies, dims=tuple(range(1, len(copies), 2)))
    return emit.op(Reshape, copied, shape=aval(eqn).shape)


def _concatenate(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    return emit.op(Concatenate, *operands, dim=eqn.params["dimension"])


def _pad(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    low, high, interior = (
        (tuple(n) for n in zip(*eqn.params["padding_config"], strict=True)) if aval(eqn).shape else ((),) * 3
    )
    return emit.op(Pad, *operands, low=low, high=high, interior=interior)


def _reverse(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    return emit.op(Reverse, operands[0], dims=tuple(eqn.params["dimensions"]))


def _select_n(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    selector, *cases = operands
    selector = emit.broadcast_to(selector, cases[0].tile.shape)
    if selector.tile.dtype == BOOL:
        return emit.op(Select, selector, cases[1], cases[0])
    chosen = cases[-1]
    for number, case in reversed(list(enumerate(cases[:-1]))):
        is_this = emit.op(Elementwise, selector, emit.splat(number, selector.tile), function="eq")
        chosen = emit.op(Select, is_this, case, chosen)
    return chosen


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
    return emit.convert(product, aval(eqn).dtype)


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
    """Compute 1 - x² as (1 - x) (1 + x), without cancellation; derivatives of tanh and similar functions use it."""
    one = emit.splat(1, operands[0].tile)
    return emit.elementwise("mul", emit.elementwise("sub", one, operands[0]), emit.elementwise("add", one, operands[0]))


def floor_divide(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value | None:
    """Emit JAX's jitted `x // y` of integers; None for any other function.

    JAX decides by the signs of x and y whether to round down. This rule looks at the sign of the remainder, which is 0
    or has the sign of x: where interval analysis knows that sign, the rounding is dropped.
    """
    if eqn.params.get("name") != "floor_divide":
        return None
    tile = aval(eqn)
    if kind_of(tile.dtype) != "signed" or any(v.tile.shape not in ((), tile.shape) for v in operands):
        return None
    x, y = (emit.broadcast_to(emit.convert(v, tile.dtype), tile.shape) for v in operands)
    quotient, remainder = emit.elementwise("div", x, y), emit.elementwise("rem", x, y)
    zero, one = emit.splat(0, tile), emit.splat(1, tile)
    opposite = emit.elementwise("ne", emit.elementwise("lt", remainder, zero), emit.elementwise("lt", y, zero))
    rounded = emit.elementwise("and", opposite, emit.elementwise("ne", remainder, zero))
    return emit.op(Select, rounded, emit.elementwise("sub", quotient, one), quotient)


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
    "empty2": _empty,
    "slice": _slice,
    "split": _split,
    "stack": _stack,
    "unstack": _unstack,
    "tile": _tile,
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
    **{f"reduce_{monoid}": _reduce(monoid) for monoid in MONOIDS},
    "copy": _same,
    "copy_p": _same,
    "reshard": _same,  # under a mesh, on constants only; a program runs on one device
    "stop_gradient": _stop_gradient,
    "name": _same,
    **BITS,
    **ORDERING,
    **DYNAMIC,
}


def apply(emit: Emitter, eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value] | None:
    """Emit an equation and return its results; None if the language lacks its primitive."""
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
