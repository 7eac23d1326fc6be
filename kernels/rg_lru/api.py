"""The public function: checks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tilekern.authoring import hide_frames, takes_python_numbers
from tilekern.errors import ArgumentError
from tilekern.kernels.checks import as_real, is_float, is_integer, require
from tilekern.kernels.conventions import renamed
from tilekern.kernels.recurrences import as_runs
from tilekern.kernels.rg_lru.kernel import rg_lru_forward

hide_frames(__file__)


@renamed(c="exponent")
@takes_python_numbers
def rg_lru(
    x: jax.Array,
    input_gate: jax.Array,
    recurrence_gate: jax.Array,
    a_param: jax.Array,
    initial_state: jax.Array | None = None,
    *,
    segment_ids: jax.Array | None = None,
    exponent: float = 8.0,
    scale_first: bool = True,
    target: str | None = None,
    block_t: int | None = None,
    block_c: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """h_t = a_t h_{t-1} + sqrt(1 - a_t²) σ(input_gate_t) x_t, channel by channel; the result is (h, last state).

    a_t = exp(-exponent softplus(a_param) σ(recurrence_gate_t)), and σ is the sigmoid: the real-gated linear recurrent
    unit of Griffin (De et al. 2024, https://arxiv.org/abs/2402.19427, equations 1 to 4). sqrt(1 - a²) comes from
    expm1, so decays near 1 keep their digits. States, decays and sums are in float32 (float64 for float64). One step of
    decoding is a call with one token and the state of the call before.

    Derivatives of any order and mode are derived kernels. The backward pass computes the states of the chunks again,
    B · ⌈T / block_t⌉ · C numbers, and keeps the inputs alone between the passes. Where a is 1 in floating point, the
    derivatives by its gate and parameter are 0, their limit.

    Args:
      x: [B, T, C], float32, bfloat16, float16 or float64.
      input_gate: [B, T, C], before the sigmoid, of any dtype that x may have.
      recurrence_gate: like input_gate.
      a_param: [C], of any dtype that x may have: the Λ of equation 3, so that decays are in [0, 1] for any value.
      initial_state: [B, C], of any dtype that x may have; None for zeros.
      segment_ids: [B, T], integers: packed sequences, each a run of one number, which may come again: 1 1 2 1 are
        three. The state begins anew with each run; the first one continues `initial_state`, and the last state is that
        of the last one, also if it is padding. A NaN or an infinity of a sequence may make NaN of others, as
        tokens of others are multiplied by 0. None for one sequence.
      exponent: the constant c of equation 3, positive.
      scale_first: True: the first token of a sequence is multiplied by sqrt(1 - a²), as in the paper. False is as in
        RecurrentGemma's code, https://github.com/google-deepmind/recurrentgemma. With an `initial_state` the first
        token of x is not the first of its sequence.
      target: lower for this target's blocks, e.g. "cpu:xla".
      block_t: tokens of a chunk, instead of the schedule's; no block changes the result beyond rounding.
      block_c: channels of a program.

    Returns:
      h[B, T, C] in the dtype of x, and the state behind the last token, [B, C], in float32 (float64 for float64): the
      `initial_state` of the tokens that follow.

    Raises:
      tilekern.errors.ArgumentError: shapes or dtypes do not fit, or the exponent is not positive.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.rg_lru import rg_lru
      >>> gate = jnp.zeros((1, 2, 1))
      >>> h, state = rg_lru(jnp.ones((1, 2, 1)), gate, gate, jnp.array([-1.0]))
      >>> print(*(f"{x:.3f}" for x in h.ravel()))
      0.479 0.616
    """
    _check(x, input_gate, recurrence_gate, a_param, initial_state, segment_ids)
    number = as_real(exponent)
    if number is None or not 0 < number < float("inf"):
        raise ArgumentError(
            "decays of rg_lru would be above 1",
            expected="a positive number",
            got=f"exponent = {exponent!r}",
            fix="leave it out for the 8 of the paper",
        )
    wide = jnp.promote_types(x.dtype, jnp.float32)
    if 0 in x.shape:
        zeros = jnp.zeros((x.shape[0], x.shape[2]), wide)
        return jnp.zeros_like(x), zeros if initial_state is None else initial_state.astype(wide)
    return rg_lru_forward(
        x, input_gate, recurrence_gate, a_param, initial_state, as_runs(segment_ids),
        exponent=number, scale_first=bool(scale_first), target=target, block_t=block_t, block_c=block_c,
    )  # fmt: skip


def _check(x: Any, input_gate: Any, recurrence_gate: Any, a_param: Any, initial_state: Any, segment_ids: Any) -> None:
    arrays = {"x": x, "input_gate": input_gate, "recurrence_gate": recurrence_gate, "a_param": a_param}
    named = arrays if initial_state is None else arrays | {"initial_state": initial_state}
    fits = all(map(is_float, named.values())) and x.ndim == 3
    fits = fits and x.shape == input_gate.shape == recurrence_gate.shape and a_param.shape == x.shape[2:]
    fits = fits and (initial_state is None or initial_state.shape == (x.shape[0], x.shape[2]))
    fits = fits and (segment_ids is None or (is_integer(segment_ids) and segment_ids.shape == x.shape[:2]))
    require(
        fits,
        "rg_lru",
        expected="x[B, T, C], input_gate[B, T, C], recurrence_gate[B, T, C], a_param[C], initial_state[B, C] or None, "
        "of float dtypes of at least 16 bits, segment_ids[B, T] of integers or None",
        fix="channels come last: reshape heads into them; cast with .astype",
        **named,
        **({} if segment_ids is None else {"segment_ids": segment_ids}),
    )
