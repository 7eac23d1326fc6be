"""A Func → a Triton program: legalize, plan, emit."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from tilekern.ir.analysis import ranges
from tilekern.ir.compute import Dot
from tilekern.ir.control import Fold, Switch
from tilekern.ir.core import Func, Op
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Load
from tilekern.ir.quote import code_of
from tilekern.ir.types import I32
from tilekern.lower.rewrite.constant_inputs import Closed, constants_as_inputs
from tilekern.lower.sizes import warn_large
from tilekern.lower.triton.calibration import DEFAULT_STAGES
from tilekern.lower.triton.chip import Chip
from tilekern.lower.triton.emit.emit_triton import Emitter
from tilekern.lower.triton.emit.memory import Memory
from tilekern.lower.triton.emit.names import Names
from tilekern.lower.triton.emit.prelude import prelude
from tilekern.lower.triton.legalize import legalize
from tilekern.lower.triton.plan.launch_options import default_warps
from tilekern.lower.triton.plan.register_demand import warn_of_spills
from tilekern.lower.triton.plan.tma import TmaCopy, plan_tma_copies
from tilekern.lower.triton.program import Program

_HEAD = "import triton\nimport triton.language as tl\n"
_LIBDEVICE = "from triton.language.extra import libdevice\n"


def build(func: Func, chip: Chip, hints: Mapping[str, int]) -> Program:
    """Legalize a Func, plan its copies, and emit its source.

    Args:
      func: went through the passes of every Func.
      chip: the GPU to run on.
      hints: `num_warps` and `num_stages`, where a schedule or the call gives them.
    """
    warned = warn_large(func, chip.name)
    warps = hints.get("num_warps") or default_warps(func, chip.vendor.lanes)
    legal, copies = _planned(func, chip, warps)
    if _has_masked_loops(legal.func, copies, chip):
        legal, copies = _planned(func, chip, warps, split=True)
    launched = hints.get("num_warps") or default_warps(legal.func, chip.vendor.lanes)
    if not warned and not warn_large(legal.func, chip.name):
        warn_of_spills(legal.func, chip, launched, copies)
    names = Names()
    entry = names.fresh(func.name)
    memory = Memory(legal.func, copies, names)
    emitter = Emitter(legal.func, memory, names)
    emitter.run()
    body = "\n".join(emitter.writer.lines) or "    pass"
    functions = prelude(code_of(body))
    head = _HEAD + (_LIBDEVICE if "libdevice." in code_of(body + functions) else "") + functions
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
        num_warps=launched,
        num_stages=hints.get("num_stages", DEFAULT_STAGES),
        lines={number + first: loc for number, loc in emitter.writer.places.items()},
        loc=func.loc,
        prints={number + first: printed for number, printed in emitter.debug.prints().items()},
        messages={number + first: message for number, message in emitter.debug.messages().items()},
    )


def _planned(func: Func, chip: Chip, warps: int, split: bool = False) -> tuple[Closed, dict[Op, TmaCopy]]:
    legal = constants_as_inputs(legalize(func, chip, split, warps), "table")
    return legal, plan_tma_copies(legal.func, chip, ranges.analyze(legal.func))


def _has_masked_loops(func: Func, copies: Mapping[Op, TmaCopy], chip: Chip) -> bool:
    """True if a loop of dots compares positions or checks bounds, which most of its iterations need not do.

    On Hopper a loop with a branch is not split: `guard_masks` put the branch there, and says why it keeps one loop.
    """
    on_hopper = chip.matrix_unit == "wgmma"
    return any(
        _is_comparison(inner) or (isinstance(inner, Load) and not inner.access.in_bounds and inner not in copies)
        for op in func.walk()
        if isinstance(op, Fold) and any(isinstance(inner, Dot) for inner in op.body.ops)
        if not (on_hopper and any(isinstance(inner, Switch) for inner in op.body.ops))
        for inner in op.body.ops
    )


def _is_comparison(op: Op) -> bool:
    compares = isinstance(op, Elementwise) and op.function in ("lt", "le", "gt", "ge")
    return compares and op.operands[0].tile.size > 1 and op.operands[0].tile.dtype == I32
