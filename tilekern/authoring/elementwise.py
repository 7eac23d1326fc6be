"""Functions of the user over tiles: the check that they are elementwise, and derivatives without masked elements.

A kernel calls such a function once for a tile. If the function mixed elements, or looked at the size of its arguments,
results would depend on the blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from tilekern import _jax, source
from tilekern._jax import Jaxpr, JaxprEqn
from tilekern.errors import ArgumentError
from tilekern.ir.elementwise import TABLE

# --- the check ------------------------------------------------------------------------------------------------------

# "number": one number, perhaps broadcast. "tile": one element for each element of the tile, or of its rows or columns.
# "array": any other array.
_Kind = Literal["number", "tile", "array"]

_ELEMENTWISE = {
    *TABLE,
    *("select_n", "convert_element_type", "bitcast_convert_type", "reduce_precision", "round", "clamp"),
    *("integer_pow", "square", "one_minus_square", "add_any", "copy", "copy_p", "stop_gradient", "name", "reshard"),
}

_READS = ("gather", "dynamic_slice")
_NO_PRODUCTS = ("add", "sub", "max", "min", "select_n", "abs", "tanh", "exp")


def check_elementwise(name: str, jaxprs: Sequence[Jaxpr], arguments: str = "its arguments") -> None:
    """Raise unless a function is elementwise.

    Args:
      name: of the function in the error, such as "score_mod of flash_attention".
      jaxprs: of its calls with tiles [T, S] of different sizes, by `jax.make_jaxpr`. An input without dims is a number,
        any other a tile [T, S], [T, 1] or [1, S].
      arguments: the inputs, in words.

    Raises:
      tilekern.errors.ArgumentError: at the user's line that mixes elements.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> tiles = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 3), (5, 7))]
      >>> check_elementwise("activation", [jax.make_jaxpr(jnp.tanh)(tile) for tile in tiles])
    """
    traces = [_Trace(name, arguments) for _ in jaxprs]
    for trace, closed in zip(traces, jaxprs, strict=True):
        kinds = ["tile" if _shape(v) else "number" for v in closed.jaxpr.invars]
        trace.run(closed.jaxpr, [_of_array(x) for x in closed.consts], kinds)
    if any(trace.sizes != traces[0].sizes for trace in traces):
        raise traces[0].wrong("the shape of an argument is used as a number, or for an array", source.UNKNOWN)


def ends_in_product(closed: Jaxpr) -> bool:
    """True unless the last operation of a function is one of `_NO_PRODUCTS`, such as `add` or `max`.

    Then a compiler may fuse the product with a subtraction that follows. False for a function that returns an input.
    """
    equations: dict[Any, JaxprEqn] = {v: eqn for eqn in closed.jaxpr.eqns for v in eqn.outvars}
    eqn = equations.get(closed.jaxpr.outvars[0])
    return eqn is not None and eqn.primitive.name not in _NO_PRODUCTS


class _Trace:
    """One walk over the equations of a function.

    Attributes:
      sizes: the numbers, and the shapes of arrays, that the function makes by itself.
      outer: the user's line of a call of a function of JAX, whose own equations have the line of an arbitrary call.
    """

    def __init__(self, name: str, arguments: str) -> None:
        self.name, self.arguments = name, arguments
        self.sizes: list[Any] = []
        self.outer: source.Loc | None = None

    def run(self, jaxpr: Any, consts: Sequence[_Kind], kinds: Sequence[Any]) -> list[Any]:
        """The kinds of the results of a jaxpr, from the kinds of its constants and of its inputs."""
        kind_of: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *kinds], strict=True))
        for eqn in jaxpr.eqns:
            operands = [self._of_literal(v) if hasattr(v, "val") else kind_of[v] for v in eqn.invars]
            kind_of |= zip(eqn.outvars, self._equation(eqn, operands), strict=True)
        return [self._of_literal(v) if hasattr(v, "val") else kind_of[v] for v in jaxpr.outvars]

    def _of_literal(self, literal: Any) -> _Kind:
        self.sizes.append(str(literal.val))
        return "number"

    def _equation(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        inner = _inner(eqn)
        if inner:
            return self._nested(eqn, inner, operands)
        if name in _ELEMENTWISE and not ("array" in operands and "tile" in operands):
            return [_widest(operands)] * len(eqn.outvars)
        if name == "broadcast_in_dim" and (operands == ["number"] or _keeps_dims(eqn)):
            return operands[:1]
        if name == "concatenate" and "tile" in operands and eqn.params["dimension"] >= 2:
            return ["tile"]  # the indices of a gather
        if name in _READS and operands[0] != "tile":
            return ["tile" if "tile" in operands else self._of_own(eqn.outvars[0])]
        if "tile" in operands or any(k == "number" and _size(v) > 1 for k, v in zip(operands, eqn.invars, strict=True)):
            raise self.wrong(f"`{name}`, which mixes the elements of a tile", self.outer or _jax.user_loc(eqn))
        return [self._of_own(v) for v in eqn.outvars]

    def _of_own(self, var: Any) -> _Kind:
        """The kind of an array that the function makes by itself; notes its shape in `sizes`."""
        self.sizes.append(_shape(var))
        return "array" if _size(var) > 1 else "number"

    def _nested(self, eqn: JaxprEqn, inner: list[Any], operands: list[Any]) -> list[Any]:
        """The kinds of the results of a call or of control flow, whose branches and steps must be elementwise, too."""
        results: list[list[Any]] = []
        for closed in inner:
            jaxpr = getattr(closed, "jaxpr", closed)
            inputs = operands[len(operands) - len(jaxpr.invars) :]
            if eqn.primitive.name in ("while", "scan", "cond") and "tile" in operands:
                inputs = [_of_shape(v, k) for v, k in zip(jaxpr.invars, inputs, strict=True)]
            before = self.outer
            self.outer = before or (_jax.user_loc(eqn) if _jax.written_in_jax(jaxpr) else None)
            results.append(self.run(jaxpr, [_of_array(x) for x in getattr(closed, "consts", ())], inputs))
            self.outer = before
        fitting = [kinds for kinds in results if len(kinds) == len(eqn.outvars)]
        return [_widest(kinds) for kinds in zip(*fitting, strict=True)]

    def wrong(self, got: str, loc: source.Loc) -> ArgumentError:
        """The error about an equation at `loc`."""
        with source.at(loc):
            return ArgumentError(
                f"a {self.name} is not elementwise",
                expected=f"an element of the result that depends on {self.arguments} of this element alone: the "
                "function is called with a tile of scores, and the size of tiles is no part of the meaning",
                got=got,
                fix="compute it outside, and carry the array: jax.tree_util.Partial(function, array), read as "
                "array[n, i]",
            )


def _inner(eqn: JaxprEqn) -> list[Any]:
    """The jaxprs that an equation runs: bodies, branches and conditions, but no rules for derivatives."""
    names = ("jaxpr", "call_jaxpr", "fun_jaxpr", "branches", "cond_jaxpr", "body_jaxpr")
    jaxprs: list[Any] = []
    for name in names:
        value: Any = eqn.params.get(name, ())
        jaxprs += value if isinstance(value, (tuple, list)) else (value,)
    return jaxprs


def _shape(var: Any) -> tuple[int, ...]:
    return var.aval.shape


def _size(var: Any) -> int:
    return math.prod(_shape(var))


def _keeps_dims(eqn: JaxprEqn) -> bool:
    """True if a `broadcast_in_dim` keeps dim n of a tile as dim n: [T, 1] -> [T, S], or [T, S] -> [T, S, 2]."""
    rank = len(_shape(eqn.invars[0]))
    return rank >= 2 and tuple(eqn.params["broadcast_dimensions"]) == tuple(range(rank))


def _of_shape(var: Any, kind: _Kind) -> _Kind:
    return "tile" if kind == "number" and _size(var) > 1 else kind


def _of_array(x: Any) -> _Kind:
    return "array" if getattr(x, "size", 1) > 1 else "number"


def _widest(kinds: Sequence[_Kind]) -> _Kind:
    return "tile" if "tile" in kinds else "array" if "array" in kinds else "number"


# --- derivatives ----------------------------------------------------------------------------------------------------


def masked(mask: jax.Array, function: Callable[..., jax.Array], *operands: jax.Array) -> jax.Array:
    """`jnp.where(mask, function(*operands), 0)` of an elementwise function, safe to differentiate.

    Where the mask is False, the function and its derivatives of each order may be anything, NaN included: they are
    never multiplied with a cotangent of 0, because 0 times infinity is NaN.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jnp.array([0.0, 4.0])
      >>> jax.grad(lambda x: masked(x > 0, jnp.sqrt, x).sum())(x)
      Array([0.  , 0.25], dtype=float32)
    """
    closed = _jax.make_jaxpr(function, *map(_type, operands))
    consts = [jnp.asarray(x) for x in closed.consts]

    def opened(*inputs: Any) -> list[Any]:
        return _jax.evaluate(closed, inputs[: len(consts)], inputs[len(consts) :])

    # The rules of `_masked` outlive this trace: arrays of the closure have to be arguments.
    pure = _jax.make_jaxpr(opened, *map(_type, consts), *map(_type, operands))

    def evaluate(consts: Sequence[Any], operands: Sequence[Any]) -> jax.Array:
        return _jax.evaluate(pure, pure.consts, [*consts, *operands])[0]

    return _masked(mask, evaluate, consts, operands)


def _type(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _masked(mask: jax.Array, evaluate: Callable[..., jax.Array], consts: list[Any], operands: Any) -> jax.Array:
    @jax.custom_jvp
    def value(mask: jax.Array, consts: list[Any], operands: tuple[Any, ...]) -> jax.Array:
        return jnp.where(mask, evaluate(consts, operands), 0)

    def jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
        mask, consts, operands = primals
        result = value(mask, consts, operands)
        total = jnp.zeros_like(result)
        for number, tangent in enumerate(tangents[2]):
            if not isinstance(tangent, jax.custom_derivatives.SymbolicZero):
                slope = _masked(mask, _derivative(evaluate, number), consts, operands)
                total = total + jnp.where(mask, slope * tangent, 0)
        return result, total

    value.defjvp(jvp, symbolic_zeros=True)
    return value(mask, consts, operands)


def _derivative(evaluate: Callable[..., jax.Array], number: int) -> Callable[..., jax.Array]:
    """The derivative of an elementwise function by an operand."""

    def derivative(consts: Sequence[Any], operands: Sequence[Any]) -> jax.Array:
        def along(x: jax.Array) -> jax.Array:
            return evaluate(consts, [*operands[:number], x, *operands[number + 1 :]])

        return jax.jvp(along, (operands[number],), (jnp.ones_like(operands[number]),))[1]

    return derivative
