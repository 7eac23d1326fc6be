"""Estimates for this machine's CPU: a roofline of its caches, its microkernels and its measured peak."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tilekern import source
from tilekern.errors import EstimateError
from tilekern.estimate.cpu.rates import Rates, rates
from tilekern.estimate.quantities import percent
from tilekern.estimate.result import Estimate
from tilekern.ir.analysis.costs import Work, work_of
from tilekern.ir.analysis.iterations import Iterations
from tilekern.ir.control import Fold, While
from tilekern.ir.core import Array, Func, Value
from tilekern.ir.types import BF16, DType
from tilekern.lower.llvm.lowering import LlvmLowering

MICROKERNEL = 0.85
"""The part of the peak that dots reach, with packing.

Matrix products of 2048³, and attention of 4,096 queries, reach 0.74 to 0.87 of float32's peak
(bench/results/2026-11-22-cpu-2-cores-emerald-rapids.json).
"""

FUNCTION = 20
"""Vector operations of a function such as exp or tanh: the range reduction, and a polynomial of degree 5 to 7 with its
quotient (tilekern/lower/llvm/math, counted 2026-11-26)."""

_MEMORY_FROM = 64 << 20  # bytes of arrays from which they come from memory rather than the last cache


def estimate(lowering: LlvmLowering, values: Mapping[Value, Array]) -> Estimate:
    """The estimate of a program on the machine that it is lowered for.

    Args:
      lowering: the program.
      values: arrays whose values are known.

    Raises:
      EstimateError: nothing tells how often a loop runs.
    """
    func = lowering.func
    _check_loops(func, values)
    measured, work = rates(lowering.machine), work_of(func, values)
    matrix = sum(flops / _rate(dtype, measured) for dtype, flops in work.dots.items())
    operations = work.cost.flops - sum(work.dots.values()) + FUNCTION * work.cost.transcendentals
    parts = {
        "matrix": matrix / MICROKERNEL,
        "vector": operations / (measured.float32 / 2),  # a multiply-add counts as two
        "shared": work.accessed / measured.l2,
        "memory": work.cost.bytes_accessed / _bandwidth(work, measured),
    }
    waves = lowering.program.tasks / measured.threads
    idle = math.ceil(waves) / waves if waves else 1.0
    seconds = max(parts["matrix"] + parts["vector"], parts["shared"], parts["memory"]) * idle
    return Estimate(
        func.name,
        "cpu:llvm",
        f"{lowering.machine.cpu}, {measured.threads} threads",
        seconds,
        {"matrix": matrix, "memory": parts["memory"]},
        {unit: part / seconds if seconds else 0.0 for unit, part in parts.items()},
        work.accessed,
        work.cost.bytes_accessed,
        None,
        sum(work.dots.values()),
        waves=waves,
        assumed=(
            f"the rates that were measured on {measured.date}",
            f"dots reach {percent(MICROKERNEL)} of the peak",
            f"a function such as exp takes {FUNCTION} vector operations",
            "vector loops fill whole vectors, and all tasks take the same time",
        ),
        unknown=("spilled registers, gathers, and the time until the first task starts",),
    )


def _check_loops(func: Func, values: Mapping[Value, Array]) -> None:
    """Refuse loops whose numbers of iterations the model would have to guess."""
    iterations = Iterations(func, values)
    for op in func.walk():
        if isinstance(op, While) or (isinstance(op, Fold) and not iterations.is_known(op)):
            with source.at(op.loc):
                raise EstimateError(
                    f"the roofline cannot tell how often a loop of {func.name} runs",
                    expected="bounds of constants, indices, and values of given arrays",
                    got="a while loop" if isinstance(op, While) else "bounds that a loop computes",
                    fix='estimate it for another target, such as "cuda:sm_90"',
                )


def _rate(dtype: DType, measured: Rates) -> float:
    return measured.bfloat16 if dtype == BF16 else measured.float32


def _bandwidth(work: Work, measured: Rates) -> float:
    """The bandwidth of the level that holds all arrays together."""
    return measured.l3 if work.cost.bytes_accessed < _MEMORY_FROM else measured.memory
