"""The definition of causal_conv1d, in plain jnp."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tilekern.kernels.recurrences import as_runs


def reference(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    *,
    segment_ids: jax.Array | None = None,
    activation: str | None = None,
    dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """act(bias + Σ_k weight[k] x[t - (K - 1) + k]), with the state before x; and the last K - 1 tokens.

    Computed in `dtype`; None: float32, or float64 for float64 inputs.
    """
    wide = dtype or jnp.promote_types(x.dtype, jnp.float32)
    taps, tokens, segment_ids = weight.shape[0], x.shape[1], as_runs(segment_ids)
    past = _with_past(x.astype(wide), None if initial_state is None else initial_state.astype(wide), taps)
    total = jnp.zeros_like(x, wide) if bias is None else jnp.broadcast_to(bias.astype(wide), x.shape)
    for back in range(taps):
        tap = past[:, taps - 1 - back : taps - 1 - back + tokens]
        same = _same_run(segment_ids, x.shape, back)
        total = total + weight[taps - 1 - back].astype(wide) * (tap if same is None else jnp.where(same, tap, 0))
    out = jax.nn.silu(total) if activation == "silu" else total
    return out.astype(x.dtype), last_tokens(x, initial_state, segment_ids, taps)


def definition(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    initial_state: jax.Array | None,
    segment_ids: jax.Array | None,
    *,
    activation: str | None,
) -> jax.Array:
    """The first result of the reference, as a function of the kernel's inputs."""
    return reference(x, weight, bias, initial_state, segment_ids=segment_ids, activation=activation)[0]


def last_tokens(x: jax.Array, initial_state: Any, segment_ids: Any, taps: int) -> jax.Array:
    """[B, taps - 1, C], the last tokens of the state and x, 0 for a token of an earlier packed sequence."""
    few = min(taps - 1, x.shape[1])
    recent = x[:, x.shape[1] - few :]
    past = _with_past(recent, None if initial_state is None else initial_state.astype(x.dtype), taps)[:, few:]
    if segment_ids is None or not few:
        return past
    ids = _with_past(segment_ids[:, x.shape[1] - few :], None, taps, edge=True)[:, few:]
    # A token belongs to the last sequence if all tokens behind it do.
    same = jnp.flip(jnp.cumprod(jnp.flip(ids == ids[:, -1:], 1).astype(jnp.int32), axis=1), 1)
    return jnp.where(same[..., None] == 1, past, 0)


def _with_past(x: jax.Array, state: jax.Array | None, taps: int, *, edge: bool = False) -> jax.Array:
    """[B, taps - 1 + T, ...]: the state (None: zeros, or with `edge` copies of the first token), then x."""
    if state is None:
        ends = ((0, 0), (taps - 1, 0), *((0, 0) for _ in x.shape[2:]))
        return jnp.pad(x, ends, mode="edge" if edge else "constant")
    return jnp.concatenate([state, x], axis=1)


def _same_run(segment_ids: jax.Array | None, shape: tuple[int, ...], back: int) -> jax.Array | None:
    """bool[B, T, 1]: True where the token `back` before is of the same run. Tokens before x belong to the first run."""
    if segment_ids is None or not back:
        return None
    ids = _with_past(segment_ids, None, back + 1, edge=True)
    same = jnp.ones(shape[:2], bool)
    for n in range(back):
        same &= ids[:, n : n + shape[1]] == ids[:, n + 1 : n + 1 + shape[1]]
    return same[..., None]
