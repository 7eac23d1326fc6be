"""The definition of the gated delta rule, in plain jnp."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tilekern.kernels.recurrences import continues


def reference(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    beta: jax.Array,
    log_decay: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    *,
    segment_ids: jax.Array | None = None,
    dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """S_t = a_t S_{t-1} + β_t k_t (v_t - a_t S_{t-1}ᵀ k_t)ᵀ and out_t = S_tᵀ q_t, token by token; and the last state.

    a_t is exp(log_decay_t), of the whole state or, if [B, T, H, K], of its rows. S_{t-1} is 0 where `segment_ids`
    change. Computed in `dtype`: if None in float32, in float64 for float64 inputs.
    """
    wide = dtype or jnp.promote_types(value.dtype, jnp.float32)
    state_dtype = jnp.promote_types(value.dtype, jnp.float32)
    batch, _, heads, width = value.shape
    q, k = (jnp.repeat(x, heads // x.shape[2], axis=2).astype(wide) for x in (query, key))
    decays = jnp.ones(value.shape[:3], wide) if log_decay is None else jnp.exp(log_decay.astype(wide))
    decays = decays[..., None] if decays.ndim == 3 else decays
    decays = jnp.where(continues(segment_ids, value.shape[:2])[..., None, None], decays, 0)
    start = jnp.zeros((batch, heads, q.shape[3], width)) if initial_state is None else initial_state

    def step(state: jax.Array, token: Any) -> tuple[jax.Array, jax.Array]:
        q_t, k_t, v_t, beta_t, decay = token
        state = state * decay[..., None]
        missing = v_t - jnp.einsum("bhkv,bhk->bhv", state, k_t, precision="highest")
        state = state + (beta_t[..., None] * k_t)[..., :, None] * missing[..., None, :]
        return state, jnp.einsum("bhkv,bhk->bhv", state, q_t, precision="highest")

    tokens = [jnp.moveaxis(x, 1, 0) for x in (q, k, value.astype(wide), beta.astype(wide), decays)]
    last, out = jax.lax.scan(step, start.astype(wide), tokens)
    return jnp.moveaxis(out, 0, 1).astype(value.dtype), last.astype(state_dtype)
