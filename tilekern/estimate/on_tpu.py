"""Estimates for Google's TPUs: the VLIW bundles that libtpu makes of a program, executed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata

from tilekern.errors import DependencyError, EstimateError
from tilekern.estimate.result import Estimate
from tilekern.estimate.tpu import of_text
from tilekern.estimate.tpu.bundles import DumpError
from tilekern.estimate.tpu.chips import Chip, chip
from tilekern.estimate.tpu.estimate import CompileError, KernelEstimate
from tilekern.estimate.tpu.estimate import estimate as of_program
from tilekern.estimate.tpu.simulate import SimulationError
from tilekern.ir.analysis.costs import work_of
from tilekern.ir.core import Array, Value
from tilekern.ir.text import to_text
from tilekern.lower.mosaic.lowering import MosaicLowering

_BUSY = {"matrix": ("mxu",), "vector": ("valu",), "special": ("eup",), "shuffle": ("xlu",), "shared": ("vld", "vst")}


def estimate(lowering: MosaicLowering, values: Mapping[Value, Array]) -> Estimate:
    """The estimate of a program, XLA's kernels around it included.

    Args:
      lowering: the program.
      values: arrays whose values are known; they become constants of the program.

    Raises:
      DependencyError: libtpu is missing.
      EstimateError: libtpu refuses the program, or its bundles cannot be followed.
    """
    name = lowering.target.name.removeprefix("tpu:")
    try:
        metadata.version("libtpu")
    except metadata.PackageNotFoundError as error:
        raise DependencyError(
            f"an estimate for {lowering.target.name} takes libtpu, the TPU's compiler",
            expected="libtpu; no TPU has to be here",
            got="no package of that name",
            fix="pip install 'tilekern[tpu]'",
        ) from error
    text = to_text(lowering.func)
    constants = {p.name: x for p, x in values.items()}
    try:
        kernels = of_program(of_text.source(text, lowering.target.name, constants), name)
    except (CompileError, DumpError, SimulationError) as error:
        raise EstimateError(
            f"the bundles of {lowering.func.name} for {lowering.target.name} cannot be followed",
            expected="a program that libtpu compiles, with branches that follow from its text and from given arrays",
            got=f"{type(error).__name__}: {str(error).splitlines()[0]}",
            fix="give the arrays that decide branches; or compare candidates on another target",
        ) from error
    return _estimate(lowering, values, chip(name), kernels)


def _estimate(
    lowering: MosaicLowering, values: Mapping[Value, Array], machine: Chip, kernels: list[KernelEstimate]
) -> Estimate:
    cycles = max(1, sum(k.cycles for k in kernels))
    seconds = cycles / (machine.ghz * 1e9)
    work = work_of(lowering.func, values)
    moved = sum(k.read + k.written for k in kernels)
    busy = {ours: max(_mean(kernels, unit, cycles) for unit in units) for ours, units in _BUSY.items()}
    busy["issue"] = sum(k.bundles for k in kernels) / cycles
    bandwidth = machine.bandwidth * machine.cores
    busy["memory"] = moved / bandwidth / seconds
    rates = {dtype: machine.rate(str(dtype)) * machine.cores for dtype in work.dots}
    return Estimate(
        lowering.func.name,
        lowering.target.name,
        f"TPU {lowering.target.name.removeprefix('tpu:')}",
        seconds,
        {
            "matrix": sum(flops / rates[dtype] for dtype, flops in work.dots.items()),
            "memory": work.cost.bytes_accessed / bandwidth,
        },
        busy,
        moved,
        work.cost.bytes_accessed,
        round(busy["matrix"] * machine.peak * machine.cores * seconds),
        sum(work.dots.values()),
        assumed=(
            "operands are in HBM",
            f"a DMA takes {machine.latency / machine.ghz:.0f} ns before its first byte, and HBM serves all in order",
            *(f"{k.name} runs beside nothing else" for k in kernels if not k.pallas),
        ),
    )


def _mean(kernels: list[KernelEstimate], unit: str, cycles: int) -> float:
    """The part of all cycles in which a unit's slots are filled."""
    return sum((k.use or {}).get(unit, 0.0) * k.cycles for k in kernels) / cycles
