"""The definition of a step of AdamW, in plain jnp."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def reference(
    param: jax.Array,
    gradient: jax.Array,
    first: jax.Array,
    second: jax.Array,
    factors: jax.Array,
    keys: jax.Array | None = None,
    coordinates: tuple[jax.Array, ...] = (),
    *,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    dtype: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The weights and the moments after a step, rounded to the nearest of their dtypes.

    `factors` multiply the gradient, the step, the first and the second moment. `keys` and `coordinates` are ignored:
    they decide about stochastic rounding only. Computed in float32, in float64 for float64 weights. With a `dtype` the
    computation and the results are in it.
    """
    wide = dtype or jnp.promote_types(param.dtype, jnp.float32)
    p, g, m, v, f = (x.astype(wide) for x in (param, gradient, first, second, factors))
    g = g * f[0]
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    p = p - f[1] * (f[2] * m / (jnp.sqrt(f[3] * v) + eps) + weight_decay * p)
    if dtype is not None:
        return p, m, v
    return p.astype(param.dtype), m.astype(first.dtype), v.astype(second.dtype)
