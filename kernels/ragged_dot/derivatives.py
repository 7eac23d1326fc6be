"""Derivatives of grouped products: three products that are each other's.

The number Σ_g Σ_r lhs[r]ᵀ rhs[g] out[r], over the groups g and their rows r, is linear in each of lhs[M, K],
rhs[G, K, N] and out[M, N]. Its derivative by `out` is ragged_dot(lhs, rhs); by `lhs`, ragged_dot(out, rhs) with rhs
transposed; by `rhs`, ragged_contracting_dot(lhs, out). So the derivatives of each of them are the other two, and
derivatives of any order run these kernels alone.

A kernel is declared linear in `lhs`. Beside it stands an op, the same product declared linear in `rhs`: the two are
each other's derivative, along the operand that the other is linear in.
"""

from __future__ import annotations

from typing import Any

import jax

import tilekern as tk
from tilekern.kernels.ragged_dot import contracting, kernel
from tilekern.kernels.ragged_dot.contracting import ragged_contracting_forward
from tilekern.kernels.ragged_dot.kernel import ragged_dot_forward


@tk.op(out_type=kernel.out_type, linear=("rhs",))
def ragged_dot_by_rhs(lhs: jax.Array, rhs: jax.Array, ends: jax.Array, *, transpose_rhs: bool) -> jax.Array:
    """The product of `ragged_dot_forward`, linear in rhs."""
    return ragged_dot_forward(lhs, rhs, ends, transpose_rhs=transpose_rhs)


@tk.op(out_type=contracting.out_type, linear=("rhs",))
def ragged_contracting_by_rhs(lhs: jax.Array, rhs: jax.Array, ends: jax.Array) -> jax.Array:
    """The product of `ragged_contracting_forward`, linear in rhs."""
    return ragged_contracting_forward(lhs, rhs, ends)


@ragged_dot_forward.defjvp
def _dot_jvp(primals: Any, tangents: Any, *, transpose_rhs: bool, **blocks: int) -> Any:
    (lhs, _, ends), (_, rhs, _) = primals, tangents
    value = ragged_dot_forward(*primals, transpose_rhs=transpose_rhs, **blocks)
    return value, ragged_dot_by_rhs(lhs, rhs, ends, transpose_rhs=transpose_rhs)


@ragged_dot_by_rhs.defjvp
def _dot_by_rhs_jvp(primals: Any, tangents: Any, *, transpose_rhs: bool) -> Any:
    (_, rhs, ends), (lhs, _, _) = primals, tangents
    value = ragged_dot_by_rhs(*primals, transpose_rhs=transpose_rhs)
    return value, ragged_dot_forward(lhs, rhs, ends, transpose_rhs=transpose_rhs)


@ragged_contracting_forward.defjvp
def _contracting_jvp(primals: Any, tangents: Any, **blocks: int) -> Any:
    (lhs, _, ends), (_, rhs, _) = primals, tangents
    return ragged_contracting_forward(*primals, **blocks), ragged_contracting_by_rhs(lhs, rhs, ends)


@ragged_contracting_by_rhs.defjvp
def _contracting_by_rhs_jvp(primals: Any, tangents: Any) -> Any:
    (_, rhs, ends), (lhs, _, _) = primals, tangents
    return ragged_contracting_by_rhs(*primals), ragged_contracting_forward(lhs, rhs, ends)


@ragged_dot_forward.deftranspose
def _dot_transpose(
    cotangent: jax.Array, lhs: Any, rhs: jax.Array, ends: jax.Array, *, transpose_rhs: bool
) -> dict[str, jax.Array]:
    """Each row times its group's matrix, transposed."""
    return {"lhs": ragged_dot_forward(cotangent, rhs, ends, transpose_rhs=not transpose_rhs)}


@ragged_dot_by_rhs.deftranspose
def _dot_by_rhs_transpose(
    cotangent: jax.Array, lhs: jax.Array, rhs: Any, ends: jax.Array, *, transpose_rhs: bool
) -> dict[str, jax.Array]:
    """The sum of each group's products of a row of lhs and one of the cotangent."""
    pair = (cotangent, lhs) if transpose_rhs else (lhs, cotangent)
    return {"rhs": ragged_contracting_forward(*pair, ends)}


@ragged_contracting_forward.deftranspose
def _contracting_transpose(cotangent: jax.Array, lhs: Any, rhs: jax.Array, ends: jax.Array) -> dict[str, jax.Array]:
    """Of out[g] = lhsᵀ rhs: a row of rhs times the cotangent of its group, transposed."""
    return {"lhs": ragged_dot_forward(rhs, cotangent, ends, transpose_rhs=True)}


@ragged_contracting_by_rhs.deftranspose
def _contracting_by_rhs_transpose(
    cotangent: jax.Array, lhs: jax.Array, rhs: Any, ends: jax.Array
) -> dict[str, jax.Array]:
    """A row of lhs times the cotangent of its group."""
    return {"rhs": ragged_dot_forward(lhs, cotangent, ends)}
