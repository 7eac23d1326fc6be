"""The state space dual of Mamba-2, which is linear attention with decays of tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tilekern.authoring import hide_frames, takes_python_numbers
from tilekern.kernels.checks import is_float, require
from tilekern.kernels.linear_attention.api import linear_attention

hide_frames(__file__)


@takes_python_numbers
def ssd(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    d: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    *,
    segment_ids: jax.Array | None = None,
    target: str | None = None,
    block_t: int | None = None,
    block_v: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """S_t = exp(dt_t a) S_{t-1} + dt_t b_t x_tᵀ and out_t = S_tᵀ c_t + d x_t, in chunks; returns (out, last state).

    Mamba-2's layer between its convolution and its gate (Dao and Gu 2024, https://arxiv.org/abs/2405.21060): it is
    `linear_attention` with query c, key b, value dt x and log decays dt a.

    Args:
      x: [B, T, H, P], float32, bfloat16, float16 or float64.
      dt: [B, T, H], steps of time, at least 0: behind their bias and softplus. Of any of these dtypes.
      a: [H], at most 0: models keep log(-a). Of any of these dtypes.
      b: [B, T, G, N], of the dtype of x; head h has the group h // (H // G).
      c: like b.
      d: [H], or [H, P], of any of these dtypes; None for zeros.
      initial_state: [B, H, N, P], of any of these dtypes; None for zeros. Mamba's own order is [B, H, P, N].
      segment_ids: [B, T], integers: packed sequences, as of `linear_attention`.
      target: lower for this target's blocks, e.g. "cpu:xla".
      block_t: tokens of a chunk, instead of the schedule's; no block changes the result beyond rounding.
      block_v: columns of the state of a program.

    Returns:
      out[B, T, H, P] in the dtype of x, and the state behind the last token, [B, H, N, P], in float32 (float64 for
      float64): the `initial_state` of the tokens that follow.

    Raises:
      tilekern.errors.ArgumentError: shapes or dtypes do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.linear_attention import ssd
      >>> ones = jnp.ones((1, 3, 1, 1))
      >>> out, state = ssd(ones, jnp.ones((1, 3, 1)), jnp.log(jnp.array([0.5])), ones, ones, jnp.ones(1))
      >>> out.ravel()
      Array([2.  , 2.5 , 2.75], dtype=float32)
    """
    _check(x, dt, a, b, c, d)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    steps = dt.astype(wide)
    value = (x.astype(wide) * steps[..., None]).astype(x.dtype)
    out, state = linear_attention(
        c, b, value, steps * a.astype(wide), initial_state,
        segment_ids=segment_ids, target=target, block_t=block_t, block_v=block_v,
    )  # fmt: skip
    if d is None:
        return out, state
    skip = d.astype(wide) if d.ndim == 2 else d.astype(wide)[:, None]
    return (out.astype(wide) + skip * x.astype(wide)).astype(x.dtype), state


def _check(x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any) -> None:
    arrays = {"x": x, "dt": dt, "a": a, "b": b, "c": c} | ({} if d is None else {"d": d})
    fits = all(map(is_float, arrays.values())) and x.ndim == b.ndim == 4 and b.shape == c.shape
    fits = fits and x.dtype == b.dtype == c.dtype and x.shape[:2] == b.shape[:2]
    fits = fits and dt.shape == x.shape[:3] and a.shape == x.shape[2:3]
    fits = fits and (d is None or d.shape in (x.shape[2:3], x.shape[2:]))
    fits = fits and (x.shape[2] == 0 if b.shape[2] == 0 else x.shape[2] % b.shape[2] == 0)
    require(
        fits,
        "ssd",
        expected="x[B, T, H, P], b[B, T, G, N] and c[B, T, G, N] of one float dtype of at least 16 bits, H a multiple "
        "of G, dt[B, T, H], a[H], d[H] or [H, P] or None, of any such dtypes",
        fix="heads come after tokens: use swapaxes(1, 2); cast with .astype",
        **arrays,
    )
