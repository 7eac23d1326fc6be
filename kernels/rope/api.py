"""The public function: checks, frequencies, and leading dims."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tilekern as tk
from tilekern.authoring import describe, hide_frames, takes_python_numbers
from tilekern.errors import ArgumentError
from tilekern.kernels.checks import as_real, is_float, is_integer, narrowed, require
from tilekern.kernels.rope.kernel import rope_forward

hide_frames(__file__)


@takes_python_numbers
def rope(
    x: jax.Array,
    positions: jax.Array | None = None,
    *,
    theta: float = 10000.0,
    frequencies: jax.Array | None = None,
    interleaved: bool = False,
    target: str | None = None,
    block_t: int | None = None,
    block_n: int | None = None,
) -> jax.Array:
    """Rotary position embedding: pair j of each head is rotated by the angle position * frequencies[j].

    Angles, cos and sin are computed in float32 inside of the kernel (float64 for float64). Source: RoFormer, Su et al.
    2021, https://arxiv.org/abs/2104.09864, equations 14 and 15.

    Args:
      x: [*B, T, N, H], H even: float32, bfloat16, float16 or float64.
      positions: integers [T] or [*B, T], of any dtype; None for 0, 1, ..., T - 1. A position is rounded to the dtype of
        the angles.
      theta: the base, a static number above 0; frequencies[j] = theta ** (-2 j / H).
      frequencies: [H / 2], radians per position, instead of powers of theta: for scaled variants, e.g. Llama 3.1's.
      interleaved: pair the elements 2j and 2j + 1 (RoFormer, GPT-J); if False, j and j + H / 2 (GPT-NeoX, Hugging
        Face's Llama).
      target: lower for this target's blocks, e.g. "cpu:xla".
      block_t: positions of a tile, instead of the schedule's; no block changes the result.
      block_n: heads of a tile.

    Returns:
      An array like x.

    Raises:
      tilekern.errors.ArgumentError: shapes or dtypes do not fit, or theta is no base.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.rope import rope
      >>> x = jnp.array([1.0, 0.0]).reshape(1, 1, 2)
      >>> rope(x, jnp.array([1])).ravel().round(4)  # cos 1, sin 1
      Array([0.5403, 0.8415], dtype=float32)
    """
    check_rope(x, positions, frequencies, "rope")
    positions, frequencies = angle_inputs(x, positions, frequencies, theta)
    out = rope_forward(
        x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:]),
        positions,
        frequencies,
        interleaved=interleaved,
        target=target,
        block_t=block_t,
        block_n=block_n,
    )
    return out.reshape(x.shape)


def angle_inputs(x: Any, positions: Any, frequencies: Any, theta: Any) -> tuple[jax.Array | None, jax.Array]:
    """positions[B, T] or None, and frequencies[H / 2], for the kernel."""
    *batch, length, _, width = x.shape
    if frequencies is None:
        frequencies = jnp.asarray(_frequencies(theta, width // 2, tk.accumulator(x.dtype)))
    if positions is not None:
        positions = jnp.broadcast_to(_exact(positions, tk.accumulator(x.dtype)), (*batch, length))
        positions = positions.reshape(math.prod(batch), length)
    return positions, frequencies


def _frequencies(theta: Any, half: int, dtype: Any) -> np.ndarray[Any, Any]:
    """The frequencies [half] of a base, rounded once from float64: an error of ε is p ε in the angle at position p."""
    number = None if type(theta) is bool else as_real(theta)
    base = math.nan if number is None else number
    with np.errstate(all="ignore"):
        frequencies = (np.float64(base) ** (-np.arange(half) / max(half, 1))).astype(dtype)
    if 0 < base < math.inf and np.isfinite(frequencies).all():
        return frequencies
    raise ArgumentError(
        "the theta of rope is not a base of frequencies",
        expected=f"a static number above 0 of which theta ** (-2 j / H) is finite in {np.dtype(dtype)}",
        got=f"theta = {describe(theta)}",
        fix="leave it out for 10000; give frequencies[H / 2] in its place where it is traced",
    )


def _exact(positions: Any, dtype: Any) -> jax.Array:
    """Positions as int32 if int32 holds them for certain, else in `dtype`, the float of the angles."""
    integers = narrowed(positions)
    return jnp.asarray(integers if integers.dtype == np.int32 else integers.astype(dtype))


def check_rope(x: Any, positions: Any, frequencies: Any, function: str) -> None:
    """Raise unless the arrays of `rope`, or of a function like it, fit."""
    fits = is_float(x) and x.ndim >= 3 and x.shape[-1] % 2 == 0
    if fits and positions is not None:
        fits = is_integer(positions) and positions.shape in (x.shape[-3:-2], x.shape[:-2])
    if fits and frequencies is not None:
        fits = is_float(frequencies) and frequencies.shape == (x.shape[-1] // 2,)
    require(
        fits,
        function,
        expected="x[*B, T, N, H] of a float dtype of at least 16 bits, H even, integer positions[T] or [*B, T] or "
        "None, float frequencies[H / 2] or None",
        fix="the layout is batch, time, heads, width; cast with .astype",
        x=x,
        positions=positions,
        frequencies=frequencies,
    )
