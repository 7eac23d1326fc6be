"""The microkernel of dots: a few rows of the left operand by one panel of the right, with sums in registers."""

from __future__ import annotations

from tilekern.ir.core import cdiv
from tilekern.ir.records import record
from tilekern.ir.types import BF16, F32, F64, I32, DType
from tilekern.lower.llvm import calibration
from tilekern.lower.llvm.gemm.fours import BYTES, accumulate_fours, left_word
from tilekern.lower.llvm.ir_builder import Code, Module
from tilekern.lower.llvm.ir_values import I64, PTR, Reg, Type, constant, vector_constant
from tilekern.lower.llvm.runtime.machine import Machine


def panel_vectors(machine: Machine) -> int:
    """Registers of a row of a panel."""
    return 4 if machine.registers >= 32 else 3 if machine.vector_bytes == 32 else 2


def register_rows(machine: Machine, rows: int, columns: int, lanes: int) -> int:
    """The most rows whose sums fit the registers beside a panel row and one element; a divisor of all rows if near."""
    vectors = cdiv(columns, lanes)
    wide = vectors >= calibration.WIDE_PANEL_VECTORS
    chosen = calibration.MAX_WIDE_MICROKERNEL_ROWS if wide else calibration.MAX_MICROKERNEL_ROWS
    most = max(1, min(chosen, (machine.registers - vectors - 2) // vectors))
    return next((n for n in range(most, max(most // 2, 3), -1) if rows % n == 0), most)


@record
class Microkernel:
    """A function that multiplies a few rows by one panel.

    Attributes:
      dtype: the dtype of the operands.
      rows: the number of rows.
      columns: the columns of the panel.
      left_k: the stride of the left operand along k, in bytes.
      right_k: the stride of the right operand along k, in bytes.
      out_row: the stride of the result along rows, in bytes.
      adds: True if the sums are added to the values at `out`.
      corrects: True if the row of offsets at `offsets` is subtracted from the sums (see `fours`).
      unroll: the number of k in one iteration; it divides the depth.
    """

    dtype: DType
    rows: int
    columns: int
    left_k: int
    right_k: int
    out_row: int
    adds: bool
    corrects: bool
    unroll: int

    def configure(self, code: Code) -> None:
        """Nothing: vector registers have one size."""

    def define(self, module: Module) -> str:
        """Define `void (left, stride of its rows in bytes, right, out, depth in words)`; returns its name.

        If it corrects, the address of the row of offsets is one more parameter.
        """
        sums = ("adds" if self.adds else "sets") + ("_corrected" if self.corrects else "")
        name = f"dot_{self.dtype}_{self.rows}x{self.columns}by{self.unroll}_{sums}"
        name += f"_{self.left_k}_{self.right_k}_{self.out_row}"
        parameters = [("left", PTR), ("row", I64), ("right", PTR), ("out", PTR), ("depth", I64)]
        parameters += [("offsets", PTR)] * self.corrects
        return module.function(name, parameters, self._body, inline=False)

    def _body(
        self, code: Code, left: Reg, row: Reg, right: Reg, out: Reg, depth: Reg, offsets: Reg | None = None
    ) -> None:
        vector = _sum_type(self.dtype, code.module.machine)
        count = cdiv(self.columns, vector.lanes)
        tail = self.columns % vector.lanes
        last = vector_constant([n < tail for n in range(vector.lanes)], vector.of("i1")) if tail else None
        bytes_of_vector = vector.lanes * vector.bits // 8
        rows = [code.gep(left, code.binary("mul", row, r)) if r else left for r in range(self.rows)]
        places = [code.gep(out, r * self.out_row + v * bytes_of_vector) for r in range(self.rows) for v in range(count)]
        masks = [last if v == count - 1 else None for v in range(count)] * self.rows
        zero = constant(0, vector)
        sums = [zero] * len(places)
        if self.adds:
            sums = [_masked_load(code, vector, p, m) for p, m in zip(places, masks, strict=True)]
        if offsets is not None:
            at = [code.gep(offsets, v * bytes_of_vector) for v in range(count)]
            row_of_offsets = [_masked_load(code, vector, p, m) for p, m in zip(at, masks, strict=False)]
            sums = [code.binary("sub", x, y) for x, y in zip(sums, row_of_offsets * self.rows, strict=True)]

        def steps(k: Reg, *now: Reg) -> list[Reg]:
            totals = list(now)
            for n in range(self.unroll):
                totals = step(code.binary("add nsw", k, n) if n else k, *totals)
            return totals

        def step(k: Reg, *now: Reg) -> list[Reg]:
            at = code.gep(right, code.binary("mul nsw", k, self.right_k))
            panel = [_masked_load(code, vector, code.gep(at, v * bytes_of_vector), masks[v]) for v in range(count)]
            offset = code.binary("mul nsw", k, self.left_k)
            totals: list[Reg] = []
            for r in range(self.rows):
                word = code.load(vector.element, code.gep(rows[r], offset), align=self.dtype.itemsize)
                x = code.splat(left_word(code, self.dtype, word), vector.lanes)
                totals += [accumulate(code, self.dtype, s, x, p) for s, p in zip(now[r * count :], panel, strict=False)]
            return totals

        totals = code.loop(constant(0, I64), depth, self.unroll, steps, *sums)
        for x, place, mask in zip(totals, places, masks, strict=True):
            code.store(x, place) if mask is None else code.masked_store(x, place, mask)
        code.ret()


def _sum_type(dtype: DType, machine: Machine) -> Type:
    """The type of a register of sums."""
    scalar = {F64: "double", F32: "float", BF16: "float"}.get(dtype, "i32")
    return Type(scalar, machine.vector_bytes // (8 if dtype == F64 else 4))


def _masked_load(code: Code, type: Type, address: Reg, mask: Reg | None) -> Reg:
    return code.load(type, address) if mask is None else code.masked_load(type, address, mask, constant(0, type))


def accumulate(code: Code, dtype: DType, total: Reg, x: Reg, y: Reg) -> Reg:
    """Register like `total`: total + x * y for each word.

    A word of bfloat16 or int16 is a pair of elements: total + x[0] * y[0] + x[1] * y[1], in float32 or int32.
    """
    if dtype in (F32, F64):
        return code.fma(x, y, total)
    if dtype == BF16:
        return code.dot_words("llvm.x86.avx512bf16.dpbf16ps.512", "bfloat", total, x, y)
    if dtype in BYTES:
        return accumulate_fours(code, dtype, total, x, y)
    if dtype == I32:
        return code.binary("add", total, code.binary("mul", x, y))
    name = "llvm.x86.avx512.pmaddw.d.512" if total.type.lanes == 16 else "llvm.x86.avx2.pmadd.wd"
    return code.binary("add", total, code.products_of_pairs(name, x, y))
