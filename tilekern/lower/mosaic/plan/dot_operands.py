"""Operands of dots in VMEM: operands that several dots share, and float32 operands that are split into narrow parts."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import prod

from tilekern.ir.compute import Dot
from tilekern.ir.core import Block, Op, Value
from tilekern.ir.records import record
from tilekern.ir.shape import Reshape, Transpose
from tilekern.ir.types import F32
from tilekern.lower.mosaic.calibration import PACKED_PARTS, PASS_COLUMNS, REGISTER_TILE_BYTES
from tilekern.lower.mosaic.chip import Chip, padded_bytes

BF16_PARTS = {"ieee": 3, "bf16x6": 3, "bf16x3": 2}
"""The number of bfloat16 parts that a float32 operand is split into, by the precision of a dot."""


@record
class SharedOperand:
    """An operand of several dots, which lives with its narrow parts from the first dot to the last.

    Attributes:
      first, last: the numbers of the first and the last dot in the block.
      size: the bytes of the operand and its parts.
    """

    first: int
    last: int
    size: int


def shared_operands(block: Block, chip: Chip) -> dict[Value, SharedOperand]:
    """The tiles that are operands of several dots of a block, transposed or not.

    The parts of a float32 operand take four bytes an element, as the operand does. Chips with packed parts pack two
    elements of a right operand into four bytes.
    """
    producers = {r: op for op in block.ops for r in op.results}
    dots: dict[Value, dict[int, Dot]] = {}
    for n, op in enumerate(block.ops):
        if isinstance(op, Dot):
            for value in op.operands:
                dots.setdefault(viewed_tile(value, producers), {})[n] = op
    shared: dict[Value, SharedOperand] = {}
    for value, users in dots.items():
        size = padded_bytes(value.tile.shape, value.tile.dtype)
        if value.tile.dtype == F32:
            is_left = any(viewed_tile(op.operands[0], producers) is value for op in users.values())
            part = Fraction(1, 1 if is_left or chip.name not in PACKED_PARTS else 2)
            size = int(size * (1 + part * max(BF16_PARTS.get(op.precision, 0) for op in users.values())))
        if len(users) > 1 and size > REGISTER_TILE_BYTES:
            shared[value] = SharedOperand(min(users), max(users), size)
    return shared


def viewed_tile(value: Value, producers: Mapping[Value, Op]) -> Value:
    """The tile that a value transposes or reshapes, through any number of such ops; else the value."""
    op = producers.get(value)
    while isinstance(op, Transpose | Reshape):
        value = op.operands[0]
        op = producers.get(value)
    return value


def is_one_column_pass(op: Dot, chip: Chip) -> bool:
    """True if the columns of the right operand fit one pass, so that the left operand is read once."""
    return prod(op.operands[1].tile.shape[d] for d in op.free(1)) <= PASS_COLUMNS.get(chip.name, chip.matrix_size)


def split_operands(block: Block, chip: Chip) -> set[Value]:
    """The float32 operands that depend on a dot and are split into narrow parts while that dot still runs.

    Such an operand takes twice its size; an example are the weights of attention.
    """
    dots = [
        op
        for op in block.ops
        if isinstance(op, Dot) and op.operands[0].tile.dtype == F32 and is_one_column_pass(op, chip)
    ]
    return {op.operands[0] for op in dots if op.precision in BF16_PARTS} & dot_results(block)


def dot_results(block: Block) -> set[Value]:
    """The results of a block's dots, and the values that depend on them."""
    values = set[Value]()
    for op in block.ops:
        if isinstance(op, Dot) or not values.isdisjoint(op.operands):
            values.update(op.results)
    return values
