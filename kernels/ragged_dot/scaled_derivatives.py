"""Derivatives of grouped products with scales: a form that is linear in each of four operands.

    out[m, n] = Σ_k lhs[m, k] lhs_scale[m, b(k)] rhs[g, k, n] rhs_scale[g, b(k), c(n)]    for row m of group g,

with blocks b(k) of the inner dim and c(n) of the columns. The tangent along an operand is the same form with the
tangent in the operand's place. Let w = rhs · rhs_scale, and D[m, k] = Σ_n cotangent[m, n] w[g, k, n], a grouped
product with w transposed. Then the cotangents are

    of lhs:        lhs_scale[m, b(k)] D[m, k]
    of lhs_scale:  Σ_{k in block} lhs[m, k] D[m, k]
    of rhs:        rhs_scale[g, b(k), c(n)] C[g, k, n]      with C[g] = Σ_{m in g} (lhs · lhs_scale)[m]ᵀ cotangent[m],
    of rhs_scale:  Σ_{k, n in block} rhs[g, k, n] C[g, k, n].

Numbers of 8 and 4 bits have no tangents.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.errors import NotDifferentiableError
from tilekern.kernels.quantization import dequantize, is_quantized
from tilekern.kernels.ragged_dot.contracting import ragged_contracting_forward
from tilekern.kernels.ragged_dot.derivatives import ragged_dot_by_rhs, spread
from tilekern.kernels.ragged_dot.kernel import out_type, ragged_dot_forward
from tilekern.kernels.ragged_dot.scaled import scaled_ragged_dot_forward

LEAST = 16
"""The shortest block with a scale: products of fewer numbers are slow, so shorter blocks are scaled in memory."""


_OPERANDS = ("lhs", "rhs", "ends", "lhs_scale", "rhs_scale")


def _linear_in(operand: str) -> Any:
    """The product of `scaled_ragged_dot_forward` as an op linear in `operand`; its rule has all other tangents."""

    def product(
        lhs: Any, rhs: Any, ends: Any, lhs_scale: Any, rhs_scale: Any, *, transpose_rhs: bool, out_dtype: Any
    ) -> jax.Array:
        static: Any = {"transpose_rhs": transpose_rhs, "out_dtype": out_dtype}
        return scaled_ragged_dot_forward(lhs, rhs, ends, lhs_scale, rhs_scale, **static)

    def jvp(primals: Any, tangents: Any, **static: Any) -> Any:
        return op(*primals, **static), _tangent_but(primals, tangents, operand, static)

    product.__name__ = product.__qualname__ = f"scaled_ragged_dot_by_{operand}"
    op: Any = tk.op(out_type=out_type, linear=(operand,))(product)
    op.defjvp(jvp)
    return op


BY: dict[str, Any] = {
    "lhs": scaled_ragged_dot_forward,
    **{name: _linear_in(name) for name in ("rhs", "lhs_scale", "rhs_scale")},
}
"""For each operand the op of the product that is linear in the operand."""


def tangent_of(primals: Any, tangents: Any, **static: Any) -> jax.Array | None:
    """The tangent of the product along tangents of its operands; None if all tangents are None.

    Raises:
      tilekern.errors.NotDifferentiableError: an operand of 8 or 4 bits has a tangent.
    """
    total: jax.Array | None = None
    for n, name in enumerate(_OPERANDS):
        if name == "ends" or tangents[n] is None:
            continue
        if is_quantized(primals[n]):
            raise _not_differentiable(name, primals[n])
        part = BY[name](*primals[:n], tangents[n], *primals[n + 1 :], **static)
        total = part if total is None else total + part
    return total


def product_tangent(primals: Any, tangents: Any, **static: Any) -> jax.Array | None:
    """`tangent_of`, by the kernels without scales if no operand has a scale."""
    (lhs, rhs, ends, *scales), (dlhs, drhs, *_) = primals, tangents
    if any(scale is not None for scale in scales) or lhs.dtype != rhs.dtype or is_quantized(lhs):
        return tangent_of(primals, tangents, **static)
    parts = [] if dlhs is None else [ragged_dot_forward(dlhs, rhs, ends, **static)]
    if drhs is not None:
        parts.append(ragged_dot_by_rhs(lhs, drhs, ends, **static))
    return functools.reduce(jnp.add, parts) if parts else None


def _not_differentiable(name: str, x: Any) -> NotDifferentiableError:
    return NotDifferentiableError(
        f"{name} of {x.dtype} has no derivative",
        expected="derivatives by scales, and by operands of float32, bfloat16, float16 or float64",
        got=f"a derivative by {name} = {x.dtype}{list(x.shape)}",
        fix=f"give jax.lax.stop_gradient({name}), or leave it out of the arguments that jax.grad differentiates",
    )


# --- forward ----------------------------------------------------------------------------------------------------------
# Each op is linear in one operand; its rule gives the tangents along all other operands.


def _tangent_but(primals: Any, tangents: Any, linear: str, static: Any) -> jax.Array | None:
    moved = [None if name == linear else tangent for name, tangent in zip(_OPERANDS, tangents, strict=True)]
    return tangent_of(primals, moved, **static)


@scaled_ragged_dot_forward.defjvp
def _jvp(primals: Any, tangents: Any, *, transpose_rhs: bool, out_dtype: Any, **blocks: int) -> Any:
    static = {"transpose_rhs": transpose_rhs, "out_dtype": out_dtype}
    return scaled_ragged_dot_forward(*primals, **static, **blocks), _tangent_but(primals, tangents, "lhs", static)


# --- backward ---------------------------------------------------------------------------------------------------------


@scaled_ragged_dot_forward.deftranspose
def _transpose(
    cotangent: jax.Array,
    lhs: Any,
    rhs: Any,
    ends: Any,
    lhs_scale: Any,
    rhs_scale: Any,
    *,
    transpose_rhs: bool,
    **_: Any,
) -> dict[str, jax.Array]:
    by_matrices = _by_matrices(cotangent.astype(lhs.dtype), rhs, ends, rhs_scale, transpose_rhs)
    return {"lhs": by_matrices if lhs_scale is None else dequantize(by_matrices, lhs_scale, lhs.dtype)}


@BY["lhs_scale"].deftranspose
def _by_lhs_scale_transpose(
    cotangent: jax.Array,
    lhs: Any,
    rhs: Any,
    ends: Any,
    lhs_scale: Any,
    rhs_scale: Any,
    *,
    transpose_rhs: bool,
    **_: Any,
) -> dict[str, jax.Array]:
    by_matrices = _by_matrices(cotangent, rhs, ends, rhs_scale, transpose_rhs)
    return {"lhs_scale": _summed(lhs, by_matrices, lhs_scale)}


@BY["rhs"].deftranspose
def _by_rhs_transpose(
    cotangent: jax.Array,
    lhs: Any,
    rhs: Any,
    ends: Any,
    lhs_scale: Any,
    rhs_scale: Any,
    *,
    transpose_rhs: bool,
    **_: Any,
) -> dict[str, jax.Array]:
    by_rows = _by_rows(cotangent.astype(rhs.dtype), lhs, ends, lhs_scale, transpose_rhs)
    return {"rhs": by_rows if rhs_scale is None else dequantize(by_rows, _turned(rhs_scale, transpose_rhs), rhs.dtype)}


@BY["rhs_scale"].deftranspose
def _by_rhs_scale_transpose(
    cotangent: jax.Array,
    lhs: Any,
    rhs: Any,
    ends: Any,
    lhs_scale: Any,
    rhs_scale: Any,
    *,
    transpose_rhs: bool,
    **_: Any,
) -> dict[str, jax.Array]:
    groups, *blocks = rhs_scale.shape
    like = jax.ShapeDtypeStruct((groups, *(reversed(blocks) if transpose_rhs else blocks)), rhs_scale.dtype)
    by_rows = _by_rows(cotangent, lhs, ends, lhs_scale, transpose_rhs)
    return {"rhs_scale": _turned(_summed(rhs, by_rows, like), transpose_rhs)}


def _by_matrices(cotangent: jax.Array, rhs: Any, ends: Any, rhs_scale: Any, transpose_rhs: bool) -> jax.Array:
    """D[M, K] of the module's docstring, in the dtype of the cotangent."""
    turned = not transpose_rhs
    if rhs_scale is not None and rhs_scale.shape[2] > 1 and cotangent.shape[1] // rhs_scale.shape[2] < LEAST:
        if rhs_scale.shape[1] > 1:
            matrices = dequantize(rhs, _turned(rhs_scale, transpose_rhs), cotangent.dtype)
            return ragged_dot_forward(cotangent, matrices, ends, transpose_rhs=turned)
        of_rows = spread(rhs_scale, ends, rows=cotangent.shape[0])
        cotangent, rhs_scale = dequantize(cotangent, of_rows, cotangent.dtype), None
    of_rhs = None if rhs_scale is None else rhs_scale.swapaxes(1, 2)
    static: Any = {"transpose_rhs": turned, "out_dtype": cotangent.dtype.name}
    return scaled_ragged_dot_forward(cotangent, rhs, ends, None, of_rhs, **static)


