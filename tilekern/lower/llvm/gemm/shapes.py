"""Sizes of a canonical dot: of matrices, or of stacks of matrices."""

from __future__ import annotations

import math

from tilekern.ir.compute import Dot
from tilekern.ir.core import cdiv, round_up
from tilekern.ir.records import record
from tilekern.ir.types import BF16, DType
from tilekern.lower.llvm import calibration
from tilekern.lower.llvm.element_index import Coords, Index
from tilekern.lower.llvm.gemm import tiles
from tilekern.lower.llvm.gemm.fours import BYTES, has_offsets
from tilekern.lower.llvm.gemm.microkernel import panel_vectors, register_rows
from tilekern.lower.llvm.runtime.machine import Machine


@record
class DotShape:
    """A canonical dot: `batch` products of [rows, depth] by [depth, columns].

    Attributes:
      op: the dot.
      batch: the number of products.
      rows: rows of the left operand.
      columns: columns of the right operand.
      depth: the contracted size.
      dtype: the dtype of the operands.
      contract: the contracted dim of each operand.
    """

    op: Dot
    batch: int
    rows: int
    columns: int
    depth: int
    dtype: DType
    contract: tuple[int, int]

    @property
    def has_batch(self) -> bool:
        """True if the operands have a batch dim."""
        return bool(self.op.batch[0])

    @property
    def per_word(self) -> int:
        """Elements of a word: two of 16 bits, four of 8."""
        return max(1, 4 // self.dtype.itemsize)

    @property
    def word_bytes(self) -> int:
        """Bytes of a word, and of a sum."""
        return self.sum_dtype.itemsize

    @property
    def words(self) -> int:
        """The depth in words."""
        return cdiv(self.depth, self.per_word)

    @property
    def sum_dtype(self) -> DType:
        """The dtype of the sums, and of the result."""
        return self.op.result.tile.dtype

    @property
    def whole_words(self) -> int:
        """The number of words with all elements; the last word may have fewer."""
        return self.depth // self.per_word

    def coords(self, side: int, batch: Coords, k: Index, free: Index) -> Coords:
        """The coordinates of an element of an operand."""
        return (*batch, k, free) if self.contract[side] == len(batch) else (*batch, free, k)

    def lanes(self, machine: Machine) -> int:
        """Columns in one register."""
        return machine.vector_bytes // self.sum_dtype.itemsize

    def uses_tiles(self, machine: Machine) -> bool:
        """True if tile registers multiply (AMX)."""
        return machine.has_int8_tiles if self.dtype in BYTES else self.dtype == BF16 and machine.has_bfloat16_tiles

    def has_offsets(self, machine: Machine) -> bool:
        """True if the microkernel's sums contain an offset of each column (see `fours`)."""
        return not self.uses_tiles(machine) and has_offsets(self.dtype, machine)

    def panel_columns(self, machine: Machine) -> int:
        """Columns of a panel."""
        return tiles.BLOCK if self.uses_tiles(machine) else panel_vectors(machine) * self.lanes(machine)

    def block_rows(self, machine: Machine, columns: int) -> int:
        """Rows that a microkernel multiplies by a panel of so many columns."""
        if self.uses_tiles(machine):
            return min(self.rows, tiles.BLOCK)
        return register_rows(machine, self.rows, columns, self.lanes(machine))

    def packed_left_words(self, machine: Machine) -> int:
        """Words of the left operand when packed: in whole tiles where tiles multiply."""
        sizes = (self.words, self.rows)
        return math.prod(round_up(n, tiles.TILE) for n in sizes) if self.uses_tiles(machine) else math.prod(sizes)

    def portions(self, machine: Machine) -> list[tuple[int, int]]:
        """The depth in portions whose panels stay in the first-level cache: first words, and numbers of words."""
        panel_bytes = calibration.TILE_PANEL_BYTES if self.uses_tiles(machine) else calibration.PANEL_BYTES
        portion = max(tiles.TILE, panel_bytes // (self.panel_columns(machine) * self.word_bytes))
        portions = [(at, min(portion, self.words - at)) for at in range(0, self.words, portion)] or [(0, 0)]
        if self.uses_tiles(machine):
            portions = [(at + n, deep) for at, depth in portions for n, deep in tiles.portions(depth)]
        return portions

    def padded_columns(self, machine: Machine) -> int:
        """Columns, rounded up to whole registers."""
        return round_up(self.columns, self.lanes(machine))


def dot_shape(op: Dot) -> DotShape:
    """The sizes of a canonical dot."""
    left, right = (x.tile for x in op.operands)
    has_batch = len(op.batch[0])
    (over_left,), (over_right,) = op.contract
    free = [next(d for d in (has_batch, has_batch + 1) if d != loop_over) for loop_over in (over_left, over_right)]
    batch = left.shape[0] if has_batch else 1
    depth = left.shape[over_left]
    return DotShape(op, batch, left.shape[free[0]], right.shape[free[1]], depth, left.dtype, (over_left, over_right))
