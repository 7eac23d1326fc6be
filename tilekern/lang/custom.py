"""Functions with derivatives of their own: the rule of `jax.custom_jvp` goes into the block IR with the function's ops.

    y = f(x)  →  y' = f's ops of stop_gradient(x);  y = custom_derivative(y', x) do (y, x, x_t) { f's jvp; yield y_t }

Most jvps call f on the same operands again. Such a call takes the existing result. Other functions in a jvp that have
derivatives of their own have no derivative there, so the second derivative is refused at its line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tilekern import _jax
from tilekern._jax import Jaxpr, JaxprEqn
from tilekern.errors import UnsupportedError
from tilekern.ir.core import Block, Op, Value
from tilekern.ir.derivatives import Custom, Stop
from tilekern.ir.records import record
from tilekern.ir.types import TileType, kind_of
from tilekern.lang.emitter import Emitter


@record
class Call:
    """The call of a function, as the derivative rule of the function sees it."""

    function: str
    operands: tuple[Value, ...]
    result: Value

    def is_it(self, eqn: JaxprEqn, operands: Sequence[Value]) -> bool:
        """True if an equation in the rule is the call."""
        is_open = bool(eqn.params["call_jaxpr"].consts)  # the text of a jaxpr does not show its constants
        return not is_open and self.operands == tuple(operands) and self.function == _function(eqn)


class Importing(Protocol):
    """The importer of a rule."""

    within: Call | None
    captured: list[tuple[Any, Value]]

    def run(self, jaxpr: Jaxpr, operands: Sequence[Value]) -> tuple[Value, ...]:
        """Append the ops of a jaxpr, and return its results."""
        ...

    def splat(self, number: Any, like: TileType) -> Value:
        """A tile of one number."""
        ...

    def block(self, args: tuple[Value, ...], body: Callable[..., tuple[Value, ...]]) -> Block:
        """The block of the ops that `body` appends."""
        ...


def stopped(emit: Emitter, value: Value) -> Value:
    """The value as a constant of differentiation; a value that is no float itself."""
    return emit.op(Stop, value) if _is_float(value) else value


def marked(
    emit: Emitter,
    eqn: JaxprEqn,
    operands: Sequence[Value],
    results: Sequence[Value],
    nested: Callable[[], Importing] | None,
) -> list[Value]:
    """The results of a function; each float result is wrapped in a `Custom` with its rule.

    Args:
      emit: adds ops.
      eqn: the call.
      operands: its operands.
      results: its results, computed from stops of the operands.
      nested: makes the importer of a rule; None inside of rules.
    """
    marked_results: list[Value] = []
    for number, result in enumerate(results):
        rule, reason = None, "a function with a derivative of its own, inside the rule of another one"
        if not _is_float(result):
            marked_results.append(result)
            continue
        if eqn.primitive.name != "custom_jvp_call":
            reason = "a function of jax.custom_vjp, whose rule is for reverse mode alone"
        elif nested is not None:
            try:
                rule, reason = _rule(eqn, operands, results, number, nested()), ""
            except Exception as error:  # the user's rule runs here, and the kernel may not need it
                reason = f"a rule that fails: {' '.join((type(error).__name__, *str(error).splitlines()[:1]))}"
        marked_results.append(emit.op(Custom, result, *operands, rule=rule, reason=reason))
    return marked_results


def _rule(eqn: JaxprEqn, operands: Sequence[Value], results: Sequence[Value], number: int, nested: Importing) -> Block:
    jaxpr, places = _jax.jvp_of(eqn)
    result, constants = Value(results[number].type, "y"), eqn.params["num_consts"]
    primals = tuple(Value(v.type, "x") for v in operands)
    moving = tuple(Value(v.type, "t") if _is_float(v) else None for v in operands)
    tangents = tuple(t for t in moving if t is not None)
    # If a call has several results, the rule has only one of its results, so the call is computed again.
    nested.within = Call(_function(eqn), primals if len(results) == 1 else (), result)

    def body(*_: Value) -> tuple[Value, ...]:
        moving_tangents = [t for t in moving[constants:] if t is not None]
        result_tangents, place = nested.run(jaxpr, [*primals[constants:], *moving_tangents]), places[number]
        return (nested.splat(0, result.tile) if place is None else result_tangents[place],)

    block = nested.block((result, *primals, *tangents), body)
    if nested.captured:
        raise UnsupportedError("the rule captures an array", fix="make the array an argument of the function")
    return _pruned(block)


def _pruned(block: Block) -> Block:
    """The block without ops that its results do not depend on."""
    needed, live_ops = set(block.results), list[Op]()
    for op in reversed(block.ops):
        if not needed.isdisjoint(op.results):
            live_ops.append(op)
            needed.update(op.uses())
    return Block(block.args, tuple(reversed(live_ops)), block.results)


def _function(eqn: JaxprEqn) -> str:
    return str(eqn.params["call_jaxpr"])


def _is_float(value: Value) -> bool:
    return isinstance(value.type, TileType) and kind_of(value.type.dtype) == "float"
