"""The public function: checks, and decays of one form."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tilekern.authoring import hide_frames, takes_python_numbers
from tilekern.kernels.linear_attention.kernel import linear_attention_forward
from tilekern.kernels.recurrences import as_runs, check_tokens

hide_frames(__file__)


@takes_python_numbers
def linear_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    initial_state: jax.Array | None = None,
    *,
    segment_ids: jax.Array | None = None,
    target: str | None = None,
    block_t: int | None = None,
    block_v: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """S_t = exp(log_decay_t) S_{t-1} + k_t v_tᵀ and out_t = S_tᵀ q_t, in chunks; the result is (out, last state).

    With a constant decay of each head it is the retention of RetNet (Sun et al. 2023, https://arxiv.org/abs/2307.08621)
    and lightning attention; with one of each token, the recurrence of Mamba-2 (Dao and Gu 2024,
    https://arxiv.org/abs/2405.21060, section 6). The query is not scaled. States, decays and sums are in float32
    (float64 for float64); operands of products are in the dtype of the query.

    Derivatives of any order and mode are derived kernels. The backward pass computes the states of the chunks again,
    B · H · ⌈T / block_t⌉ · K · V numbers, and keeps the inputs alone between the passes.

    Args:
      query: [B, T, G, K], float32, bfloat16, float16 or float64.
      key: like the query.
      value: [B, T, H, V] of that dtype; head h has the query and the key of head h // (H // G), as of grouped queries.
      log_decay: [B, T, H], or [H] for constant decays: natural logarithms of the decays, of any of these dtypes. They
        are at most 0, which is not checked: a positive one grows the state, and may overflow. Below -110 (-750 for
        float64) a decay is 0.
      initial_state: [B, H, K, V], of any of these dtypes; None for zeros.
      segment_ids: [B, T], integers: packed sequences, each a run of one number, which may come again: 1 1 2 1 are
        three. The state begins anew with each run; the first one continues `initial_state`, and the last state is that
        of the last one, also if it is padding. A NaN or an infinity of a sequence may make NaN of others, as
        tokens of others are multiplied by 0. None for one sequence.
      target: lower for this target's blocks, e.g. "cpu:xla".
      block_t: tokens of a chunk, instead of the schedule's; no block changes the result beyond rounding.
      block_v: columns of the state of a program.

    Returns:
      out[B, T, H, V] in the dtype of the value, and the state behind the last token, [B, H, K, V], in float32 (float64
      for float64): the `initial_state` of the tokens that follow.

    Raises:
      tilekern.errors.ArgumentError: shapes or dtypes do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.linear_attention import linear_attention
      >>> ones = jnp.ones((1, 3, 1, 1))
      >>> out, state = linear_attention(ones, ones, ones, jnp.log(jnp.array([0.5])))
      >>> out.ravel()
      Array([1.  , 1.5 , 1.75], dtype=float32)
    """
    check_tokens(
        "linear_attention", query, key, value, {"log_decay": log_decay}, initial_state, segment_ids, constant=True
    )
    batch, tokens, heads, width = value.shape
    wide = jnp.promote_types(value.dtype, jnp.float32)
    if 0 in (batch, tokens, heads, width, query.shape[3]):
        zeros = jnp.zeros((batch, heads, query.shape[3], width), wide)
        return jnp.zeros_like(value), zeros if initial_state is None else initial_state.astype(wide)
    decays = jnp.broadcast_to(log_decay, value.shape[:3])
    return linear_attention_forward(
        query, key, value, decays, initial_state, as_runs(segment_ids),
        target=target, block_t=block_t, block_v=block_v,
    )  # fmt: skip
