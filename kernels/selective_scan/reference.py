"""The definition of the selective scan, in plain jnp."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tilekern.kernels.recurrences import continues


def reference(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    d: jax.Array | None = None,
    z: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    *,
    dt_softplus: bool = False,
    segment_ids: jax.Array | None = None,
    dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """h_t = exp(Δ_t a) h_{t-1} + Δ_t b_t x_t and out_t = c_t · h_t + d x_t, token by token; and the last state.

    h_{t-1} is 0 where `segment_ids` change. Computed in `dtype`: if None in float32, in float64 for float64 inputs.
    """
    wide = dtype or jnp.promote_types(x.dtype, jnp.float32)
    state_dtype = jnp.promote_types(x.dtype, jnp.float32)
    steps = dt.astype(wide) if dt_bias is None else dt.astype(wide) + dt_bias.astype(wide)
    steps = jax.nn.softplus(steps) if dt_softplus else steps
    same_run = continues(segment_ids, x.shape[:2])
    rates, inputs = a.astype(wide), x.astype(wide)
    start = jnp.zeros((x.shape[0], *a.shape), wide) if initial_state is None else initial_state.astype(wide)

    def step(state: jax.Array, token: Any) -> tuple[jax.Array, jax.Array]:
        x_t, delta_t, b_t, c_t, same_t = token
        decays = jnp.where(same_t[:, None, None], jnp.exp(delta_t[..., None] * rates), 0)
        state = decays * state + (delta_t * x_t)[..., None] * b_t[:, None, :]
        return state, (state * c_t[:, None, :]).sum(axis=-1)

    tokens = inputs, steps, b.astype(wide), c.astype(wide), same_run
    last, out = jax.lax.scan(step, start, [jnp.moveaxis(v, 1, 0) for v in tokens])
    out = jnp.moveaxis(out, 0, 1)
    if d is not None:
        out = out + d.astype(wide) * inputs
    if z is not None:
        out = out * jax.nn.silu(z.astype(wide))
    return out.astype(x.dtype), last.astype(state_dtype)
