"""Estimates of lowered programs, by their target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilekern.errors import EstimateError
from tilekern.estimate import on_cpu, on_gpu, on_tpu
from tilekern.estimate.data_loops import check_given, given_values
from tilekern.estimate.result import Estimate
from tilekern.ir.core import Array, Value
from tilekern.lower.llvm.lowering import LlvmLowering
from tilekern.lower.lowering import Lowering
from tilekern.lower.mosaic.lowering import MosaicLowering
from tilekern.lower.triton.lowering import TritonLowering
from tilekern.lower.xla.lowering import XlaLowering


def estimate(lowering: Lowering, known: Sequence[Array | None], extents: Mapping[str, object]) -> Estimate:
    """The estimated time of a call of a lowered program; the hardware need not be here.

    Args:
      lowering: the program.
      known: for each input of its Func the array, None where its values are not known.
      extents: by the name of an input its values, or the number that all of its elements have.

    Raises:
      ArgumentError: the Func has no such input, or the values do not fit it.
      EstimateError: the values of an array decide how often a loop runs, and nobody gave them; or there is no model
        of the target, or it cannot follow the program.
    """
    if not isinstance(lowering, TritonLowering | MosaicLowering | LlvmLowering):
        raise no_model(lowering)
    func = lowering.func
    values = given_values(func, {p: x for p, x in zip(func.inputs, known, strict=True) if x is not None}, extents)
    check_given(func, values)
    return of_values(lowering, values)


def of_values(lowering: TritonLowering | MosaicLowering | LlvmLowering, values: Mapping[Value, Array]) -> Estimate:
    """The estimate of a program, with the arrays whose values are known by their param."""
    match lowering:
        case TritonLowering():
            return on_gpu.estimate(lowering, values)
        case MosaicLowering():
            return on_tpu.estimate(lowering, values)
        case LlvmLowering():
            return on_cpu.estimate(lowering, values)


def no_model(lowering: Lowering) -> EstimateError:
    """The error for programs of the portable backend, and of backends of other packages."""
    portable = isinstance(lowering, XlaLowering)
    return EstimateError(
        f"there is no model of programs of {'the portable' if portable else 'this'} backend",
        expected='"cpu:llvm", "tpu:…" or one of ' + ", ".join(map(repr, on_gpu.GPUS)),
        got='target = "cpu:xla"' if portable else f"a program lowered as {type(lowering).__name__}",
        fix="lower for one of these targets",
    )
