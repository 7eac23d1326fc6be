"""Operands of dots in VMEM: operands that several dots share, and float32 operands that are split into narrow parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from tilekern.ir.compute import Dot
from tilekern.ir.core import Block, Op, Value
from tilekern.ir.shape import Reshape, Transpose
from tilekern.ir.types import F32
from tilekern.lower.mosaic.calibration import PASS_COLUMNS, REGISTER_TILE_BYTES
from tilekern.lower.mosaic.chip import Chip, padded_bytes

BF16_PARTS = {"ieee": 3, "bf16x6": 3, "bf16x3": 2}
"""Narrow numbers that one of float32 is cut into, by the precision of a dot."""


@dataclass(frozen=True)
class SharedOperand:
    """An operand of several dots, which lives with its narrow parts from the first of them to the last.

    Attributes:
      first, last: the numbers of these dots in their block.
      size: the bytes of the operand and its parts.
    """

    first: int
    last: int
    size: int


def shared_operands(block: Block) -> dict[Value, SharedOperand]:
    """The tiles that are operands of several dots of a block, transposed or not."""
    made = {r: op for op in block.ops for r in op.results}
    dots: dict[Value, dict[int, Dot]] = {}
    for n, op in enumerate(block.ops):
        if isinstance(op, Dot):
            for value in op.operands:
                dots.setdefault(viewed_tile(value, made), {})[n] = op
    found: dict[Value, SharedOperand] = {}
    for value, by in dots.items():
        size = padded_bytes(value.tile.shape, value.tile.dtype)
        if value.tile.dtype == F32:
            size *= max(1 + BF16_PARTS[op.precision] if op.precision in BF16_PARTS else 1 for op in by.values())
        if len(by) > 1 and size > REGISTER_TILE_BYTES:
            found[value] = SharedOperand(min(by), max(by), size)
    return found


def viewed_tile(value: Value, made: Mapping[Value, Op]) -> Value:
    """The tile that a value transposes or reshapes; the value itself otherwise."""
    op = made.get(value)
    while isinstance(op, Transpose | Reshape):
        value = op.operands[0]
        op = made.get(value)
    return value


def is_one_column_pass(op: Dot, chip: Chip) -> bool:
    """True if the columns of the right operand fit one pass, so that the left operand is read once."""
    return prod(op.operands[1].tile.shape[d] for d in op.free(1)) <= PASS_COLUMNS.get(chip.name, chip.matrix_size)


def split_operands(block: Block, chip: Chip) -> set[Value]:
    """The float32 operands that depend on a dot and are split into narrow parts while that dot still runs.

    An example are the weights of attention. They take twice their size.
    """
    dots = [
        op
        for op in block.ops
        if isinstance(op, Dot) and op.operands[0].tile.dtype == F32 and is_one_column_pass(op, chip)
    ]
    return {op.operands[0] for op in dots if op.precision in BF16_PARTS} & dot_results(block)


def dot_results(block: Block) -> set[Value]:
    """The results of a block's dots, and the values that depend on them."""
    found = set[Value]()
    for op in block.ops:
        if isinstance(op, Dot) or not found.isdisjoint(op.operands):
            found.update(op.results)
    return found
