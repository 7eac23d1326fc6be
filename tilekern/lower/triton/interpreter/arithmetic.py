"""Corrections of maxima, matrix products, gathers and constants, which Triton's interpreter computes unlike a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilekern.errors import DeviceAssertionError, OutOfBoundsError
from tilekern.ir.core import Array
from tilekern.ir.types import F32, F64, kind_of
from tilekern.lower.triton.interpreter.triton_interpreter import Correction, TritonInterpreter


def _drop_nan(triton: TritonInterpreter) -> None:
    """`tl.maximum`, `minimum` and `clamp` drop NaN unless they are told to propagate it.

    3.6.0 always propagates NaN, which hides that a kernel forgot to ask for it.
    """

    def maximum(self: Any, x: Any, y: Any) -> Any:
        return self.binary_op(x, y, np.fmax)

    def minimum(self: Any, x: Any, y: Any) -> Any:
        return self.binary_op(x, y, np.fmin)

    def clamp(self: Any, x: Any, low: Any, high: Any, propagate: Any) -> Any:
        drop = propagate == triton.ir.PROPAGATE_NAN.NONE
        above, below = (np.fmax, np.fmin) if drop else (np.maximum, np.minimum)
        return self.binary_op(self.binary_op(x, low, above), high, below)

    builder = triton.builder
    builder.create_maxnumf, builder.create_minnumf, builder.create_clampf = maximum, minimum, clamp


def _multiply_matrices(triton: TritonInterpreter) -> None:
    """Dots multiply exactly and accumulate in float32, float64 or int32; "tf32" rounds the operands first.

    Triton's interpreter (3.6.0, 3.9.0) multiplies the bits of bfloat16 as integers. It multiplies float32 exactly,
    where the GPU's default is "tf32". It multiplies int8 by loops over int32, a hundred times slower than in float64.
    """

    def dot(self: Any, a: Any, b: Any, acc: Any, precision: Any, imprecise: int) -> Any:
        rounded = precision == triton.ir.INPUT_PRECISION.TF32 and a.data.dtype == F32
        x, y = (_tf32(v.data) if rounded else v.data for v in (a, b))
        return triton.handle(_dot(x, y, acc.data), acc.dtype)

    triton.builder.create_dot = dot


def _dot(x: Array, y: Array, acc: Array) -> Array:
    if kind_of(x.dtype) != "float":
        # Float64 holds products of bytes, and sums of 2³⁷ products, exactly.
        return acc + np.matmul(x.astype(F64), y.astype(F64)).astype(np.int64).astype(acc.dtype)
    wide = F64 if x.dtype == F64 else F32
    return (np.matmul(x.astype(wide), y.astype(wide)) + acc.astype(wide)).astype(acc.dtype)


def _tf32(x: Array) -> Array:
    """float32 rounded to TF32, which has 10 bits of mantissa."""
    bits = x.view(np.uint32)
    bits = bits + 0xFFF + (bits >> 13 & 1) & 0xFFFFE000
    return np.where(np.isfinite(x), bits.view(F32), x)


def _gather_inside(triton: TritonInterpreter) -> None:
    """`tl.gather` raises an error for indices outside the tile; NumPy would count negative indices from the end."""

    def gather(self: Any, source: Any, indices: Any, axis: int) -> Any:
        index, size = indices.data, source.data.shape[axis]
        if ((index < 0) | (index >= size)).any():
            wrong = index[(index < 0) | (index >= size)][0]
            raise OutOfBoundsError("tl.gather leaves the tile", expected=f"0 <= index < {size}", got=f"index={wrong}")
        return triton.handle(np.take_along_axis(source.data, index, axis), source.dtype)

    triton.builder.create_gather = gather


def _invert_unsigned(triton: TritonInterpreter) -> None:
    """`~x` works for unsigned integers. It fails in 3.6.0, because NumPy ≥ 2 does not convert -1 to them."""

    def all_ones(self: Any, dtype: Any) -> Any:
        zero = np.zeros(1, triton.module._get_np_dtype(dtype))
        return triton.handle(np.invert(zero), dtype)

    triton.builder.get_all_ones_value = all_ones


def _assert(triton: TritonInterpreter) -> None:
    """`tl.device_assert` raises a `DeviceAssertionError` with its message, like the interpreter of the block IR."""

    def check(self: Any, condition: Any, message: str) -> None:
        if not condition.data.all():
            raise DeviceAssertionError(message)

    triton.builder.create_assert = check


def _splat(triton: TritonInterpreter) -> None:
    """A splat keeps the dtype of its scalar; 3.6.0 and 3.9.0 give a comparison the dtype of its operands."""

    def splat(self: Any, result: Any, x: Any) -> Any:
        return triton.handle(np.full(result.shape, x.data.reshape(-1)[0], x.data.dtype), x.dtype.scalar)

    triton.builder.create_splat = splat


CORRECTIONS: tuple[Correction, ...] = (
    _drop_nan,
    _multiply_matrices,
    _gather_inside,
    _invert_unsigned,
    _assert,
    _splat,
)
