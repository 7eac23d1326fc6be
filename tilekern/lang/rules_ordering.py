"""Import rules for what compares or accumulates along a dim: argmax, cumulative sums and their kin, sort, top-k."""

from __future__ import annotations

from tilekern._jax import JaxprEqn
from tilekern.ir.core import Value
from tilekern.ir.ordering import ArgReduce, Cumulative, Extreme, Scan, Sort
from tilekern.ir.shape import Iota, Reverse, Slice
from tilekern.ir.types import I32
from tilekern.lang.emitter import Emitter, Rule, aval


def _arg_reduce(extreme: Extreme) -> Rule:
    def rule(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
        (dim,) = eqn.params["axes"]
        return emit.convert(emit.op(ArgReduce, operands[0], extreme=extreme, dim=dim), aval(eqn).dtype)

    return rule


def _scan(monoid: Cumulative) -> Rule:
    def rule(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
        return emit.op(Scan, operands[0], monoid=monoid, dim=eqn.params["axis"], reverse=eqn.params["reverse"])

    return rule


def _sort(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    dim, num_keys = eqn.params["dimension"], eqn.params["num_keys"]
    return [emit.op(Sort, *operands, dim=dim, num_keys=num_keys, pick=n) for n in range(len(operands))]


def _top_k(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    """The first k of a descending sort: reversed twice, an ascending one keeps equal elements in order."""
    shape = operands[0].tile.shape
    dim: int = eqn.params["axis"]
    places = emit.op(Iota, shape=shape, dtype=I32, dim=dim)
    backward = [emit.op(Reverse, x, dims=(dim,)) for x in (operands[0], places)]
    found: list[Value] = []
    for pick in range(2):
        descending = emit.op(Reverse, emit.op(Sort, *backward, dim=dim, pick=pick), dims=(dim,))
        stop = (*shape[:dim], eqn.params["k"], *shape[dim + 1 :])
        ones = (1,) * len(shape)
        found.append(emit.op(Slice, descending, start=(0,) * len(shape), stop=stop, stride=ones))
    return found


ORDERING: dict[str, Rule] = {
    "argmax": _arg_reduce("max"),
    "argmin": _arg_reduce("min"),
    "cumsum": _scan("sum"),
    "cumprod": _scan("prod"),
    "cummax": _scan("max"),
    "cummin": _scan("min"),
    "cumlogsumexp": _scan("logsumexp"),
    "sort": _sort,
    "top_k": _top_k,
}
