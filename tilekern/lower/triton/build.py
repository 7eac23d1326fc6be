"""From a Func to a Triton program: legalize, plan, emit."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from tilekern.ir import ranges
from tilekern.ir.compute import Dot
from tilekern.ir.core import Func
from tilekern.lower.triton.chip import Chip
from tilekern.lower.triton.copies import plan_copies
from tilekern.lower.triton.emit import Emitter
from tilekern.lower.triton.legalize import legalize
from tilekern.lower.triton.memory import Memory
from tilekern.lower.triton.names import Names
from tilekern.lower.triton.prelude import prelude
from tilekern.lower.triton.program import Program

_HEAD = "import triton\nimport triton.language as tl\n"
_LIBDEVICE = "from triton.language.extra import libdevice\n"


def build(func: Func, chip: Chip, hints: Mapping[str, int]) -> Program:
    """The program of a Func that went through the pipeline of passes.

    Args:
      func: the Func.
      chip: what it shall run on.
      hints: `num_warps` and `num_stages`, where a schedule or the call gives them.
    """
    legal = legalize(func)
    names = Names()
    copies = plan_copies(legal.func, chip, ranges.analyze(legal.func))
    entry = names.fresh(func.name)
    memory = Memory(legal.func, copies, names)
    emitter = Emitter(legal.func, memory, names)
    emitter.run()
    body = "\n".join(emitter.writer.lines) or "    pass"
    functions = prelude(body)
    head = _HEAD + (_LIBDEVICE if "libdevice." in body + functions else "") + functions
    head += f"\n\n@triton.jit\ndef {entry}({', '.join(a.name for a in memory.arguments)}):\n"
    first = head.count("\n")
    return Program(
        name=entry,
        text=f"{head}{body}\n",
        arguments=tuple(memory.arguments),
        operands=tuple(memory.operands),
        constants=legal.constants,
        results=tuple(memory.results),
        programs=prod(func.grid),
        num_warps=hints.get("num_warps") or default_warps(legal.func),
        num_stages=hints.get("num_stages", 2),
        lines={number + first: loc for number, loc in emitter.writer.places.items()},
        loc=func.loc,
    )


def default_warps(func: Func) -> int:
    """Two warpgroups for dots of 128 × 128 and more, otherwise about 16 elements of the largest tile for a thread."""
    dots = [op.result.tile.size for op in func.walk() if isinstance(op, Dot)]
    if dots:
        return 8 if max(dots) >= 128 * 128 else 4
    largest = max((v.tile.size for op in func.walk() for v in op.results), default=1)
    warps = 1
    while warps < 8 and warps * 32 * 16 < largest:
        warps *= 2
    return warps
