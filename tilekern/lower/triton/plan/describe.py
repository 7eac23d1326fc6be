"""The plan of a Triton program in words: its launch, the order of programs, their loops and copies."""

from __future__ import annotations

from tilekern.ir.control import Fold
from tilekern.ir.core import Func
from tilekern.ir.memory import Load
from tilekern.ir.quote import visible
from tilekern.lower.plan_text import axis_text, loop_lines, section
from tilekern.lower.triton.program import Argument, Program


def describe(program: Program, func: Func, target: str, is_final: bool) -> str:
    """The plan, for people to read.

    Args:
      program: the emitted program.
      func: the Func that it was made of.
      target: its name.
      is_final: False if the compiler may lower the number of stages, because their tiles do not fit shared memory.
    """
    launch = f"{program.num_warps} warps each"
    if any(isinstance(inner, Load) for op in func.walk() if isinstance(op, Fold) for inner in op.body.walk()):
        count = f"{program.num_stages} iteration{'s' if program.num_stages != 1 else ''}"
        launch += f", loads of {count} in flight{'' if is_final else ' at most'}"
    lines = [f"{visible(func.name)} on {target}: {program.programs:,} programs, {launch}"]
    if program.language == "gluon":
        group = f"{program.group} programs each, on {program.num_warps} warps of their own beside a warp that loads"
        blocks = "thread blocks" if program.cluster == 1 else f"clusters of {program.cluster} thread blocks"
        count = f"{program.programs:,} {blocks} that take programs in turn"
        lines = [f"{visible(func.name)} on {target}: {count}, {group}, {program.num_stages} iterations ahead at most"]
    lines += section("programs, the last axis fastest", (f"{a.name}: {axis_text(a)}" for a in func.axes))
    lines += section("loops", loop_lines(func))
    lines += section("arrays", map(_access, program.arguments))
    return "\n".join(lines)


def _access(argument: Argument) -> str:
    box = argument.descriptor
    if box is None:
        return f"{argument.name}: {argument.dtype}, by pointers"
    return f"{argument.name}: {argument.dtype}{list(box.shape)}, by TMA copies of {list(box.block)}"
