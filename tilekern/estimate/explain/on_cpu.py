"""What a CPU's program makes of each line, from its plan."""

from __future__ import annotations

from collections.abc import Mapping

from tilekern.estimate import by_target
from tilekern.estimate.cpu.rates import rates as rates_of
from tilekern.estimate.explain import listings, work
from tilekern.estimate.explain.explainer import Forecast
from tilekern.estimate.explain.explanation import Listing
from tilekern.estimate.explain.lines import Place, Words, accesses, add
from tilekern.estimate.on_cpu import FUNCTION, MICROKERNEL
from tilekern.ir.compute import Dot
from tilekern.ir.core import Array, Value, definitions
from tilekern.lower.llvm.gemm.shapes import dot_shape
from tilekern.lower.llvm.lowering import LlvmLowering
from tilekern.lower.llvm.plan.plan_text import line_of, step_words
from tilekern.lower.llvm.plan.steps import BufferCopies, LoopNest, Step
from tilekern.lower.target import Target


def forecast(lowering: LlvmLowering, target: Target, values: Mapping[Value, Array]) -> Forecast:
    """The estimate, and each line's part of the work by the rates of the units."""
    parts = work.shares_of_lines(lowering.func, values, rates(lowering))
    return Forecast(by_target.of_values(lowering, target, values), parts, work.SHARES_OF)


def became(lowering: LlvmLowering) -> Words:
    """What the plan makes of each of the user's lines."""
    said, definition = accesses(lowering.func, masks=True), definitions(lowering.legal)
    for steps in lowering.planned.steps.values():
        for step in steps:
            if isinstance(step, LoopNest):
                stores = "".join(f", stores to {op.ref.name}" for op in step.stores)
                add(said, line_of(step, definition), f"vector {step_words(step)}{stores}".replace("a loop", "loop"))
            elif isinstance(step, Step) and isinstance(step.op, Dot):
                add(said, step.op.loc, _dot(step, step.op, lowering))
            elif isinstance(step, Step) and step.op.regions:
                add(said, step.op.loc, "loop" if step.op.name in ("fold", "while") else step.op.name)
            elif not isinstance(step, BufferCopies) and any(r.tile.shape for r in step.op.results):
                add(said, step.op.loc, f"the step of {step.op.name}")
    return said


def _dot(step: Step, op: Dot, lowering: LlvmLowering) -> str:
    shape, machine = dot_shape(op), lowering.machine
    sizes = f"[{shape.rows}, {shape.depth}] by [{shape.depth}, {shape.columns}]"
    if step.packing is None:
        return f"matrix by few rows, {sizes}: no packing"
    packed = [side for side, packs in (("left", step.packing.packs_left), ("right", step.packing.packs_right)) if packs]
    form = "tiles (AMX)" if shape.uses_tiles(machine) else f"vectors of {machine.vector_bytes} bytes"
    return f"microkernel of {form}, {sizes}, {' and '.join(packed) or 'no operand'} packed"


def memory(lowering: LlvmLowering) -> dict[str, str]:
    """The scratch memory of a thread."""
    return {"scratch": f"{lowering.program.scratch:,} bytes for each thread", "tasks": f"{lowering.program.tasks:,}"}


def programs(lowering: LlvmLowering, numbers: Mapping[Place, int]) -> dict[str, Listing]:
    """LLVM IR, and the machine code as assembly."""
    del numbers  # no line tells where it comes from
    return {"program": listings.plain(lowering.text), "assembly": listings.plain(lowering.compile().asm["s"])}


def rates(lowering: LlvmLowering) -> tuple[float, float, float, float]:
    """Operations of matrix products, of vectors, of functions, and bytes, a second."""
    measured = rates_of(lowering.machine)
    vector = measured.float32 / 2
    return measured.float32 * MICROKERNEL, vector, vector / FUNCTION, measured.l3
