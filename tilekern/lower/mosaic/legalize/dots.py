"""Bring dots to dots of the matrix unit: of matrices or stacks of them, of bfloat16, float32, int8 and 8-bit floats.

Needs: a Func after `legalize_dtypes`. Gives: a Func whose dots contract one dim of tiles of rank 2, or of rank 3 with
the first dim as batch, of these four kinds; float32 with precision "ieee", "bf16x3", "tf32" or, where the matrix unit
rounds it, "bf16".

Other integers are split into digits of 8 bits. A product of two digits is exact in float32, and so is a sum of 256
products. These sums are added up as int32, which wraps around as the language wants it:

    dot(x, y) = Σ 2^(8 (i + j)) dot(digit i of x, digit j of y)      where i + j < 4
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from tilekern.ir.compute import Dot
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.make import Make
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.types import BF16, BOOL, F32, I32, DType, is_float8, kind_of
from tilekern.lower.mosaic.legalize.casts import wide
from tilekern.lower.rewrite.matrices import as_matrix, dims_of, is_of_matrices, product

_ROUNDING = ("v5e", "v5p")
"""Chips whose matrix unit rounds float32 to bfloat16 at no cost; a cast takes five operations for two registers there.

By the static estimate of the gated delta rule its operands take 5 % less time without casts on v5e, 10 % more on v6e.
"""

_EXACT = 1 << 24
"""Integers up to this one are exact in float32."""


def expand_dots(func: Func, chip_name: str) -> Func:
    """Apply the rewrites above."""

    def rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
        return [_dot(Make(rewriter, op), op, chip_name)] if isinstance(op, Dot) else None

    return Rewriter(rule).run(func)


def _dot(make: Make, op: Dot, chip_name: str) -> Value:
    dtype = op.operands[0].tile.dtype
    if dtype == F32 and op.precision == "bf16" and chip_name not in _ROUNDING:
        return _standard(make, _on_cast_operands(make, op, BF16))
    if is_float8(dtype) and chip_name != "7x":
        return _standard(make, _on_cast_operands(make, op, BF16, F32))
    if kind_of(dtype) == "float" or dtype.name == "int8":
        return _standard(make, op)
    return _digits(make, op)


def _on_cast_operands(make: Make, op: Dot, dtype: DType, by: DType | None = None) -> Dot:
    """The dot, of precision "ieee", of the operands cast to `dtype`, or to `by` first and then to `dtype`."""
    operands = (make.convert(make.convert(x, by) if by else x, dtype) for x in op.operands)
    return replace(op, operands=tuple(operands), precision="ieee")


def _standard(make: Make, op: Dot) -> Value:
    """The product of matrices; the right one is contracted last if it lies so, which needs no transposition."""
    if is_of_matrices(op):
        return _again(make, op)
    x, y = op.operands
    rank, contracted = len(y.tile.shape), op.contract[1]
    last = contracted == tuple(range(rank - len(contracted), rank))
    left = as_matrix(make, x, dims_of(op, 0), contracted_last=True)
    right = as_matrix(make, y, dims_of(op, 1), contracted_last=last)
    return make.reshape(_again(make, product(op, left, right, (True, last))), op.result.tile.shape)


def _again(make: Make, op: Dot) -> Value:
    """The result of the dot, which is added.

    Pallas multiplies rows by one row elementwise, but only in float32: other dtypes get a column.
    """
    x, y = op.operands
    if op.contract == ((1,), (1,)) and not op.batch[0] and y.tile.shape[0] == 1 and y.tile.dtype != F32:
        y = make.transpose(y, (1, 0))
        op = replace(op, operands=(x, y), contract=((1,), (0,)))
    return make.again(op, *op.operands)


# --- integers -------------------------------------------------------------------------------------------------------


def _digits(make: Make, op: Dot) -> Value:
    """The sum over the pairs of digits below 2^32, of as many products at once as float32 adds up exactly."""
    dtype = op.operands[0].tile.dtype
    count = 1 if dtype == BOOL else dtype.itemsize
    largest = 1 if dtype == BOOL else 255
    depth = prod(op.operands[0].tile.shape[d] for d in op.contract[0])
    x, y = (as_matrix(make, wide(make, op.operands[n]), dims_of(op, n), contracted_last=n == 0) for n in (0, 1))
    at = len(x.tile.shape) - 1
    step = _EXACT // largest**2
    total: Value | None = None
    for start in range(0, depth, step):
        stop = min(depth, start + step)
        lefts = _all_digits(make, make.part(x, at, start, stop), count, dtype)
        rights = _all_digits(make, make.part(y, at - 1, start, stop), count, dtype)
        for i, left in enumerate(lefts):
            for j, right in enumerate(rights):
                if i + j < 4:
                    dot = product(replace(op, precision="ieee"), left, right)
                    part = make.convert(make.again(dot, *dot.operands), I32)
                    part = make.of("mul", part, _as_int32(1 << 8 * (i + j))) if i + j else part
                    total = part if total is None else make.of("add", total, part)
    assert total is not None
    return make.reshape(total, op.result.tile.shape)


def _as_int32(number: int) -> int:
    return number - (1 << 32) if number >= 1 << 31 else number


def _all_digits(make: Make, x: Value, count: int, dtype: DType) -> list[Value]:
    """The digits of 8 bits as bfloat16, lowest first; the highest digit of a narrow integer has its sign."""
    digits: list[Value] = []
    for n in range(count):
        above = x if n == 0 else make.of("shift_right_arithmetic", x, 8 * n)
        signed = kind_of(dtype) == "signed" and n == count - 1
        digit = above if (signed and count < 4) or dtype == BOOL else make.of("and", above, 0xFF)
        digits.append(make.convert(make.convert(make.bitcast(digit, I32), F32), BF16))
    return digits
