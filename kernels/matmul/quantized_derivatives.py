"""Derivatives of products of numbers with scales.

With blocks b(k) of the inner dim and c(n) of the columns, the product

    out[m, n] = Σ_k lhs[m, k] lhs_scale[m, b(k)] rhs[k, n] rhs_scale[b(k), c(n)]

is linear in each of four operands. The tangent along lhs is the same product. Its transpose is

    lhs_scale[m, b(k)] Σ_n cotangent[m, n] rhs[k, n] rhs_scale[b(k), c(n)],

a product with rhs and rhs_scale transposed. Tangents along the other operands are products of floats, whose operands
are dequantised in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tilekern.errors import NotDifferentiableError
from tilekern.kernels.derivatives import along
from tilekern.kernels.epilogues import applied
from tilekern.kernels.matmul.products import product
from tilekern.kernels.matmul.quantized_kernel import fused_quantized_matmul_forward, quantized_matmul_forward
from tilekern.kernels.quantization import dequantize, is_quantized
from tilekern.kernels.ragged_dot.scaled_derivatives import LEAST


def _tangent(primals: Any, tangents: Any, transpose_rhs: bool, out_dtype: Any) -> jax.Array | None:
    """The tangent of the product along all operands but lhs of 8 and 4 bits; None if no operand moves.

    Raises:
      tilekern.errors.NotDifferentiableError: an operand of 8 or 4 bits has a tangent.
    """
    (lhs, rhs, lhs_scale, rhs_scale), (dlhs, drhs, dlhs_scale, drhs_scale) = primals, tangents
    for name, x, tangent in (("lhs", lhs, dlhs), ("rhs", rhs, drhs)):
        if tangent is not None and is_quantized(x):
            raise NotDifferentiableError(
                f"{name} of {x.dtype} has no derivative",
                expected="derivatives by scales, and by operands of float32, bfloat16, float16 or float64",
                got=f"a derivative by {name} = {x.dtype}{list(x.shape)}",
                fix=f"give {name} in floats with {name}_dtype, for gradients straight through its rounding",
            )
    parts: list[jax.Array] = []
    if dlhs is not None:
        static: Any = {"transpose_rhs": transpose_rhs, "out_dtype": out_dtype}
        parts.append(quantized_matmul_forward(dlhs, rhs, lhs_scale, rhs_scale, **static))

    def add(lhs_scale: Any, rhs: Any, rhs_scale: Any, dtype: Any) -> None:
        left = lhs if lhs_scale is None else dequantize(lhs, lhs_scale, dtype)
        right = _dequantized(rhs, rhs_scale, transpose_rhs)
        moved = product(left.astype(dtype), right.astype(dtype), transpose_rhs=transpose_rhs)
        parts.append(moved.astype(out_dtype))

    wide = jnp.dtype(jnp.float64 if out_dtype == "float64" else jnp.float32)
    if drhs is not None:
        add(lhs_scale, drhs, rhs_scale, rhs.dtype)
    if dlhs_scale is not None:
        add(dlhs_scale, rhs, rhs_scale, wide)
    if drhs_scale is not None:
        add(lhs_scale, rhs, drhs_scale, wide)
    return functools.reduce(jnp.add, parts) if parts else None


def _dequantized(rhs: Any, rhs_scale: Any, transpose_rhs: bool) -> jax.Array:
    """The matrix rhs[0] times its scales, [K, N], or [N, K] with `transpose_rhs`, in float32; rhs[0] without scales."""
    if rhs_scale is None:
        return rhs[0]
    return dequantize(rhs, rhs_scale.mT if transpose_rhs else rhs_scale)[0]


@quantized_matmul_forward.defjvp
def _jvp(primals: Any, tangents: Any, *, transpose_rhs: bool, out_dtype: Any, **blocks: int) -> Any:
    static = {"transpose_rhs": transpose_rhs, "out_dtype": out_dtype}
    # The product is linear in lhs: its tangent is the op itself.
    without_lhs = (None, *tangents[1:])
    return quantized_matmul_forward(*primals, **static, **blocks), _tangent(primals, without_lhs, **static)


@quantized_matmul_forward.deftranspose
def _transpose(
    cotangent: jax.Array, lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any, *, transpose_rhs: bool, **_: Any
) -> dict[str, jax.Array]:
    by_out = cotangent.astype(lhs.dtype)
    if rhs_scale is not None and rhs_scale.shape[2] > 1 and by_out.shape[1] // rhs_scale.shape[2] < LEAST:
        if rhs_scale.shape[1] > 1:
            # Blocks of few columns would make products of as few terms.
            matrix = _dequantized(rhs, rhs_scale, transpose_rhs).astype(by_out.dtype)
            by_lhs = product(by_out, matrix, transpose_rhs=not transpose_rhs)
            return {"lhs": by_lhs if lhs_scale is None else dequantize(by_lhs, lhs_scale, lhs.dtype)}
        by_out, rhs_scale = dequantize(by_out, rhs_scale[0], by_out.dtype), None
    turned = None if rhs_scale is None else rhs_scale.mT
    static: Any = {"transpose_rhs": not transpose_rhs, "out_dtype": lhs.dtype.name}
    by_lhs = quantized_matmul_forward(by_out, rhs, None, turned, **static)
    return {"lhs": by_lhs if lhs_scale is None else dequantize(by_lhs, lhs_scale, lhs.dtype)}


@fused_quantized_matmul_forward.defjvp
def _fused_jvp(
    primals: Any, tangents: Any, *, epilogue: Any, transpose_rhs: bool, out_dtype: Any, **blocks: int
) -> Any:
    """The epilogue's tangent at the product in float32, which XLA fuses."""
    (*factors, operands), (*moved, doperands) = primals, tangents
    wide = str(jnp.promote_types(out_dtype, jnp.float32))
    static: Any = {"transpose_rhs": transpose_rhs, "out_dtype": wide}
    at = quantized_matmul_forward(*factors, **static, **blocks)
    like = jax.ShapeDtypeStruct(at.shape, out_dtype)

    def whole(*arrays: Any) -> jax.Array:
        return applied(epilogue, like, *arrays)

    directions: Sequence[Any] = [_tangent(factors, moved, **static), *doperands]
    return whole(at, *operands), along(whole, [at, *operands], directions)
