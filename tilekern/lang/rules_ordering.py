"""Import rules for primitives along a dim that compare or accumulate: argmax, cumulative sums, sort, top-k."""

from __future__ import annotations

from tilekern._jax import JaxprEqn
from tilekern.ir.core import Value
from tilekern.ir.dynamic import Take
from tilekern.ir.ordering import CUMULATIVE, ArgReduce, Cumulative, Extreme, LinearScan, Scan, Sort, TopK
from tilekern.ir.shape import Iota
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


def _linear_scan(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    return emit.op(LinearScan, *operands, dim=eqn.params["axis"], reverse=eqn.params["reverse"])


def _sort(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Sort by one op. With several operands, sort their indices, and gather all operands in that order."""
    dim, num_keys = eqn.params["dimension"], eqn.params["num_keys"]
    if len(operands) == 1 or not operands[0].tile.shape[dim]:
        return [emit.op(Sort, x, dim=dim) for x in operands]
    places = emit.op(Iota, shape=operands[0].tile.shape, dtype=I32, dim=dim)
    order = emit.op(Sort, *operands[:num_keys], places, dim=dim, num_keys=num_keys, pick=num_keys)
    return [emit.op(Take, x, order, dim=dim, along=True) for x in operands]


def _top_k(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    x, dim = operands[0], eqn.params["axis"]
    if not x.tile.shape[dim]:
        return [x, emit.op(TopK, x, dim=dim, k=0)]
    places = emit.op(TopK, x, dim=dim, k=eqn.params["k"])
    return [emit.op(Take, x, places, dim=dim, along=True), places]


ORDERING: dict[str, Rule] = {
    "argmax": _arg_reduce("max"),
    "argmin": _arg_reduce("min"),
    **{f"cum{monoid}": _scan(monoid) for monoid in CUMULATIVE},
    "linear_scan": _linear_scan,
    "sort": _sort,
    "top_k": _top_k,
}
