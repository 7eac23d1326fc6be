"""The inverse of I + A for a strictly lower triangular A, by blocks whose size doubles.

[[P, 0], [R, Q]]⁻¹ = [[P⁻¹, 0], [-Q⁻¹ R P⁻¹, Q⁻¹]], for all pairs of blocks at once in two products. The errors are those of
substitution; a power series of A has terms that are far larger than their sum.

`unit_lower_inverse` takes products of whole matrices. `unit_lower_inverses` takes a stack of matrices, and holds their
diagonal blocks of size b side by side, as rows[b, C]. A product of all pairs of blocks is one of rows with a matrix of
blocks on the diagonal, so a matrix unit multiplies b rows in the place of C. No element moves from lane to lane.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import tilekern as tk

_ROWS = 8
"""Rows of a register of a TPU: smaller blocks are kept in so many rows."""


def unit_lower_inverse(a: jax.Array, precision: str | None = None) -> jax.Array:
    """(I + a)⁻¹ for a strictly lower triangular a[C, C]; `precision` is that of its products."""
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


def unit_lower_inverses(a: jax.Array, precision: str | None = None) -> jax.Array:
    """The same for a stack a[N, C, C], whose C is a power of two of at least 8."""
    size = a.shape[1]
    inverse, block = _of_rows(a, precision), _ROWS
    while block < size:
        lanes = _index((1, block, size), 2) // block
        left = lanes % 2 == 0
        below = _diagonal(a, block, left, lower=True)
        below = _product(below, inverse, 0, block, precision)
        below = _product(jnp.where(left, 0, inverse), below, 1, block, precision)
        above = jnp.where(left, inverse, 0)
        inverse = jnp.concatenate([above, jnp.where(left, -below, inverse)], axis=1)
        block *= 2
    return inverse


def _of_rows(a: jax.Array, precision: str | None) -> jax.Array:
    """The inverses of the diagonal blocks of 8, [N, 8, C]."""
    shape = (1, _ROWS, a.shape[2])
    rows, columns = _index(shape, 1), _index(shape, 2) % _ROWS
    blocks = _diagonal(a, _ROWS, rows > columns)
    inverse = jnp.where(rows == columns, 1, jnp.zeros_like(blocks))
    block = 1
    while block < _ROWS:
        pair = (rows // (2 * block) == columns // (2 * block)) & (rows // block % 2 == 1) & (columns // block % 2 == 0)
        below = jnp.where(pair, blocks, 0)
        if block > 1:
            below = _product(inverse, _product(below, inverse, 0, _ROWS, precision), 0, _ROWS, precision)
        inverse = inverse - below
        block *= 2
    return inverse


def _diagonal(a: jax.Array, block: int, kept: jax.Array, *, lower: bool = False) -> jax.Array:
    """The diagonal blocks of a[N, C, C] side by side, [N, block, C], where they are kept.

    With `lower` those beneath the blocks in the left half of a pair.
    """
    size = a.shape[1]
    lanes = _index((1, block, size), 2) // block
    found = jnp.zeros((a.shape[0], block, size), a.dtype)
    for n in range(0, size // block, 2 if lower else 1):
        start = (n + lower) * block
        found = jnp.where(kept & (lanes == n), a[:, start : start + block], found)
    return found


def _product(x: jax.Array, y: jax.Array, shift: int, block: int, precision: str | None) -> jax.Array:
    """Block n of the result is the product of block n + shift of x with block n of y; all are [N, block, C]."""
    size = y.shape[2]
    rows, lanes = _index((1, size, size), 1) // block, _index((1, size, size), 2) // block
    diagonal = jnp.where(rows == lanes + shift, jnp.concatenate([y] * (size // y.shape[1]), axis=1), 0)
    return jax.vmap(lambda x, y: tk.dot(x, y, precision=precision))(x, diagonal)


def _index(shape: tuple[int, ...], dim: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, dim)
