"""The plan of a Func in words, one line a step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tilekern.ir.core import Block, Func
from tilekern.lower.llvm import emit_program
from tilekern.lower.llvm.legalize import legalize
from tilekern.lower.llvm.plan.buffers import assign_offsets
from tilekern.lower.llvm.plan.loop_fusion import fuse_loops
from tilekern.lower.llvm.plan.steps import AnyStep, BufferCopies, LoopNest, Plan, Step
from tilekern.lower.llvm.runtime.machine import Machine


def planned(func: Func, machine: Machine) -> tuple[Func, Plan]:
    """The legal Func, and its plan with places."""
    legal = legalize(func, machine)
    found = fuse_loops(legal, partial(emit_program._scratch_of, machine))
    assign_offsets(legal, found)
    return legal, found


def words(legal: Func, found: Plan) -> list[str]:
    """Its steps, those of regions indented; of copies those that are made."""
    return list(_block(found, legal.body, ""))


def every_step(found: Plan) -> list[AnyStep]:
    """All steps."""
    return [step for steps in found.steps.values() for step in steps]


def _block(found: Plan, block: Block, indent: str) -> Iterator[str]:
    for step in found.steps[block]:
        match step:
            case LoopNest():
                yield indent + _nest(step)
            case BufferCopies():
                moves = [(a, b) for a, b in step.moves if a.root is not b.root and a.nbytes]
                if moves:
                    yield f"{indent}copy {' '.join(str(a.nbytes) for a, _ in moves)}"
            case Step():
                results = " ".join(str(r.type) for r in step.op.results)
                yield f"{indent}{step.op.name} {results}{' added' if step.accumulates else ''}".rstrip()
                for region in step.op.regions:
                    yield from _block(found, region, indent + "  ")


def _nest(nest: LoopNest) -> str:
    parts = [f"for {list(nest.space)}:"]
    parts += [f"keep {m.value.type}" for m in nest.maps]
    parts += [f"{op.monoid}" for op in nest.reduces]
    parts += [f"store {op.ref.name}" for op in nest.stores]
    return " ".join(parts)
