"""Checks of the arguments of `quantized_matmul`, and operands as matrices for its kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax.numpy as jnp

from tilekern.authoring import describe, hide_frames
from tilekern.errors import ArgumentError
from tilekern.kernels.checks import is_float
from tilekern.kernels.matmul.batches import broadcast
from tilekern.kernels.quantization import expanded
from tilekern.kernels.quantized_array import QuantizedArray, check_quantized, is_quantized_array

hide_frames(__file__)

Operand = Any
"""An array of floats, or a QuantizedArray."""


@dataclass(frozen=True)
class Rounding:
    """How an operand of floats is quantised: the arguments of `QuantizedArray.quantize`, for a matrix."""

    dtype: str
    block: tuple[int | None, ...]

    def __call__(self, x: Any) -> QuantizedArray:
        return QuantizedArray.quantize(x, self.dtype, block=self.block)


def operand_of(name: str, x: Any, dtype: Any, block: Any, default: tuple[int | None, int | None]) -> Any:
    """(operand, its rounding): an array of floats or a QuantizedArray, and a `Rounding` for floats that are quantised.

    Raises:
      ArgumentError: x is neither, or its scales do not fit, or a QuantizedArray is to be quantised.
    """
    if is_quantized_array(x):
        array = QuantizedArray.of(x)
        check_quantized("quantized_matmul", name, array)
        if dtype is None and block is None:
            return array, None
        raise ArgumentError(
            f"{name} of quantized_matmul is quantised already",
            expected=f"{name}_dtype = {name}_block = None for a QuantizedArray",
            got=f"{name}_dtype = {describe(dtype)}, {name}_block = {block!r}",
            fix=f"leave {name}_dtype out, or give {name} in floats",
        )
    if not is_float(x):
        raise ArgumentError(
            f"quantized_matmul cannot take this {name}",
            expected="a QuantizedArray, or an array of float32, bfloat16, float16 or float64",
            got=f"{name} = {describe(x)}",
            fix="QuantizedArray(values, scales) has values of 8 or 4 bits; cast other numbers with .astype",
        )
    if dtype is None and block is None:
        return x, None
    sizes: Any = default if block is None else block
    sizes = tuple(cast(Sequence[Any], sizes)) if isinstance(sizes, tuple | list) else (sizes,)
    return x, Rounding(jnp.dtype("int8" if dtype is None else dtype).name, sizes)


def check_product(lhs: Operand, rhs: Operand, operands: Sequence[Any], transpose_rhs: bool) -> tuple[int, ...]:
    """The shape [*B, M, N] of the product.

    Raises:
      ArgumentError: shapes or dtypes do not fit.
    """
    fits = min(lhs.ndim, rhs.ndim) >= 2 and lhs.shape[-1] == rhs.shape[-1 if transpose_rhs else -2]
    fits = fits and (not (is_float(lhs) and is_float(rhs)) or lhs.dtype == rhs.dtype)
    batch = broadcast(lhs.shape[:-2], rhs.shape[:-2]) if fits else None
    if batch is None:
        raise ArgumentError(
            "the matrices of quantized_matmul do not fit",
            expected=f"lhs[*B, M, K] and rhs[*B, {'N, K' if transpose_rhs else 'K, N'}], with leading dims that "
            "broadcast, of one dtype if both are floats",
            got=f"lhs = {_shown(lhs)}, rhs = {_shown(rhs)}",
            fix="both have the same K; leading dims must be equal or 1; cast with .astype",
        )
    shape = *batch, lhs.shape[-2], rhs.shape[-2 if transpose_rhs else -1]
    for number, operand in enumerate(operands):
        if not is_float(operand) or broadcast(operand.shape, shape) != shape or operand.ndim > len(shape):
            raise ArgumentError(
                f"operand {number} of quantized_matmul does not broadcast to the product",
                expected=f"floats of at least 16 bits whose shape broadcasts to {list(shape)}",
                got=describe(operand),
                fix="a bias of columns has the shape [N], a scale of rows [M, 1]",
            )
    return shape


def check_blocks(lhs: Operand, rhs: Operand, transpose_rhs: bool) -> None:
    """Raise an `ArgumentError` unless the blocks of both scales nest along the inner dim."""
    counts = [x.scales.shape[d] for x, d in ((lhs, -1), (rhs, -1 if transpose_rhs else -2)) if _has_scales(x)]
    if len(counts) == 2 and min(counts) and max(counts) % min(counts):
        raise ArgumentError(
            "the blocks of the scales of quantized_matmul do not nest along the inner dim",
            expected="blocks of one scale that the blocks of the other divide",
            got=f"blocks of {lhs.shape[-1] // counts[0]} and of {lhs.shape[-1] // counts[1]} numbers",
            fix="quantise both operands in blocks of one size",
        )


def _has_scales(x: Any) -> bool:
    return isinstance(x, QuantizedArray)


def _shown(x: Any) -> str:
    return f"quantised {describe(x.values)}" if isinstance(x, QuantizedArray) else describe(x)


def with_whole_batch(x: Operand) -> Operand:
    """The operand with scales whose leading dims are 1 or as long as those of the values: scales are repeated."""
    if not isinstance(x, QuantizedArray):
        return x

    def of(scale: Any) -> Any:
        return scale if scale is None else expanded(scale, (*x.shape[:-2], *scale.shape[-2:]))

    return QuantizedArray(x.values, of(x.scales), of(x.zero_points))


def with_rows(x: Operand) -> Operand:
    """An operand [*B, M, K] as [R, K], scales of all rows as [1, K / block], others as [R, K / block]."""
    rows = math.prod(x.shape[:-1])
    if not isinstance(x, QuantizedArray):
        return x.reshape(rows, x.shape[-1])

    def of(scale: Any) -> Any:
        if scale is None or math.prod(scale.shape[:-1]) == 1:
            return scale if scale is None else scale.reshape(1, scale.shape[-1])
        dims = (*x.shape[:-1], scale.shape[-1])
        return jnp.broadcast_to(expanded(scale, dims), dims).reshape(rows, scale.shape[-1])

    return QuantizedArray(x.values.reshape(rows, x.shape[-1]), of(x.scales), of(x.zero_points))
