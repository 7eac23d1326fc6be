"""What a TPU's kernel makes of each line, from its plan."""

from __future__ import annotations

from collections.abc import Mapping

from tilekern.estimate import by_target
from tilekern.estimate.explain import listings, work
from tilekern.estimate.explain.explainer import Forecast
from tilekern.estimate.explain.explanation import Listing
from tilekern.estimate.explain.lines import Place, Words, accesses, add
from tilekern.estimate.tpu.chips import chip
from tilekern.ir.compute import Dot
from tilekern.ir.control import Fold
from tilekern.ir.core import Array, Value
from tilekern.ir.memory import MemoryOp
from tilekern.lower.mosaic.lowering import MosaicLowering
from tilekern.lower.mosaic.plan.describe import layout_words, loop_words
from tilekern.lower.mosaic.plan.kernel_plan import KernelPlan
from tilekern.lower.target import Target

LANES = 8 * 128  # of a vector register


def forecast(lowering: MosaicLowering, target: Target, values: Mapping[Value, Array]) -> Forecast:
    """The estimate, and each line's part of the work by the rates of the units."""
    parts = work.shares_of_lines(lowering.func, values, rates(lowering))
    return Forecast(by_target.of_values(lowering, target, values), parts, work.SHARES_OF)


def became(lowering: MosaicLowering) -> Words:
    """What the plan makes of each of the user's lines."""
    plan, said = lowering.planned, accesses(lowering.func, masks=True)
    for op in plan.func.walk():
        match op:
            case Fold():
                add(said, op.loc, f"loop over {op.axis.name or 'tiles'}: {loop_words(plan, op)}")
            case MemoryOp():
                add(said, op.loc, f"{op.ref.name}: {_access(plan, op)}")
            case Dot():
                add(said, op.loc, "matrix units (MXU)")
            case _:
                pass
    return said


def _access(plan: KernelPlan, op: MemoryOp) -> str:
    if op.ref in plan.scalars.tables:
        return "prefetched into scalar memory"
    layout = plan.layouts.get(op)
    if layout is None:
        return "not read from vector memory"
    if layout in plan.row_dma_inputs:
        return "DMA by rows: " + layout_words(plan, layout)
    return layout_words(plan, layout)


def memory(lowering: MosaicLowering) -> dict[str, str]:
    """The vector memory of a kernel, as planned, its largest buffers apart."""
    plan = lowering.planned
    bill = {"VMEM": f"{plan.vmem_bytes / 2**20:.2f} of {plan.chip.vmem_budget / 2**20:.1f} MiB planned"}
    for name, size in sorted(plan.vmem_buffers, key=lambda buffer: -buffer[1])[:5]:
        if size:
            bill[f"VMEM, {name}"] = f"{size / 2**10:,.0f} KiB"
    return bill


def programs(lowering: MosaicLowering, numbers: Mapping[Place, int]) -> dict[str, Listing]:
    """Mosaic's MLIR: libtpu shows no assembly that people read."""
    del numbers  # no line tells where it comes from
    return {"program": listings.plain(lowering.text)}


def rates(lowering: MosaicLowering) -> tuple[float, float, float, float]:
    """Operations of matrix products, of vectors, of functions, and bytes, a second.

    A bundle has four slots for vector arithmetic, and one for functions.
    """
    machine = chip(lowering.target.name.removeprefix("tpu:"))
    hertz = machine.ghz * 1e9 * machine.cores
    return machine.peak * machine.cores, 4 * LANES * hertz, LANES * hertz, machine.bandwidth * machine.cores
