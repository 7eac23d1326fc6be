"""Text of a plan: the steps of a program, the user's lines they come from, and the offsets of tiles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tilekern.ir.core import Block, Op, Value
from tilekern.ir.quote import visible
from tilekern.lower.llvm.plan.steps import AnyStep, Buffer, BufferCopies, LoopNest, Plan, Step
from tilekern.lower.llvm.program import Program
from tilekern.source import UNKNOWN, Loc


def plan_text(program: Program, plan: Plan, body: Block) -> str:
    """The text of a plan: a line for the program, then a line for each step, as "loops over [64]: f32[64] @128".

    `@` precedes the offset of a tile in scratch memory, in bytes. Steps of scalars have no line.
    """
    head = f"{program.name}: {program.tasks} tasks, {program.scratch} bytes of scratch memory for each thread"
    return "\n".join([head, *_block(plan, body, "  ")])


def step_words(step: AnyStep) -> str:
    """A name for a step in errors: "a copy", "a loop nest over [8, 64]" or "the step of dot"."""
    if isinstance(step, BufferCopies):
        return "a copy"
    return f"a loop nest over {list(step.space)}" if isinstance(step, LoopNest) else f"the step of {step.op.name}"


def line_of(step: AnyStep, definition: Mapping[Value, Op]) -> Loc:
    """The user's line that a step comes from; unknown for copies.

    Args:
      step: the step.
      definition: the op that defines each value.
    """
    if isinstance(step, Step):
        return step.op.loc
    if isinstance(step, BufferCopies):
        return UNKNOWN
    ops = [*_ops(step), *(definition[m.value] for m in step.maps if m.value in definition)]
    return ops[0].loc if ops else UNKNOWN


def _block(plan: Plan, block: Block, indent: str) -> Iterator[str]:
    for step in plan.steps[block]:
        text = _step(step)
        if text:
            yield indent + text
        if isinstance(step, Step):
            for region in step.op.regions:
                yield from _block(plan, region, indent + "  ")


def _step(step: AnyStep) -> str:
    if isinstance(step, BufferCopies):
        moves = [f"@{a.root.offset} to @{b.root.offset}" for a, b in step.moves if a.root is not b.root]
        return f"copies {', '.join(moves)}" if moves else ""
    if isinstance(step, LoopNest):
        parts = [f"{m.value.type} {_at(m.buffer)}" for m in step.maps]
        parts += [f"{op.monoid} of the last dim" for op in step.reduces]
        parts += [f"store to {op.ref.name}" for op in step.stores]
        sizes = ", ".join(map(str, step.space))
        return f"loops over [{sizes}]: {'; '.join(parts)}{_line(_loc(step))}"
    if not step.op.regions and not any(r.tile.shape for r in step.op.results) and step.op.pure:
        return ""  # a scalar
    results = ", ".join(f"{value.type} {_at(buffer)}" for value, buffer in dict(step.produces).items())
    notes = f"; copies operands to {_at(step.temporary)}" if step.temporary is not None else ""
    notes += "; adds to what is there" if step.accumulates else ""
    return f"{step.op.name}{': ' * bool(results)}{results}{notes}{_line(step.op.loc)}"


def _at(buffer: Buffer) -> str:
    return f"@{buffer.root.offset}"


def _loc(nest: LoopNest) -> Loc:
    ops = _ops(nest)
    return ops[0].loc if ops else UNKNOWN


def _ops(nest: LoopNest) -> list[Op]:
    return [*nest.stores, *nest.reduces]


def _line(loc: Loc) -> str:
    return "" if loc is UNKNOWN else f"  ({visible(loc.file.rsplit('/', 1)[-1])}:{loc.line})"
