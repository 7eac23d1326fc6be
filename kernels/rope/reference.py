"""The definitions of rotary position embedding, and of a norm followed by the embedding, in plain jnp."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tilekern.kernels.rms_norm.reference import reference as rms_norm


def reference(
    x: jax.Array,
    positions: jax.Array | None = None,
    *,
    theta: float = 10000.0,
    frequencies: jax.Array | None = None,
    interleaved: bool = False,
    dtype: Any = None,
) -> jax.Array:
    """x[*B, T, N, H] with its pairs rotated by the angles positions[*B, T] * frequencies[H / 2].

    Angles are in float32, or float64 for float64 inputs. The rotation is in `dtype`; None: the dtype of the angles.
    """
    exact = jnp.promote_types(x.dtype, jnp.float32)
    wide = dtype or exact
    half = x.shape[-1] // 2
    if positions is None:
        positions = jnp.arange(x.shape[-3])
    if frequencies is None:
        frequencies = jnp.asarray(theta, exact) ** (-jnp.arange(half, dtype=exact) / max(half, 1))
    angles = positions.astype(exact)[..., None, None] * frequencies.astype(exact)
    cos, sin = jnp.cos(angles).astype(wide), jnp.sin(angles).astype(wide)
    axis = -1 if interleaved else -2
    pairs = x.astype(wide).reshape(*x.shape[:-1], *((half, 2) if interleaved else (2, half)))
    u, v = jnp.take(pairs, 0, axis), jnp.take(pairs, 1, axis)
    return jnp.stack([u * cos - v * sin, v * cos + u * sin], axis).reshape(x.shape).astype(x.dtype)


def normed_reference(
    x: jax.Array,
    weight: jax.Array | None = None,
    positions: jax.Array | None = None,
    *,
    theta: float = 10000.0,
    frequencies: jax.Array | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    dtype: Any = None,
) -> jax.Array:
    """`reference` of rms_norm(x, weight), in the dtype of x, without rounding between them."""
    wide = x.astype(dtype or jnp.promote_types(x.dtype, jnp.float32))
    normed = rms_norm(wide, weight, eps=eps, offset=offset, dtype=dtype)
    return reference(normed, positions, theta=theta, frequencies=frequencies, dtype=dtype).astype(x.dtype)
