"""The public function: checks, leading dims, and sums that are split."""

from __future__ import annotations

import math
from typing import Unpack

import jax

from tilekern.authoring import hide_frames, takes_python_numbers
from tilekern.kernels.checks import as_rows
from tilekern.kernels.conventions import Launch, check_launch, renamed
from tilekern.kernels.matmul.batches import broadcast, misfit, over_batches
from tilekern.kernels.matmul.products import checked_split, product

hide_frames(__file__)


@renamed(x="lhs", w="rhs", transpose_x="transpose_lhs", transpose_w="transpose_rhs")
@takes_python_numbers
def matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    split_k: int | None = None,
    target: str | None = None,
    **launch: Unpack[Launch],
) -> jax.Array:
    """lhs @ rhs, accumulated in float32 (float64 for float64; int32 for integers).

    The derivatives, of any order and mode, are products, too. No transposed copy is made of an operand.

    Args:
      lhs: [*B, M, K], floats of 8, 16, 32 or 64 bits, or integers; with `transpose_lhs` [*B, K, M].
      rhs: [*B, K, N] of the dtype of lhs; with `transpose_rhs` [*B, N, K]. Leading dims broadcast as in `jnp.matmul`,
        without copies. If rhs has no leading dims, the leading dims of lhs are rows.
      transpose_lhs: True if lhs is [*B, K, M].
      transpose_rhs: True if rhs is [*B, N, K].
      split_k: the number of parts of at least 128 terms into which a long sum may be split. Different programs compute
        the parts, which are then added in order. Results never change beyond rounding. If None, the schedule chooses:
        sums of 4096 terms and more are split where a GPU's multiprocessors, or all cores but one of a CPU, would lack a
        tile to compute.
      target: lower for this target's blocks, e.g. "cpu:xla".
      launch: instead of the schedule's, `block_m` rows and `block_n` columns of a tile, `block_k` terms that are summed
        at a time, and a GPU's `num_warps`, `num_stages` and `num_ctas`.

    Returns:
      [*B, M, N] in the dtype of lhs.

    Raises:
      tilekern.errors.ArgumentError: shapes or dtypes do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.matmul import matmul
      >>> matmul(jnp.ones((2, 3)), jnp.ones((4, 3)), transpose_rhs=True)
      Array([[3., 3., 3., 3.],
             [3., 3., 3., 3.]], dtype=float32)
    """
    check_launch("matmul", launch)
    split_k = checked_split("matmul", split_k)
    fits = min(getattr(a, "ndim", 0) for a in (lhs, rhs)) >= 2 and lhs.dtype == rhs.dtype
    fits = fits and lhs.shape[-2 if transpose_lhs else -1] == rhs.shape[-1 if transpose_rhs else -2]
    batch = broadcast(lhs.shape[:-2], rhs.shape[:-2]) if fits else None
    if batch is None:
        raise misfit("matmul", transpose_lhs, transpose_rhs, lhs=lhs, rhs=rhs)

    def of_matrices(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        transposes = {"transpose_lhs": transpose_lhs, "transpose_rhs": transpose_rhs}
        return product(lhs, rhs, **transposes, split_k=split_k, target=target, **launch)

    if lhs.ndim == rhs.ndim == 2:
        return of_matrices(lhs, rhs)
    if math.prod(rhs.shape[:-2]) == 1 and not transpose_lhs:
        out = of_matrices(as_rows(lhs), rhs.reshape(rhs.shape[-2:]))
        return out.reshape(*batch, lhs.shape[-2], out.shape[-1])
    return over_batches(of_matrices, batch, lhs, rhs)
