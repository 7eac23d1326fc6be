"""Loops whose number of iterations depends on the values of arrays."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from tilekern import source
from tilekern.errors import ArgumentError, EstimateError
from tilekern.ir.control import Fold, While
from tilekern.ir.core import Array, Func, Op, Value
from tilekern.ir.memory import MemoryOp


def data_loops(func: Func) -> Mapping[Op, Collection[Value]]:
    """Maps each loop whose bounds depend on arrays to the params that hold the bounds, in program order."""
    sources = _sources(func)
    loops: dict[Op, Collection[Value]] = {}
    for op in func.walk():
        if isinstance(op, Fold | While):
            deciding = op.operands[:2] if isinstance(op, Fold) else op.condition.results
            reached = _reached(deciding, sources)
            if params := [p for p in func.params if p in reached]:
                loops[op] = params
    return loops


def check_given(func: Func, values: Mapping[Value, Array]) -> None:
    """Refuse a Func whose loops depend on arrays without `values`.

    Raises:
      EstimateError: at the line of the first such loop; it names the arrays.
    """
    for loop, params in data_loops(func).items():
        if missing := [p.name for p in params if p not in values]:
            names = " and ".join(missing)
            with source.at(loop.loc):
                raise EstimateError(
                    f"the values of {names} decide how often a loop of {func.name} runs",
                    expected=f"{names}, as an array, or as the number that all elements have",
                    got="no values",
                    fix=f"estimate({', '.join(f'{name}=...' for name in missing)})",
                )


def given_values(func: Func, known: Mapping[Value, Array], extents: Mapping[str, object]) -> dict[Value, Array]:
    """Maps params to arrays of their shape: the arrays whose values an estimate knows.

    Args:
      func: the Func.
      known: arrays that a body closes over.
      extents: by the param's name an array of its shape, or the number that all of its elements have.

    Raises:
      ArgumentError: the Func has no such input, or the array has another shape.
    """
    inputs = {p.name: p for p in func.inputs}
    values = dict(known)
    for name, given in extents.items():
        if name not in inputs:
            raise ArgumentError(
                f"{func.name} has no input of this name",
                expected=f"one of {', '.join(inputs)}",
                got=f"{name} = {given!r}",
                fix="name the array whose values decide how often a loop runs",
            )
        param = inputs[name]
        array = np.asarray(given)
        if array.shape not in ((), param.ref.shape) or not np.can_cast(array.dtype, param.ref.dtype, "same_kind"):
            raise ArgumentError(
                f"the values of {name} do not fit it",
                expected=f"a number, or an array of {param.ref}",
                got=f"an array of {array.dtype}{list(array.shape)}",
                fix="pass values of the type that the kernel was traced for",
            )
        values[param] = np.broadcast_to(array, param.ref.shape).astype(param.ref.dtype)
    return values


def _sources(func: Func) -> Mapping[Value, Collection[Value]]:
    """Maps each value to the values and params that it is computed from directly.

    Example: `%c = add %a, %b` gives {%c: {%a, %b}}. A carry has its initial and its yielded value; a param that is
    stored to has the stored values.
    """
    sources: dict[Value, set[Value]] = {}

    def add(value: Value, *origins: Value) -> None:
        sources.setdefault(value, set()).update(origins)

    for op in func.walk():
        results_of_regions = [v for region in op.regions for v in region.results]
        for result in op.results:
            add(result, *op.operands, *results_of_regions)
        if isinstance(op, Fold):
            index, *carries = op.body.args
            add(index, *op.operands[:2])
            for carry, *origins in zip(carries, op.inits, op.body.results, strict=True):
                add(carry, *origins)
        elif isinstance(op, While):
            for region in op.regions:
                for carry, *origins in zip(region.args, op.operands, op.body.results, strict=True):
                    add(carry, *origins)
        elif isinstance(op, MemoryOp) and not op.results:
            add(op.ref, *op.operands[1:])  # what is stored may be loaded again
    return sources


def _reached(values: Collection[Value], sources: Mapping[Value, Collection[Value]]) -> set[Value]:
    """The values, and all values that they are computed from, directly or not."""
    reached, pending = set[Value](), list(values)
    while pending:
        value = pending.pop()
        if value not in reached:
            reached.add(value)
            pending += sources.get(value, ())
    return reached
