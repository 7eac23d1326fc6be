"""The rules that a step of a plan obeys whatever memory holds: effects and temporary memory. See `verify_plan`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tilekern.errors import PlanError
from tilekern.ir.compute import Dot
from tilekern.ir.core import Block, Op, Value
from tilekern.ir.debug import Print
from tilekern.ir.memory import Load, MemoryOp
from tilekern.ir.ordering import Sort, TopK
from tilekern.ir.shape import Reshape
from tilekern.lower.llvm.element_index import is_virtual
from tilekern.lower.llvm.plan.plan_text import step_words
from tilekern.lower.llvm.plan.steps import AnyStep, Buffer, BufferCopies, LoopNest, Step


def require(condition: bool, summary: str, expected: str, got: str) -> None:
    """Raise a `PlanError` unless a condition holds."""
    if not condition:
        raise fault(summary, expected, got)


def fault(summary: str, expected: str, got: str) -> PlanError:
    """The error of a plan that breaks a rule."""
    fix = 'this is a bug of tilekern: please report it with the kernel; target="cpu:xla" runs it without a plan'
    return PlanError(f"plan of cpu:llvm: {summary}", expected=expected, got=got, fix=fix)


def check_effects(block: Block, steps: Sequence[AnyStep]) -> None:
    """Check that every op with an effect is in one step, and that accesses of an array are in the order of the ops.

    A loop nest makes its stores in each iteration, so two stores to one array would not be in the order of the ops.
    """
    stepped = [(step, op) for step in steps for op in _ops(step)]
    for key in dict.fromkeys(key for op in block.ops for key in _effects(op)):
        ordered = [op for op in block.ops if key in _effects(op)]
        stepped_here = [(step, op) for step, op in stepped if key in _effects(op)]
        in_order = ordered == [op for _, op in stepped_here] and len(ordered) == len({step for step, _ in stepped_here})
        name = f"{key}s" if isinstance(key, str) else f"accesses of {key.name}"
        got = f"{_names(op for _, op in stepped_here)}, in {len({step for step, _ in stepped_here})} steps"
        require(in_order, f"{name} are not in the order of the ops", _names(ordered), got)


def _ops(step: AnyStep) -> Sequence[Op]:
    if isinstance(step, BufferCopies):
        return ()
    return step.stores if isinstance(step, LoopNest) else [step.op]


def _effects(op: Op) -> set[Value | str]:
    """The arrays whose accesses have an order, and the names of ops with other effects."""
    if op.regions:
        return {key for region in op.regions for inner in region.ops for key in _effects(inner)}
    if isinstance(op, MemoryOp):
        return set() if is_virtual(op) else {op.ref}
    return set() if op.pure else {op.name}


def _names(ops: Iterable[Op]) -> str:
    return ", ".join(f"{op.name} of line {op.loc.line}" for op in ops) or "none"


def check_temporary(step: Step, definition: Mapping[Value, Op], buffers: Mapping[Value, Buffer]) -> None:
    """Check that temporary memory holds what an op copies, and that operands which a dot does not pack have addresses.

    Args:
      step: the step.
      definition: the op that defines each value.
      buffers: the tiles in memory.
    """
    op, nbytes, least = step.op, 0 if step.temporary is None else step.temporary.nbytes, 0
    match op:
        case Dot() if step.packing is not None:
            packs = (step.packing.packs_left, step.packing.packs_right)
            for x, packed in zip(op.operands, packs, strict=True):
                in_place = f"{step_words(step)} reads an operand in place"
                require(packed or _has_address(x, definition, buffers), in_place, f"an address of {x.type}", "none")
                batches = x.tile.shape[0] if op.batch[0] else 1
                least += packed * x.tile.nbytes // max(batches, 1)
        case Sort():
            least = 8 * op.result.tile.shape[op.dim]
        case TopK():
            least = 8 * op.k
        case Print():
            least = sum(x.tile.nbytes for x in op.operands)
        case _:
            pass
    words = f"{step_words(step)} lacks temporary memory"
    require(nbytes >= least, words, f"{least} bytes or more", f"{nbytes} bytes")


def _has_address(value: Value, definition: Mapping[Value, Op], buffers: Mapping[Value, Buffer]) -> bool:
    """True if a tile is in memory with constant strides."""
    if value in buffers:
        return True
    op = definition.get(value)
    if isinstance(op, Reshape) and is_virtual(op):
        return _has_address(op.operands[0], definition, buffers)
    if not isinstance(op, Load) or not is_virtual(op) or op.masked or not op.access.in_bounds:
        return False
    return all(dim.kind in ("block", "index") for dim in op.access.dims)
