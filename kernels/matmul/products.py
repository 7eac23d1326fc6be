"""Products of two matrices: by the kernel, or by parts of long sums where the target lacks tiles to compute."""

from __future__ import annotations

from typing import Any

import jax

import tilekern as tk
from tilekern.authoring import LAUNCH_OPTIONS, hide_frames, is_divided, takes_python_numbers
from tilekern.errors import ArgumentError
from tilekern.kernels.matmul.kernel import matmul
from tilekern.kernels.matmul.split import split_matmul

hide_frames(__file__)

# Products with fewer tiles of 64 × 64 than half of the multiprocessors of the largest GPU, whose sums are long.
FEW_TILES, LONG = 74, 4096


def product(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    split_k: int | None = None,
    **launch: Any,
) -> jax.Array:
    """lhs[M, K] @ rhs[K, N] by the kernel; by `split_matmul` if a target may split the sum, into `split_k` parts."""
    transposes = {"transpose_lhs": transpose_lhs, "transpose_rhs": transpose_rhs}
    # Launch options are for the programs of the kernel, not of the op.
    tuned = split_k is None and any(launch.get(name) is not None for name in LAUNCH_OPTIONS)
    if not tuned and splits(lhs, rhs, transpose_lhs, transpose_rhs, split_k):
        return split_matmul(lhs, rhs, **transposes, split_k=split_k, dtype=str(lhs.dtype), **launch)
    return matmul(lhs, rhs, **transposes, **launch)


@takes_python_numbers
def checked_split(function: str, split_k: int | None) -> int | None:
    """`split_k`, checked.

    Raises:
      ArgumentError: `split_k` is not a positive int or None.
    """
    if split_k is None or (type(split_k) is int and split_k > 0):
        return split_k
    raise ArgumentError(
        f"{function} cannot split its sums into such a number of parts",
        expected="an int that is at least 1, or None",
        got=f"split_k = {split_k!r}",
        fix="leave it out, for the number that the schedule of the target chooses",
    )


def splits(lhs: Any, rhs: Any, transpose_lhs: bool, transpose_rhs: bool, split_k: int | None) -> bool:
    """True if a target may split the sum of a product of matrices.

    False for operands that a mesh divides by their types, and for sizes that are symbols: only the kernel has a rule
    for such operands.
    """
    has_symbols = any(jax.export.is_symbolic_dim(size) for size in (*lhs.shape, *rhs.shape))
    if split_k == 1 or lhs.dtype != rhs.dtype or has_symbols or any(is_divided(a) for a in (lhs, rhs)):
        return False
    rows, inner = reversed(lhs.shape) if transpose_lhs else lhs.shape
    columns = rhs.shape[0 if transpose_rhs else 1]
    fits = inner == rhs.shape[1 if transpose_rhs else 0] and min(rows, inner, columns) > 0
    few = tk.cdiv(rows, 64) * tk.cdiv(columns, 64) <= FEW_TILES
    return fits and (split_k is not None or (few and inner >= LONG))
