"""The public function: checks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tilekern.authoring import hide_frames, takes_python_numbers
from tilekern.kernels.checks import is_float, is_integer, require
from tilekern.kernels.conventions import renamed
from tilekern.kernels.recurrences import as_runs
from tilekern.kernels.selective_scan.kernel import selective_scan_forward

hide_frames(__file__)


@renamed(delta="dt", delta_bias="dt_bias", delta_softplus="dt_softplus")
@takes_python_numbers
def selective_scan(
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
    target: str | None = None,
    block_t: int | None = None,
    block_c: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """h_t = exp(Δ_t a) h_{t-1} + Δ_t b_t x_t, out_t = (c_t · h_t + d x_t) silu(z_t); the result is (out, last state).

    Each channel has N states: Mamba's layer between its convolution and its last product (Gu and Dao 2023,
    https://arxiv.org/abs/2312.00752, algorithm 2, with b discretised as Δ b as in its code). Δ is `dt`, plus
    `dt_bias`, through softplus if asked. States, decays and sums are in float32 (float64 for float64). One step of
    decoding is a call with one token and the state of the call before.

    Derivatives of any order and mode are derived kernels. The backward pass computes the states of the chunks again,
    B · ⌈T / block_t⌉ · C · N numbers, and keeps the inputs alone between the passes.

    Args:
      x: [B, T, C], float32, bfloat16, float16 or float64.
      dt: [B, T, C], steps of time, of any of these dtypes. Behind bias and softplus they are at least 0.
      a: [C, N] with N > 0, of any of these dtypes, at most 0: models keep log(-a). Signs are not checked: a positive
        product Δ a grows the state, and may overflow.
      b: [B, T, N], of any of these dtypes.
      c: like b.
      d: [C], of any of these dtypes; None for zeros.
      z: [B, T, C], the gate, of any of these dtypes; None for no gate.
      dt_bias: [C], of any of these dtypes; None for zeros.
      initial_state: [B, C, N], of any of these dtypes; None for zeros.
      dt_softplus: True for Δ = softplus(dt + dt_bias).
      segment_ids: [B, T], integers: packed sequences, each a run of one number, which may come again: 1 1 2 1 are
        three. The state begins anew with each run; the first one continues `initial_state`, and the last state is that
        of the last one, also if it is padding. A NaN or an infinity of a sequence may make NaN of others, as
        tokens of others are multiplied by 0. None for one sequence.
      target: lower for this target's blocks, e.g. "cpu:xla".
      block_t: tokens of a chunk, instead of the schedule's; no block changes the result beyond rounding.
      block_c: channels of a program.

    Returns:
      out[B, T, C] in the dtype of x, and the state behind the last token, [B, C, N], in float32 (float64 for float64):
      the `initial_state` of the tokens that follow.

    Raises:
      tilekern.errors.ArgumentError: shapes or dtypes do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.selective_scan import selective_scan
      >>> ones = jnp.ones((1, 3, 1))
      >>> out, state = selective_scan(ones, ones, jnp.log(jnp.array([[0.5, 0.25]])), *jnp.ones((2, 1, 3, 2)))
      >>> out.ravel()
      Array([2.    , 2.75  , 3.0625], dtype=float32)
    """
    _check(x, dt, a, b, c, d, z, dt_bias, initial_state, segment_ids)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    if 0 in x.shape:
        zeros = jnp.zeros((x.shape[0], *a.shape), wide)
        return jnp.zeros_like(x), zeros if initial_state is None else initial_state.astype(wide)
    return selective_scan_forward(
        x, dt, a, b, c, d, z, dt_bias, initial_state, as_runs(segment_ids),
        dt_softplus=bool(dt_softplus), target=target, block_t=block_t, block_c=block_c,
    )  # fmt: skip


def _check(
    x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any, z: Any, dt_bias: Any, initial_state: Any, segment_ids: Any
) -> None:
    optional = {"d": d, "z": z, "dt_bias": dt_bias, "initial_state": initial_state}
    present = {name: array for name, array in optional.items() if array is not None}
    named = {"x": x, "dt": dt, "a": a, "b": b, "c": c, **present}
    fits = all(map(is_float, named.values())) and x.ndim == 3 and a.ndim == 2 and a.shape[1] > 0
    if fits:
        batch, tokens, channels = x.shape
        of_tokens, of_channels = (batch, tokens, a.shape[1]), (channels,)
        shapes = {"dt": x.shape, "a": (channels, a.shape[1]), "b": of_tokens, "c": of_tokens, "d": of_channels}
        shapes |= {"z": x.shape, "dt_bias": of_channels, "initial_state": (batch, *a.shape)}
        fits = all(named[name].shape == shape for name, shape in shapes.items() if name in named)
        fits = fits and (segment_ids is None or (is_integer(segment_ids) and segment_ids.shape == (batch, tokens)))
    require(
        fits,
        "selective_scan",
        expected="x[B, T, C], dt[B, T, C], a[C, N] with N > 0, b[B, T, N], c[B, T, N], and each None or d[C], "
        "z[B, T, C], dt_bias[C], initial_state[B, C, N], of float dtypes of at least 16 bits, "
        "segment_ids[B, T] of integers or None",
        fix="channels come last: use swapaxes(1, 2) for Mamba's [B, C, T]; cast with .astype",
        **named,
        **({} if segment_ids is None else {"segment_ids": segment_ids}),
    )
