"""Estimates of lowered programs, by the model that the backend of their target declares."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

from tilekern.errors import EstimateError
from tilekern.estimate.data_loops import check_given, given_values
from tilekern.estimate.on_gpu import GPUS
from tilekern.estimate.result import Estimate
from tilekern.ir.core import Array, Func, Value
from tilekern.lower.lowering import Lowering
from tilekern.lower.target import DEFAULT, Target, backend_of


def estimate(
    lowering: Lowering, target: Target, known: Sequence[Array | None], extents: Mapping[str, object]
) -> Estimate:
    """The estimated time of a call of a lowered program; the hardware need not be here.

    Args:
      lowering: the program.
      target: the target that it is lowered for.
      known: for each input of its Func the array, None where its values are not known.
      extents: by the name of an input its values, or the number that all of its elements have.

    Raises:
      ArgumentError: the Func has no such input, or the values do not fit it.
      EstimateError: the values of an array decide how often a loop runs, and nobody gave them; or there is no model
        of the target, or it cannot follow the program.
    """
    if not backend_of(target).estimator:
        raise no_model(lowering, target)
    func = cast(Func, cast(Any, lowering).func)
    values = given_values(func, {p: x for p, x in zip(func.inputs, known, strict=True) if x is not None}, extents)
    check_given(func, values)
    return of_values(lowering, target, values)


def of_values(lowering: Lowering, target: Target, values: Mapping[Value, Array]) -> Estimate:
    """The estimate of a program, with the arrays whose values are known by their param."""
    return importlib.import_module(backend_of(target).estimator).estimate(lowering, values)


def no_model(lowering: Lowering, target: Target) -> EstimateError:
    """The error for programs of the portable backend, and of other backends without a model."""
    portable = target.backend == DEFAULT.backend
    return EstimateError(
        f"there is no model of programs of {'the portable' if portable else 'this'} backend",
        expected='"cpu:llvm", "tpu:…" or one of ' + ", ".join(map(repr, GPUS)),
        got='target = "cpu:xla"' if portable else f"a program lowered as {type(lowering).__name__}",
        fix="lower for one of these targets",
    )
