"""The values of a Func that depend on some of its inputs."""

from __future__ import annotations

from collections.abc import Collection

from tilekern.ir.carries import carries
from tilekern.ir.control import Fold, Switch, While
from tilekern.ir.core import Block, Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Load
from tilekern.ir.types import TileType, accumulator, kind_of


# Functions whose derivative is zero wherever there is one; and ops that JAX differentiates to zero.
_STEPS = frozenset({"floor", "ceil", "sign", "round_even", "round_away", "nextafter"})
_STOPS = frozenset({"bitcast", "stop_gradient"})


def is_float(value: Value) -> bool:
    """True for a tile or an array of floats: only these have tangents."""
    return kind_of(value.type.dtype) == "float"


def wide(tile: TileType) -> TileType:
    """The type of a tangent or a cotangent of a tile: sums are in float32, or in float64 for float64."""
    return TileType(tile.shape, accumulator(tile.dtype))


def active_values(func: Func, refs: Collection[Value]) -> set[Value]:
    """The float values that depend on a load of one of `refs`.

    Args:
      func: any Func.
      refs: some of its inputs.
    """
    found: set[Value] = set()

    def note(value: Value) -> bool:
        if value in found or not is_float(value):
            return False
        found.add(value)
        return True

    def visit(block: Block) -> bool:
        # A list, so that each op is visited.
        return any([of_op(op) for op in block.ops])

    def of_op(op: Op) -> bool:
        if isinstance(op, Load):
            moves = op.ref in refs or (op.fill is not None and op.fill in found)
            return moves and note(op.result)
        if isinstance(op, (Fold, While)):
            changed = any([visit(region) for region in op.regions])
            for c in carries(op):
                if c.init in found or c.yielded in found:
                    changed |= any([note(v) for v in (*c.args, c.result)])
            return changed
        if isinstance(op, Switch):
            changed = any([visit(region) for region in op.regions])
            for number, result in enumerate(op.results):
                if any(region.results[number] in found for region in op.regions):
                    changed |= note(result)
            return changed
        moves = op.pure and not found.isdisjoint(op.operands) and not _is_flat(op)
        return moves and any([note(result) for result in op.results])

    while visit(func.body):
        pass
    return found


def _is_flat(op: Op) -> bool:
    """True if the derivative of an op is zero."""
    return op.name in _STOPS or (isinstance(op, Elementwise) and op.function in _STEPS)
