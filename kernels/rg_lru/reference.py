"""The definition of rg_lru, in plain jnp."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tilekern.kernels.recurrences import continues


def reference(
    x: jax.Array,
    input_gate: jax.Array,
    recurrence_gate: jax.Array,
    a_param: jax.Array,
    initial_state: jax.Array | None = None,
    *,
    segment_ids: jax.Array | None = None,
    exponent: float = 8.0,
    scale_first: bool = True,
    dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """h_t = a_t h_{t-1} + sqrt(1 - a_t²) σ(input_gate_t) x_t, token by token; and the last state.

    h_{t-1} is 0 where `segment_ids` change. Computed in `dtype`: if None in float32, in float64 for float64 inputs.
    """
    wide = dtype or jnp.promote_types(x.dtype, jnp.float32)
    state_dtype = jnp.promote_types(x.dtype, jnp.float32)
    log_a = -exponent * jax.nn.softplus(a_param.astype(wide)) * jax.nn.sigmoid(recurrence_gate.astype(wide))
    square = -jnp.expm1(2 * log_a)
    # Where a is 1 to the last digit, the factor is 0, and so are its derivatives by the gate and the parameter.
    factor = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)
    same_run = continues(segment_ids, x.shape[:2])[..., None]
    if not scale_first:
        first = ~same_run if initial_state is not None else ~same_run | (jnp.arange(x.shape[1]) == 0)[:, None]
        factor = jnp.where(first, 1, factor)
    decays = jnp.where(same_run, jnp.exp(log_a), 0)
    added = factor * jax.nn.sigmoid(input_gate.astype(wide)) * x.astype(wide)
    start = jnp.zeros((x.shape[0], x.shape[2]), wide) if initial_state is None else initial_state.astype(wide)

    def step(state: jax.Array, token: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        state = token[0] * state + token[1]
        return state, state

    last, out = jax.lax.scan(step, start, (jnp.moveaxis(decays, 1, 0), jnp.moveaxis(added, 1, 0)))
    return jnp.moveaxis(out, 0, 1).astype(x.dtype), last.astype(state_dtype)
