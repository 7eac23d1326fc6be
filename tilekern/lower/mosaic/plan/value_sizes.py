"""Bytes of VMEM that a value takes if it does not stay in registers."""

from __future__ import annotations

from collections.abc import Mapping

from tilekern.ir.compute import Bitcast, Constant, Convert, Dot, Reduce, Select
from tilekern.ir.control import Fold, While
from tilekern.ir.core import Op, Value, round_up, unknown_op
from tilekern.ir.debug import Assert, Print
from tilekern.ir.dynamic import Take
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Load, MemoryOp
from tilekern.ir.ordering import ArgReduce
from tilekern.ir.records import record
from tilekern.ir.shape import Broadcast, Concatenate, Iota, Reshape, Slice, Transpose
from tilekern.ir.types import F32
from tilekern.lower.mosaic.calibration import LONG_ROW_SHARE, REGISTER_COLUMNS, REGISTER_TILE_BYTES, TRIANGLE_SHARE
from tilekern.lower.mosaic.chip import SUBLANES, Chip, padded_bytes
from tilekern.lower.mosaic.plan.hbm_layout import Layout
from tilekern.lower.mosaic.plan.unroll import Unrolling

VIEWS = (Transpose, Reshape, Broadcast)
"""Ops whose result is computed if their operand is."""

BARRIERS = (Reduce, ArgReduce, Dot)
"""Ops that take all elements of a tile before they give the first one of their result."""

_STREAMED = (
    *(Elementwise, Select, Convert, Bitcast, Constant, Iota, Take),
    *(Broadcast, Reshape, Transpose, Slice, Concatenate),
    *(MemoryOp, Print, Assert),
)

REPEATED = (Constant, Iota, Load)
"""Ops that the compiler repeats at each use, in place of keeping their results."""


def is_streamed(op: Op) -> bool:
    """True if an op of a legal Func is computed register by register, as the ops that use its result ask for it."""
    if isinstance(op, BARRIERS) or op.regions:
        return False
    if not isinstance(op, _STREAMED):
        raise unknown_op(op, __name__)
    return True


@record
class KernelContext:
    """Facts that all blocks of a kernel share.

    Attributes:
      chip: the TPU.
      unrollings: the unrolling of each loop inside of the kernel.
      layouts: the layout of each access's array.
      triangles: masks with a diagonal border that the compiler knows.
    """

    chip: Chip
    unrollings: Mapping[Fold, Unrolling]
    layouts: Mapping[MemoryOp, Layout | None]
    triangles: frozenset[Value]

    def unrolling_of(self, op: Op) -> Unrolling:
        """The unrolling of a loop."""
        return self.unrollings.get(op, Unrolling()) if isinstance(op, Fold) else Unrolling()

    def is_unrolled(self, op: Op) -> bool:
        """True if an op is a fold of which all iterations are unrolled."""
        return isinstance(op, Fold) and not self.unrolling_of(op).is_loop

    def is_loop(self, op: Op) -> bool:
        """True if an op is a loop inside of the kernel, and is not unrolled whole."""
        return isinstance(op, While) or (isinstance(op, Fold) and op in self.unrollings and not self.is_unrolled(op))


def is_row_broadcast(op: Op) -> bool:
    """True if an op is a broadcast that inserts a dim between the rows and the lanes."""
    return isinstance(op, Broadcast) and len(op.dims) > 1 and op.dims[-2:] == (len(op.shape) - 3, len(op.shape) - 1)


def is_packed_row(op: Op) -> bool:
    """True if an op converts to one row of a two-byte dtype."""
    return isinstance(op, Convert) and op.result.tile.shape[:-1] == (1,) and op.result.tile.dtype.itemsize == 2


def is_computed(value: Value, producers: Mapping[Value, Op], small: int = REGISTER_TILE_BYTES) -> bool:
    """True if a value is a large tile that the block computes."""
    op = producers.get(value)
    if op is None or len(value.tile.shape) < 2 or padded_bytes(value.tile.shape, value.tile.dtype) <= small:
        return False
    while isinstance(op, VIEWS):
        op = producers.get(op.operands[0])
    return op is not None and not isinstance(op, REPEATED)


def has_long_rows(value: Value, producers: Mapping[Value, Op]) -> bool:
    """True if a value is a large tile that the block loads, with rows too long for the registers."""
    if not isinstance(producers.get(value), Load):
        return False
    shape = value.tile.shape
    return (
        len(shape) > 1 and shape[-1] > REGISTER_COLUMNS and padded_bytes(shape, value.tile.dtype) > REGISTER_TILE_BYTES
    )


def value_bytes(value: Value, op: Op, kernel: KernelContext) -> int:
    """The bytes of a value in VMEM.

    A tile of more than two dims takes whole registers; a loaded tile takes 32 bits an element. A packed row fills a
    quarter of its registers, half on chips with bfloat16 vectors. Loads of long rows are in part repeated, and of
    a triangle only a part is in VMEM.
    """
    shape, dtype = value.tile.shape, F32 if isinstance(op, Load) else value.tile.dtype
    if is_row_broadcast(op):
        shape = (*shape[:-2], SUBLANES, shape[-1])
    if len(shape) > 2 and not isinstance(op, Reshape):
        shape = (*shape[:-2], round_up(shape[-2], SUBLANES), shape[-1])
    size = padded_bytes(shape, dtype)
    if is_packed_row(op):
        return size * (2 if kernel.chip.bf16_vectors else 4)
    if isinstance(op, Select) and op.operands[0] in kernel.triangles:
        return int(size * TRIANGLE_SHARE)
    return int(size * LONG_ROW_SHARE) if has_long_rows(value, {value: op}) else size
