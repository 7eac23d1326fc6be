"""The microkernel on AMX's tiles: 32 rows by 32 columns of sums, and 16 words along k in a step.

A tile register has 16 rows of 64 bytes. Four hold sums, two hold rows of the left operand, and two hold a panel of the
right one, which lies in memory like tiles: a row of words for each word along k. A configuration gives each
register its rows and bytes, so that nothing beyond an operand is read or written, and no padding is multiplied.
"""

from __future__ import annotations

import numpy as np

from tilekern.ir.records import record
from tilekern.ir.types import BF16, DTYPES, DType
from tilekern.lower.llvm.ir_builder import Code, Module
from tilekern.lower.llvm.ir_values import I8, I64, PTR, VOID, Reg, constant

TILE = 16
"""Rows of a tile, words of a row, and words along k of a step."""

BLOCK = 2 * TILE
"""Rows, and columns, of a microkernel."""

_LEFT, _RIGHT = 4, 6  # numbers of the registers of operands; those of sums are 0 to 3
_WORD = 4  # bytes of a word, and of a sum

_PRODUCTS = {BF16: "tdpbf16ps", DTYPES["i8"]: "tdpbssd", DTYPES["u8"]: "tdpbuud"}


@record
class Strides:
    """Strides in bytes.

    Attributes:
      left_tile: of the left operand, from a tile to the tile below.
      left_k: of the left operand along k, for each word; times `TILE`, the stride from tile to tile.
      right_k: of the right operand along k.
      out_row: of the result along rows.
    """

    left_tile: int
    left_k: int
    right_k: int
    out_row: int

    def __str__(self) -> str:
        return f"{self.left_tile}_{self.left_k}_{self.right_k}_{self.out_row}"


@record
class TileKernel:
    """A function that multiplies at most `BLOCK` rows by at most `BLOCK` columns; words of the left are neighbours.

    Attributes:
      dtype: of the operands.
      rows: the number of rows.
      columns: the columns of the panel.
      words: words along k of a step, at most `TILE`; they divide the depth.
      strides: of the operands and the result.
      adds: True if the sums are added to the values at `out`.
    """

    dtype: DType
    rows: int
    columns: int
    words: int
    strides: Strides
    adds: bool

    def configure(self, code: Code) -> None:
        """Give the tile registers the sizes of this kernel; they keep them until another kernel is configured."""
        name = f"configure_{self.rows}x{self.columns}by{self.words}"

        def body(code: Code) -> None:
            _do(code, "ldtilecfg", code.module.data(f"{name}_sizes", self.sizes()))
            code.ret()

        code.call(code.module.function(name, [], body), VOID)

    def sizes(self) -> np.ndarray:
        """The 64 bytes of a configuration (Intel's Software Developer's Manual, LDTILECFG)."""
        sizes = np.zeros(64, np.uint8)
        sizes[0] = 1  # the palette
        row_bytes, rows = sizes[16:32].view(np.uint16), sizes[48:56]
        down, across = _pieces(self.rows), _pieces(self.columns)
        for i, height in enumerate(down):
            rows[_LEFT + i], row_bytes[_LEFT + i] = height, self.words * _WORD
            for j, width in enumerate(across):
                rows[2 * i + j], row_bytes[2 * i + j] = height, width * _WORD
        for j, width in enumerate(across):
            rows[_RIGHT + j], row_bytes[_RIGHT + j] = self.words, width * _WORD
        return sizes

    def define(self, module: Module) -> str:
        """Define `void (left, stride of its rows in bytes, right, out, depth in words)`; returns its name."""
        name = f"tiles_{self.dtype}_{self.rows}x{self.columns}by{self.words}_{'adds' if self.adds else 'sets'}"
        name += f"_{self.strides}"
        parameters = [("left", PTR), ("row", I64), ("right", PTR), ("out", PTR), ("depth", I64)]
        return module.function(name, parameters, self._body, inline=False)

    def _body(self, code: Code, left: Reg, row: Reg, right: Reg, out: Reg, depth: Reg) -> None:
        down, across = range(len(_pieces(self.rows))), range(len(_pieces(self.columns)))
        strides = self.strides
        right_k, out_row = constant(strides.right_k, I64), constant(strides.out_row, I64)
        sums = {
            (i, j): (_number(2 * i + j), code.gep(out, i * TILE * strides.out_row + j * TILE * _WORD))
            for i in down
            for j in across
        }
        for tile, place in sums.values():
            if self.adds:
                _do(code, "tileloadd64", tile, place, out_row)
            else:
                _do(code, "tilezero", tile)
        below = code.gep(left, strides.left_tile)

        def step(k: Reg) -> None:
            at = code.binary("mul nsw", k, strides.left_k)
            panel = code.gep(right, code.binary("mul nsw", k, strides.right_k))
            for i in down:
                _do(code, "tileloadd64", _number(_LEFT + i), code.gep(below if i else left, at), row)
                for j in across:
                    if i == 0:
                        place = code.gep(panel, j * TILE * _WORD)
                        _do(code, "tileloadd64", _number(_RIGHT + j), place, right_k)
                    operands = _number(_LEFT + i), _number(_RIGHT + j)
                    _do(code, _PRODUCTS[self.dtype], sums[i, j][0], *operands)

        code.loop(0, depth, self.words, step)
        for tile, place in sums.values():
            _do(code, "tilestored64", tile, place, out_row)
        code.ret()


def release(code: Code) -> None:
    """Give the tile registers back, so that the system need not save them when it switches threads."""
    _do(code, "tilerelease")


def portions(depth: int) -> list[tuple[int, int]]:
    """A depth in words as (begin, depth) of its whole steps, and of the remaining step: 37 is (0, 32), (32, 5)."""
    whole = depth // TILE * TILE
    return [(at, words) for at, words in ((0, whole), (whole, depth - whole)) if words or not depth]


def _pieces(size: int) -> list[int]:
    """At most `BLOCK` rows or columns as tiles."""
    return [min(TILE, size - at) for at in range(0, size, TILE)]


def _number(tile: int) -> Reg:
    return constant(tile, I8)


def _do(code: Code, name: str, *operands: Reg) -> None:
    """An instruction of AMX."""
    code.call_external(f"llvm.x86.{name}", VOID, *operands)
