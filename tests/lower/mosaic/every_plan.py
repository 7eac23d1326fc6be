"""All candidate plans of a Func, not only the first one that fits."""

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
from tilekern.lower.mosaic.plan.verify_plan import verify_plan
from tilekern.lower.target import TARGETS
from tilekern.lower.xla.emit import emit_xla


def kind_of_plan(plan: KernelPlan) -> str:
    """The form of a plan's loops: "resident", "grid_loop", "step_table", "pipelined" or "row_dma"."""
    if plan.row_dma_inputs:
        return "row_dma"
    if plan.pipelines:
        return "pipelined"
    if plan.grid_loop is None:
        return "resident"
    return "grid_loop" if plan.grid_loop.table is None else "step_table"


def every_plan(func: Func, name: str = "tpu:v5e") -> Iterator[MosaicLowering]:
    """The lowerings of a Func that went through the passes, one for each candidate plan."""
    chip = CHIPS[name]
    lowering = MosaicLowering(func, TARGETS[name], emit_xla.run)
    legal = legalize(reshape_arrays(func).func, name.removeprefix("tpu:"))
    for plan in planner.candidates(legal, chip):
        verify_plan(plan)
        other = copy(lowering)
        other.planned = plan
        yield other
