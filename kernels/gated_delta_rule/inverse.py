"""The inverse of I + A for a strictly lower triangular A, by blocks whose size doubles.

[[P, 0], [R, Q]]⁻¹ = [[P⁻¹, 0], [-Q⁻¹ R P⁻¹, Q⁻¹]], for all pairs of blocks at once in two products. Errors are as
small as with substitution; a power series of A has terms that are far larger than their sum.

`unit_lower_inverse` takes products of whole matrices. `unit_lower_inverses` takes a stack of matrices, and holds their
diagonal blocks of size b side by side, as tiles [b, C]. The product of such a tile with a matrix of blocks on the
diagonal has the products of all pairs of blocks: a matrix unit multiplies b rows in the place of C. No element moves
from lane to lane.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.recurrences import truncated

_ROWS = 8
"""Rows of a register of a TPU. Blocks of that size are inverted row by row."""


def unit_lower_inverse(a: jax.Array, precision: str | None = None) -> jax.Array:
    """(I + a)⁻¹ for a strictly lower triangular a[C, C], by products of the given `precision`."""
    size = a.shape[0]
    rows, columns = (jax.lax.broadcasted_iota(jnp.int32, a.shape, d) for d in (0, 1))
    inverse = jnp.where(rows == columns, 1, 0).astype(a.dtype)
    block = 1
    while block < size:
        pair = (rows // (2 * block) == columns // (2 * block)) & (rows // block % 2 == 1) & (columns // block % 2 == 0)
        below = jnp.where(pair, a, 0)
        if block > 1:
            below = tk.dot(inverse, tk.dot(below, inverse, precision=precision), precision=precision)
        inverse = inverse - below
        block *= 2
    return inverse


def in_blocks(size: int) -> bool:
    """True if `unit_lower_inverses` takes matrices of that size: powers of two of at least 8."""
    return size >= _ROWS and size & (size - 1) == 0


def unit_lower_inverses(a: jax.Array, in_parts: bool = False) -> jax.Array:
    """(I + a)⁻¹ for each matrix of a stack a[N, C, C], where `in_blocks(C)` holds.

    With `in_parts` a float32 operand is the sum of two parts of bfloat16, and the product of the lower parts is left
    out. The sum of the other three products has an error of 2⁻¹⁶. A matrix unit loads the blocks on the diagonal twice
    for the three products.
    """

    @jax.custom_jvp
    def inverses(a: jax.Array) -> jax.Array:
        return _doubled(a, in_parts)

    @inverses.defjvp
    def rule(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        """d(X⁻¹) = -X⁻¹ dX X⁻¹: two products, where each doubling would take two more."""
        inverse = inverses(*primals)
        product = partial(tk.dot, precision="bf16x3" if in_parts else None)
        return inverse, -product(inverse, product(tangents[0], inverse))

    return inverses(a)


def _doubled(a: jax.Array, in_parts: bool) -> jax.Array:
    size, block = a.shape[1], _ROWS
    inverse = _substituted(a)
    product = partial(_product, in_parts=in_parts)
    while block < size:
        left = _index((1, block, size), 2) // block % 2 == 0
        below = product(_diagonal(a, block, left, lower=True), inverse, 0)
        below = product(jnp.where(left, 0, inverse), below, 1)
        above = jnp.where(left, inverse, 0)
        inverse = jnp.concatenate([above, jnp.where(left, -below, inverse)], axis=1)
        block *= 2
    return inverse


def _substituted(a: jax.Array) -> jax.Array:
    """The inverses of the diagonal blocks of 8, [N, 8, C], row by row: X_i = e_i - Σ_{k < i} A_ik X_k."""
    stack, _, size = a.shape
    shape = (1, _ROWS, size)
    rows, columns = _index(shape, 1), _index(shape, 2) % _ROWS
    blocks = _diagonal(a, _ROWS, rows > columns)
    inverses = jnp.where(rows == columns, 1, jnp.zeros_like(blocks))
    lines = blocks.reshape(stack * _ROWS, size)
    lanes = _index(lines.shape, 1) // _ROWS * _ROWS
    for k in range(_ROWS - 1):
        factors = jnp.take_along_axis(lines, lanes + k, axis=1).reshape(blocks.shape)
        inverses = inverses - factors * inverses[:, k : k + 1]
    return inverses


def _diagonal(a: jax.Array, block: int, mask: jax.Array, *, lower: bool = False) -> jax.Array:
    """The diagonal blocks of a[N, C, C] side by side, [N, block, C]; 0 where the mask is False.

    With `lower`, for each pair of diagonal blocks the block below the left one, in the left one's place.
    """
    size = a.shape[1]
    lanes = _index((1, block, size), 2) // block
    blocks = jnp.zeros((a.shape[0], block, size), a.dtype)
    for n in range(0, size // block, 2 if lower else 1):
        start = (n + lower) * block
        blocks = jnp.where(mask & (lanes == n), a[:, start : start + block], blocks)
    return blocks


def _product(x: jax.Array, y: jax.Array, shift: int, in_parts: bool) -> jax.Array:
    """Block n of the result is the product of block n + shift of x with block n of y; all are [N, block, C]."""
    _, block, size = x.shape
    rows, lanes = (_index((1, size, size), d) // block for d in (1, 2))

    def diagonal(y: jax.Array) -> jax.Array:
        return jnp.where(rows == lanes + shift, jnp.concatenate([y] * (size // block), axis=1), 0)

    if not in_parts:
        return tk.dot(x, diagonal(y))
    multiplied = partial(tk.dot, precision="bf16")
    high = truncated(x)
    products = multiplied(jnp.concatenate([high, x - high], axis=1), diagonal(truncated(y)))
    return products[:, :block] + products[:, block:] + multiplied(high, diagonal(y - truncated(y)))


def _index(shape: tuple[int, ...], dim: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, dim)
