"""The public function: checks, and decays of all tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tilekern.authoring import hide_frames, takes_python_numbers
from tilekern.kernels.gated_delta_rule.channels import delta_rule_by_channel
from tilekern.kernels.gated_delta_rule.kernel import gated_delta_rule_forward
from tilekern.kernels.recurrences import as_runs, check_tokens

hide_frames(__file__)


@takes_python_numbers
def gated_delta_rule(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    beta: jax.Array,
    log_decay: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    *,
    segment_ids: jax.Array | None = None,
    target: str | None = None,
    block_t: int | None = None,
    block_v: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """S_t = a_t S_{t-1} + β_t k_t (v_t - a_t S_{t-1}ᵀ k_t)ᵀ and out_t = S_tᵀ q_t, in chunks; returns (out, last state).

    a_t = exp(log_decay_t). This is Gated DeltaNet (Yang et al. 2024, https://arxiv.org/abs/2412.06464), and without
    `log_decay` DeltaNet (Yang et al. 2024, https://arxiv.org/abs/2406.06484). With a decay for each channel of the key,
    log_decay[B, T, H, K], a_t multiplies the rows of the state: Kimi delta attention, KDA (Kimi Team 2025,
    https://arxiv.org/abs/2510.26692). The query is not scaled, and keys are not
    normalised: models make keys unit vectors, for which the state stays bounded while β_t ≤ 2. States, decays and the
    solution of a chunk are in float32 (float64 for float64); operands of products are in the dtype of the query.

    Derivatives of any order and mode are derived kernels. The backward pass computes the states of the chunks again,
    B · H · ⌈T / block_t⌉ · K · V numbers, and keeps the inputs alone between the passes.

    Args:
      query: [B, T, G, K], float32, bfloat16, float16 or float64.
      key: like the query.
      value: [B, T, H, V] of that dtype; head h has the query and the key of head h // (H // G).
      beta: [B, T, H], the rates at which tokens overwrite the state, of any of these dtypes.
      log_decay: [B, T, H], or [B, T, H, K] for a decay of each channel: natural logarithms of the decays, of any of
        these dtypes; None for no decay. They are at most 0, which is not checked: a positive one grows the state, and
        may overflow. Below -110 (-750 for float64) a decay is 0.
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
      >>> from tilekern.kernels.gated_delta_rule import gated_delta_rule
      >>> ones = jnp.ones((1, 3, 1, 1))
      >>> out, state = gated_delta_rule(ones, ones, ones, jnp.full((1, 3, 1), 0.5))
      >>> out.ravel()
      Array([0.5  , 0.75 , 0.875], dtype=float32)
    """
    of_tokens = {"beta": beta} if log_decay is None else {"beta": beta, "log_decay": log_decay}
    check_tokens(
        "gated_delta_rule", query, key, value, of_tokens, initial_state, segment_ids, by_channel=("log_decay",)
    )
    batch, tokens, heads, width = value.shape
    wide = jnp.promote_types(value.dtype, jnp.float32)
    if 0 in (batch, tokens, heads, width, query.shape[3]):
        zeros = jnp.zeros((batch, heads, query.shape[3], width), wide)
        return jnp.zeros_like(value), zeros if initial_state is None else initial_state.astype(wide)
    decays = jnp.zeros(value.shape[:3], wide) if log_decay is None else log_decay
    forward = gated_delta_rule_forward if decays.ndim == 3 else delta_rule_by_channel
    return forward(
        query, key, value, beta, decays, initial_state, as_runs(segment_ids),
        target=target, block_t=block_t, block_v=block_v,
    )  # fmt: skip
