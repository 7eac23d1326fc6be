"""Derivatives of products: two products more, each of which may be split."""

from __future__ import annotations

from typing import Any

import jax

import tilekern as tk
from tilekern.kernels.matmul.kernel import matmul, matmul_type
from tilekern.kernels.matmul.products import product
from tilekern.kernels.matmul.split import split_matmul


def _tangent_type(
    lhs: Any, rhs: Any, dlhs: Any, drhs: Any, *, transpose_lhs: bool, transpose_rhs: bool
) -> jax.ShapeDtypeStruct:
    left, right = (lhs, drhs) if dlhs is None or rhs is None else (dlhs, rhs)
    return matmul_type(left, right, transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)


@tk.op(out_type=_tangent_type, linear=("dlhs", "drhs"))
def matmul_tangent(
    lhs: jax.Array | None,
    rhs: jax.Array | None,
    dlhs: jax.Array | None,
    drhs: jax.Array | None,
    *,
    transpose_lhs: bool,
    transpose_rhs: bool,
) -> jax.Array:
    """dlhs rhs + lhs drhs, the derivative of a product; None is a matrix of zeros."""
    pairs = [(left, right) for left, right in ((dlhs, rhs), (lhs, drhs)) if left is not None and right is not None]
    first, *second = (product(*pair, transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs) for pair in pairs)
    return first + second[0] if second else first


@matmul.defjvp
def _jvp(primals: Any, tangents: Any, *, transpose_lhs: bool, transpose_rhs: bool, **blocks: int) -> Any:
    transposes = {"transpose_lhs": transpose_lhs, "transpose_rhs": transpose_rhs}
    return matmul(*primals, **transposes, **blocks), matmul_tangent(*primals, *tangents, **transposes)


@split_matmul.defjvp
def _split_jvp(
    primals: Any, tangents: Any, *, transpose_lhs: bool, transpose_rhs: bool, dtype: str, **blocks: Any
) -> Any:
    transposes = {"transpose_lhs": transpose_lhs, "transpose_rhs": transpose_rhs}
    tangent = matmul_tangent(*primals, *tangents, **transposes)
    return split_matmul(*primals, **transposes, dtype=dtype, **blocks), tangent.astype(dtype)


@matmul_tangent.defjvp
def _tangent_jvp(primals: Any, tangents: Any, **transposes: bool) -> Any:
    """Along lhs and rhs, with constant dlhs and drhs: the same sum, of the tangents of lhs and rhs."""
    (_, _, dlhs, drhs), (lhs, rhs, _, _) = primals, tangents
    moved = (lhs is not None and drhs is not None) or (dlhs is not None and rhs is not None)
    tangent = matmul_tangent(dlhs, drhs, lhs, rhs, **transposes) if moved else None
    return matmul_tangent(*primals, **transposes), tangent


@matmul_tangent.deftranspose
def _tangent_transpose(
    cotangent: jax.Array, lhs: Any, rhs: Any, dlhs: Any, drhs: Any, *, transpose_lhs: bool, transpose_rhs: bool
) -> dict[str, jax.Array]:
    """The cotangents of dlhs and drhs, c rhsᵀ and lhsᵀ c for the cotangent c; transposed: rhs cᵀ and cᵀ lhs."""
    cotangents: dict[str, jax.Array] = {}
    if dlhs is not None and rhs is not None:
        cotangents["dlhs"] = (
            product(rhs, cotangent, transpose_lhs=transpose_rhs, transpose_rhs=True)
            if transpose_lhs
            else product(cotangent, rhs, transpose_rhs=not transpose_rhs)
        )
    if drhs is not None and lhs is not None:
        cotangents["drhs"] = (
            product(cotangent, lhs, transpose_lhs=True, transpose_rhs=transpose_lhs)
            if transpose_rhs
            else product(lhs, cotangent, transpose_lhs=not transpose_lhs)
        )
    return cotangents
