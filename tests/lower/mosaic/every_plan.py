"""Every way in which the planner would run a Func, not only the fastest one that fits."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy

from tilekern.ir.core import Func
from tilekern.lower.mosaic.chip import CHIPS
from tilekern.lower.mosaic.legalize import legalize
from tilekern.lower.mosaic.legalize.reshape_arrays import reshape_arrays
from tilekern.lower.mosaic.lowering import MosaicLowering
from tilekern.lower.mosaic.plan import plan_kernel as planner
from tilekern.lower.mosaic.plan.kernel_plan import KernelPlan
from tilekern.lower.target import TARGETS
from tilekern.lower.xla.emit import emit_xla


def kind_of_plan(plan: KernelPlan) -> str:
    """Where the loops of a plan are: inside of the kernel, in its grid, or in pipelines of their own.

    "fetched": inside of the kernel, and rows are fetched from HBM.
    """
    if plan.row_dma_inputs:
        return "fetched"
    if plan.pipelines:
        return "pipes"
    if plan.grid_loop is None:
        return "resident"
    return "steps" if plan.grid_loop.table is None else "pairs"


def every_plan(func: Func, name: str = "tpu:v5e") -> Iterator[MosaicLowering]:
    """A Func that went through the passes, lowered in each way."""
    chip = CHIPS[name]
    lowering = MosaicLowering(func, TARGETS[name], emit_xla.run)
    legal = legalize(reshape_arrays(func).func, name.removeprefix("tpu:"))
    for plan in planner.candidates(legal, chip):
        other = copy(lowering)
        other.planned = plan
        yield other