def _by_rows(cotangent: jax.Array, lhs: Any, ends: Any, lhs_scale: Any, transpose_rhs: bool) -> jax.Array:
    """C[G, K, N] of the module's docstring ([G, N, K] with `transpose_rhs`), in the dtype of the cotangent."""
    rows = lhs.astype(cotangent.dtype) if lhs_scale is None else dequantize(lhs, lhs_scale, cotangent.dtype)
    return ragged_contracting_forward(*((cotangent, rows) if transpose_rhs else (rows, cotangent)), ends)


def _turned(rhs_scale: jax.Array, transpose_rhs: bool) -> jax.Array:
    """Scales [G, B, C] as [G, C, B] with `transpose_rhs`: in the order of dims of rhs."""
    return rhs_scale.swapaxes(1, 2) if transpose_rhs else rhs_scale


def _summed(values: jax.Array, gradient: jax.Array, scale: Any) -> jax.Array:
    """Σ values · gradient over each block of a scale, of the scale's shape and dtype."""
    wide = jnp.promote_types(scale.dtype, jnp.float32)
    parts = [n for count, dim in zip(scale.shape, values.shape, strict=True) for n in (count, dim // count)]
    terms = (values.astype(wide) * gradient.astype(wide)).reshape(parts)
    return terms.sum(tuple(range(1, len(parts), 2))).astype(scale.dtype)
