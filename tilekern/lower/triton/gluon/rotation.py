"""Loops whose last products are computed an iteration later, as `passes.delay_dots` does it, but of several products.

Tiles stay in their rings until the late product has read them, and operands are cast before they are carried.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from tilekern.ir.analysis.backward_slice import index_values
from tilekern.ir.compute import Convert
from tilekern.ir.control import Fold
from tilekern.ir.core import Block, Op, Value
from tilekern.ir.memory import Load
from tilekern.ir.records import record
from tilekern.ir.shape import Transpose
from tilekern.passes.delay_dots import Delayed, delayed_dot


@record
class Rotation:
    """The parts of a loop's body.

    Attributes:
      numbers: the carries that late products add to.
      late: ops that are computed an iteration later, in order.
      early: the other ops.
      held: results of early ops that late ops need.
    """

    numbers: tuple[int, ...]
    late: tuple[Op, ...]
    early: tuple[Op, ...]
    held: tuple[Value, ...]


def rotations(op: Fold) -> list[Rotation]:
    """The ways to delay products of a loop, ways with most products first."""
    if op.reverse:
        return []
    candidates = {n: delayed_dot(op.body, n, beside=lambda dot: True, keeps_tiles=True) for n in range(len(op.inits))}
    single = {n: delayed for n, delayed in candidates.items() if delayed is not None}
    counts = range(len(single), 0, -1)
    choices = [numbers for count in counts for numbers in combinations(single, count)]
    return [_rotation(op.body, numbers, [single[n] for n in numbers]) for numbers in choices]


def _rotation(body: Block, numbers: tuple[int, ...], parts: Sequence[Delayed]) -> Rotation:
    late = [op for op in body.ops if any(op in part.late for part in parts)]
    late_results = {v for op in late for v in op.results}
    # Cast early, operands take half of the registers.
    late = [op for op in late if not (isinstance(op, Convert) and late_results.isdisjoint(op.operands))]
    early = [op for op in body.ops if op not in late]
    again = index_values(body)
    early_results = {v for op in early for v in op.results if v not in again and loaded(v, body.ops) is None}
    held = dict.fromkeys(v for op in late for v in op.uses() if v in early_results)
    return Rotation(numbers, tuple(late), tuple(early), tuple(held))


def loaded(value: Value, ops: Sequence[Op]) -> Load | None:
    """The load whose tile a value is, through transposes, and through casts of numbers of 8 bits."""
    definers = {v: op for op in ops for v in op.results}
    casts = False
    while isinstance(op := definers.get(value), (Transpose, Convert)):
        casts, value = casts or isinstance(op, Convert), op.operands[0]
    return op if isinstance(op, Load) and not (casts and op.result.tile.dtype.itemsize > 1) else None
