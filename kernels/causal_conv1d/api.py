"""The public function: checks, and the last tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tilekern.authoring import hide_frames, takes_python_numbers
from tilekern.errors import ArgumentError
from tilekern.kernels.causal_conv1d.kernel import causal_conv1d_forward
from tilekern.kernels.causal_conv1d.reference import last_tokens
from tilekern.kernels.checks import is_float, is_integer, require
from tilekern.kernels.recurrences import as_runs

hide_frames(__file__)

_ACTIVATIONS = (None, "silu")


@takes_python_numbers
def causal_conv1d(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    *,
    segment_ids: jax.Array | None = None,
    activation: str | None = None,
    target: str | None = None,
    block_t: int | None = None,
    block_c: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """out_t = act(bias + Σ_k weight_k x_{t-(K-1)+k}), channel by channel; the result is (out, last K - 1 tokens).

    The short convolution before the recurrences of Mamba (Gu and Dao 2023, https://arxiv.org/abs/2312.00752, section
    3.4, and https://github.com/Dao-AILab/causal-conv1d), Griffin and Gated DeltaNet. Sums are in float32 (float64 for
    float64). One step of decoding is a call with one token and the state of the call before.

    First reverse-mode derivatives run a kernel, and keep only the inputs between the passes; all other derivatives
    differentiate the definition.

    Args:
      x: [B, T, C], float32, bfloat16, float16 or float64.
      weight: [K, C] with K of at least 1, of any dtype that x may have; the last row is for the token itself. PyTorch's
        conv1d keeps [C, 1, K].
      bias: [C], of any dtype that x may have; None for zeros.
      initial_state: [B, K - 1, C], the tokens before x, of any dtype that x may have; None for zeros.
      segment_ids: [B, T], integers: each run of equal numbers is a packed sequence: 1 1 2 1 are three sequences.
        No tap reaches another run; the first run continues `initial_state`. None for one sequence.
      activation: "silu", or None.
      target: lower for this target's blocks, e.g. "cpu:xla".
      block_t: tokens of a tile, instead of the schedule's; no block changes the result beyond rounding.
      block_c: channels of a tile.

    Returns:
      out[B, T, C] and the last K - 1 tokens of `initial_state` and x, [B, K - 1, C], both in the dtype of x: the
      `initial_state` of the tokens that follow. Tokens of other runs than the last are 0 in it.

    Raises:
      tilekern.errors.ArgumentError: shapes or dtypes do not fit, or there is no such activation.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.causal_conv1d import causal_conv1d
      >>> x = jnp.array([1.0, 2.0, 3.0]).reshape(1, 3, 1)
      >>> out, state = causal_conv1d(x, jnp.array([[10.0], [1.0]]))
      >>> out.ravel()
      Array([ 1., 12., 23.], dtype=float32)
      >>> causal_conv1d(4 * jnp.ones((1, 1, 1)), jnp.array([[10.0], [1.0]]), None, state)[0].ravel()
      Array([34.], dtype=float32)
    """
    _check(x, weight, bias, initial_state, segment_ids)
    if activation not in _ACTIVATIONS:
        raise ArgumentError(
            "causal_conv1d has no such activation",
            expected='"silu" or None',
            got=f"activation = {activation!r}",
            fix="apply other functions to the result",
        )
    taps, ids = weight.shape[0], as_runs(segment_ids)
    last = last_tokens(x, initial_state, ids, taps)
    if 0 in x.shape:
        return jnp.zeros_like(x), last
    state = None if taps == 1 else initial_state
    blocks = {"block_t": block_t, "block_c": block_c}
    out = causal_conv1d_forward(x, weight, bias, state, ids, activation=activation, target=target, **blocks)
    return out, last


def _check(x: Any, weight: Any, bias: Any, initial_state: Any, segment_ids: Any) -> None:
    arrays = {"x": x, "weight": weight, "bias": bias, "initial_state": initial_state}
    named = {name: a for name, a in arrays.items() if a is not None}
    fits = all(map(is_float, named.values())) and x.ndim == 3 and weight.ndim == 2
    fits = fits and weight.shape[0] > 0 and weight.shape[1] == x.shape[2]
    fits = fits and (bias is None or bias.shape == x.shape[2:])
    state = fits and (x.shape[0], weight.shape[0] - 1, x.shape[2])
    fits = fits and (initial_state is None or initial_state.shape == state)
    fits = fits and (segment_ids is None or (is_integer(segment_ids) and segment_ids.shape == x.shape[:2]))
    require(
        fits,
        "causal_conv1d",
        expected="x[B, T, C], weight[K, C] with K of at least 1, bias[C] or None, initial_state[B, K - 1, C] or None, "
        "of float dtypes of at least 16 bits, segment_ids[B, T] of integers or None",
        fix="channels come last: use swapaxes(1, 2), for a weight[C, 1, K] weight[:, 0].T; cast with .astype",
        **named,
        **({} if segment_ids is None else {"segment_ids": segment_ids}),
    )
