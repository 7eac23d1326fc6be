"""Dots that the matrix unit does: of bfloat16, float32, int8 and 8-bit floats, with at most one batch and free dims.

Needs: a widened Func. Gives: a Func whose dots contract one dim of tiles of rank 2, or of rank 3 with the first dim as
batch, of those dtypes; float32 with precision "ieee", "bf16x3" or "tf32".

Other integers are sums of digits of 8 bits. Products of digits are exact in float32, and so are sums of 256 of them;
these are added up as int32, which wraps around as it should:

    dot(x, y) = Σ 2^(8 (i + j)) dot(digit i of x, digit j of y)      where i + j < 4
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from tilekern.ir.compute import Dot
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.types import BF16, BOOL, F32, I32, DType, is_float8, kind_of
from tilekern.lower.mosaic.legalize.casts import wide
from tilekern.lower.rewrite.make import Make

_EXACT = 1 << 24
"""Whole numbers up to this one are exact in float32."""


def expand_dots(func: Func, chip_name: str) -> Func:
    """Apply the rewrites above."""

    def rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
        return [_dot(Make(rewriter, op), op, chip_name)] if isinstance(op, Dot) else None

    return Rewriter(rule).run(func)


def _dot(make: Make, op: Dot, chip_name: str) -> Value:
    dtype = op.operands[0].tile.dtype
    if dtype == F32 and op.precision == "bf16":
        return _standard(make, _on(make, op, BF16))
    if is_float8(dtype) and chip_name != "7x":
        return _standard(make, _on(make, op, BF16, F32))
    if kind_of(dtype) == "float" or dtype.name == "int8":
        return _standard(make, op)
    return _digits(make, op)


def _on(make: Make, op: Dot, dtype: DType, by: DType | None = None) -> Dot:
    """The same dot of other numbers, by way of a dtype between the two."""
    operands = (make.convert(make.convert(x, by) if by else x, dtype) for x in op.operands)
    return replace(op, operands=tuple(operands), precision="ieee")


def _is_standard(op: Dot) -> bool:
    ranks = [len(x.tile.shape) for x in op.operands]
    batch = len(op.batch[0])
    front = tuple(range(batch))
    one_dim = all(len(dims) == 1 for dims in op.contract)
    return one_dim and batch <= 1 and op.batch == (front, front) and ranks == [batch + 2] * 2


def _standard(make: Make, op: Dot) -> Value:
    if _is_standard(op):
        return _again(make, op)
    x, y = op.operands
    size = tuple(prod(x.tile.shape[d] for d in dims) for dims in (op.batch[0], op.free(0), op.contract[0]))
    columns = prod(y.tile.shape[d] for d in op.free(1))
    front = size[:1] if op.batch[0] else ()
    at = len(front)
    left = make.transpose(x, (*op.batch[0], *op.free(0), *op.contract[0]))
    left = make.reshape(left, (*front, *size[1:]))
    # The right operand keeps its contracted dims last, if that is where they are: nothing has to be transposed.
    last = op.contract[1] == tuple(range(len(y.tile.shape)))[len(y.tile.shape) - len(op.contract[1]) :]
    inner = (*op.free(1), *op.contract[1]) if last else (*op.contract[1], *op.free(1))
    right = make.transpose(y, (*op.batch[1], *inner))
    right = make.reshape(right, (*front, columns, size[2]) if last else (*front, size[2], columns))
    batch = tuple(range(at))
    contract = ((at + 1,), (at + 1 if last else at,))
    product = replace(op, operands=(left, right), contract=contract, batch=(batch, batch))
    return make.reshape(_again(make, product), op.result.tile.shape)


def _again(make: Make, op: Dot) -> Value:
    """The dot; Pallas multiplies rows by one row elementwise, of which it has float32 only: that becomes a column."""
    x, y = op.operands
    if op.contract == ((1,), (1,)) and not op.batch[0] and y.tile.shape[0] == 1 and y.tile.dtype != F32:
        y = make.transpose(y, (1, 0))
        op = replace(op, operands=(x, y), contract=((1,), (0,)))
    return make.again(op, *op.operands)


# --- integers -------------------------------------------------------------------------------------------------------


def _digits(make: Make, op: Dot) -> Value:
    """Every pair of digits that counts, of as many products at once as are exact."""
    dtype = op.operands[0].tile.dtype
    count = 1 if dtype == BOOL else dtype.itemsize
    largest = 1 if dtype == BOOL else 255
    depth = prod(op.operands[0].tile.shape[d] for d in op.contract[0])
    flat = [_flat(make, op, side) for side in (0, 1)]
    step = _EXACT // largest**2
    total: Value | None = None
    for start in range(0, depth, step):
        stop = min(depth, start + step)
        sides = [_all_digits(make, make.part(x, at, start, stop), count, dtype) for x, at in flat]
        for i, left in enumerate(sides[0]):
            for j, right in enumerate(sides[1]):
                if i + j < 4:
                    part = make.convert(_product(make, op, left, right), I32)
                    part = make.of("mul", part, _as_int32(1 << 8 * (i + j))) if i + j else part
                    total = part if total is None else make.of("add", total, part)
    assert total is not None
    return make.reshape(total, op.result.tile.shape)


def _as_int32(number: int) -> int:
    return number - (1 << 32) if number >= 1 << 31 else number


def _flat(make: Make, op: Dot, side: int) -> tuple[Value, int]:
    """An operand in 32 bits as [batch, rows, depth] or [batch, depth, columns], and where its depth is."""
    x = wide(make, op.operands[side])
    free = op.free(1 if side else 0)
    batch, rows, depth = (prod(x.tile.shape[d] for d in dims) for dims in (op.batch[side], free, op.contract[side]))
    inner = (*op.contract[side], *free) if side else (*free, *op.contract[side])
    moved = make.transpose(x, (*op.batch[side], *inner))
    front = (batch,) if op.batch[side] else ()
    shape = (*front, depth, rows) if side else (*front, rows, depth)
    return make.reshape(moved, shape), len(front) + (0 if side else 1)


def _all_digits(make: Make, x: Value, count: int, dtype: DType) -> list[Value]:
    """The digits of 8 bits, the lowest first, as bfloat16; the highest one of a narrow integer has its sign."""
    found: list[Value] = []
    for n in range(count):
        above = x if n == 0 else make.of("shift_right_arithmetic", x, 8 * n)
        signed = kind_of(dtype) == "signed" and n == count - 1
        digit = above if (signed and count < 4) or dtype == BOOL else make.of("and", above, 0xFF)
        found.append(make.convert(make.convert(make.bitcast(digit, I32), F32), BF16))
    return found


def _product(make: Make, op: Dot, left: Value, right: Value) -> Value:
    at = len(left.tile.shape) - 2
    batch = tuple(range(at))
    return make.add(Dot, left, right, contract=((at + 1,), (at,)), batch=(batch, batch))
