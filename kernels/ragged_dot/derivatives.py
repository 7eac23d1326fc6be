"""Derivatives of grouped products: three products, whose derivatives are the other two.

The number Σ_g Σ_r lhs[r]ᵀ rhs[g] out[r], over the groups g and their rows r, is linear in each of lhs[M, K],
rhs[G, K, N] and out[M, N]. Its derivative by `out` is ragged_dot(lhs, rhs); by `lhs`, ragged_dot(out, rhs) with rhs
transposed; by `rhs`, ragged_contracting_dot(lhs, out). So the derivatives of each product are the other two, and
derivatives of any order run only these kernels.

A kernel is declared linear in `lhs`. For each kernel an op computes the same product, declared linear in `rhs`. The op
is the derivative of the kernel along `rhs`, and the kernel is the derivative of the op along `lhs`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.ragged_dot import contracting, kernel
from tilekern.kernels.ragged_dot.contracting import ragged_contracting_forward
from tilekern.kernels.ragged_dot.kernel import ragged_dot_forward


@tk.op(out_type=kernel.out_type, linear=("rhs",))
def ragged_dot_by_rhs(
    lhs: jax.Array, rhs: jax.Array, ends: jax.Array, *, transpose_rhs: bool, out_dtype: Any = None
) -> jax.Array:
    """The product of `ragged_dot_forward`, linear in rhs."""
    return ragged_dot_forward(lhs, rhs, ends, transpose_rhs=transpose_rhs, out_dtype=out_dtype)


@tk.op(out_type=contracting.out_type, linear=("rhs",))
def ragged_contracting_by_rhs(lhs: jax.Array, rhs: jax.Array, ends: jax.Array, *, out_dtype: Any = None) -> jax.Array:
    """The product of `ragged_contracting_forward`, linear in rhs."""
    return ragged_contracting_forward(lhs, rhs, ends, out_dtype=out_dtype)


@ragged_dot_forward.defjvp
def _dot_jvp(primals: Any, tangents: Any, *, transpose_rhs: bool, out_dtype: Any, **blocks: int) -> Any:
    (lhs, _, ends), (_, rhs, _) = primals, tangents
    static: Any = {"transpose_rhs": transpose_rhs, "out_dtype": out_dtype}
    return ragged_dot_forward(*primals, **static, **blocks), ragged_dot_by_rhs(lhs, rhs, ends, **static)


@ragged_dot_by_rhs.defjvp
def _dot_by_rhs_jvp(primals: Any, tangents: Any, **static: Any) -> Any:
    (_, rhs, ends), (lhs, _, _) = primals, tangents
    return ragged_dot_by_rhs(*primals, **static), ragged_dot_forward(lhs, rhs, ends, **static)


@ragged_contracting_forward.defjvp
def _contracting_jvp(primals: Any, tangents: Any, *, out_dtype: Any, **blocks: int) -> Any:
    (lhs, _, ends), (_, rhs, _) = primals, tangents
    value = ragged_contracting_forward(*primals, out_dtype=out_dtype, **blocks)
    return value, ragged_contracting_by_rhs(lhs, rhs, ends, out_dtype=out_dtype)


@ragged_contracting_by_rhs.defjvp
def _contracting_by_rhs_jvp(primals: Any, tangents: Any, **static: Any) -> Any:
    (_, rhs, ends), (lhs, _, _) = primals, tangents
    return ragged_contracting_by_rhs(*primals, **static), ragged_contracting_forward(lhs, rhs, ends, **static)


@ragged_dot_forward.deftranspose
def _dot_transpose(
    cotangent: jax.Array, lhs: Any, rhs: jax.Array, ends: jax.Array, *, transpose_rhs: bool, **_: Any
) -> dict[str, jax.Array]:
    """The cotangent of lhs: each row of the cotangent times the transposed matrix of the row's group."""
    return {"lhs": ragged_dot_forward(cotangent.astype(rhs.dtype), rhs, ends, transpose_rhs=not transpose_rhs)}


@ragged_dot_by_rhs.deftranspose
def _dot_by_rhs_transpose(
    cotangent: jax.Array, lhs: jax.Array, rhs: Any, ends: jax.Array, *, transpose_rhs: bool, **_: Any
) -> dict[str, jax.Array]:
    """The cotangent of rhs: for each group Σ lhs[row]ᵀ cotangent[row] over the group's rows."""
    cotangent = cotangent.astype(lhs.dtype)
    pair = (cotangent, lhs) if transpose_rhs else (lhs, cotangent)
    return {"rhs": ragged_contracting_forward(*pair, ends)}


@ragged_contracting_forward.deftranspose
def _contracting_transpose(
    cotangent: jax.Array, lhs: Any, rhs: jax.Array, ends: jax.Array, **_: Any
) -> dict[str, jax.Array]:
    """The cotangent of lhs in out[g] = lhsᵀ rhs: a row of rhs times the transposed cotangent of the row's group."""
    return {"lhs": ragged_dot_forward(rhs, cotangent.astype(rhs.dtype), ends, transpose_rhs=True)}


@ragged_contracting_by_rhs.deftranspose
def _contracting_by_rhs_transpose(
    cotangent: jax.Array, lhs: jax.Array, rhs: Any, ends: jax.Array, **_: Any
) -> dict[str, jax.Array]:
    """The cotangent of rhs: a row of lhs times the cotangent of the row's group."""
    return {"rhs": ragged_dot_forward(lhs, cotangent.astype(lhs.dtype), ends)}


def _spread_type(operand: Any, ends: Any, *, rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, operand.shape[2]), operand.dtype)


@tk.op(out_type=_spread_type, linear=("operand",))
def spread(operand: jax.Array, ends: jax.Array, *, rows: int) -> jax.Array:
    """operand[G, 1, N] -> [rows, N]: for each row the operand of the row's group; 0 for rows after the last group."""
    group = jnp.searchsorted(ends, jnp.arange(rows, dtype=ends.dtype), side="right")
    return jnp.take(operand[:, 0], group, axis=0, mode="fill", fill_value=0)


@spread.deftranspose
def _spread_transpose(cotangent: jax.Array, operand: Any, ends: jax.Array, *, rows: int) -> dict[str, jax.Array]:
    """The cotangent of the operand: the sum of each group's rows."""
    return {"operand": ragged_contracting_forward(jnp.ones((rows, 1), cotangent.dtype), cotangent, ends)}
