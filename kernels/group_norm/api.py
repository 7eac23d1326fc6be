"""The public function: checks, and dims made three."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from tilekern.authoring import describe, hide_frames, takes_python_numbers
from tilekern.errors import ArgumentError
from tilekern.kernels.checks import is_float, require
from tilekern.kernels.group_norm.kernel import group_norm_forward
from tilekern.kernels.group_norm.parts import group_norm_parts_forward

hide_frames(__file__)

# Bytes of a sample up to which a program computes whole groups. The vector memory of a TPU then holds all channels of
# the sample and of its result, and the next sample's.
ONE_PROGRAM = 8 << 20


@takes_python_numbers
def group_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    num_groups: int | None = None,
    group_size: int | None = None,
    batch_dims: int = 1,
    eps: float = 1e-6,
    activation: str | None = None,
    target: str | None = None,
    block_s: int | None = None,
    block_g: int | None = None,
) -> jax.Array:
    """activation((x - mean) / √(var + eps) * weight + bias) with the mean and var of each sample's groups of channels.

    Source: Wu and He 2018, https://arxiv.org/abs/1803.08494, equations 1 to 7; var is the mean of (x - mean)² over all
    positions of a sample and the channels of a group. One group for each channel is instance norm, one group in all
    layer norm over positions and channels. As `flax.linen.GroupNorm`, whose `scale` is the weight. Computed in float32
    (float64 for float64).

    A sample of at most 8 MiB is read once where a program's share of it fits the registers, the cache or the vector
    memory. Of larger samples, unless a mesh divides x by its type, many programs compute parts: x is read twice.

    Args:
      x: [*B, *S, C], float32, bfloat16, float16 or float64; any number of dims S of positions.
      weight: [C] of any dtype that x may have; None for ones.
      bias: [C] of any dtype that x may have; None for zeros.
      num_groups: G, which divides C; 32 if `group_size` is None, too.
      group_size: channels of a group, in the place of `num_groups`.
      batch_dims: the number of dims in B; the dims between B and the last are positions.
      eps: added to the variance.
      activation: "silu" for z / (1 + exp(-z)) of the result, or None.
      target: lower for this target's blocks, e.g. "cpu:xla".
      block_s: positions of a tile, instead of the schedule's; no block changes the result beyond rounding.
      block_g: groups of a program.

    Returns:
      An array like x.

    Raises:
      tilekern.errors.ArgumentError: shapes, dtypes, groups or the activation do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.group_norm import group_norm
      >>> x = jnp.array([[[1.0, 3.0, 0.0, 8.0]]])  # one sample of one position
      >>> group_norm(x, num_groups=2, eps=0.0)
      Array([[[-1.,  1., -1.,  1.]]], dtype=float32)
    """
    _check(x, weight, bias, batch_dims, activation)
    size = _size(x.shape[-1], num_groups, group_size)
    if x.size == 0:
        return jnp.zeros(x.shape, x.dtype)
    flat = x.reshape(math.prod(x.shape[:batch_dims]), math.prod(x.shape[batch_dims:-1]), x.shape[-1])
    keywords: dict[str, Any] = {"size": size, "eps": eps, "activation": activation, "target": target}
    sample = math.prod(flat.shape[1:]) * flat.dtype.itemsize
    if sample <= ONE_PROGRAM:
        out = group_norm_forward(flat, weight, bias, **keywords, block_s=block_s, block_g=block_g)
    else:
        out = group_norm_parts_forward(flat, weight, bias, **keywords, block_s=block_s)
    return out.reshape(x.shape)


def _check(x: Any, weight: Any, bias: Any, batch_dims: Any, activation: Any) -> None:
    fits = is_float(x) and x.ndim > 0
    fits = fits and all(v is None or (is_float(v) and v.shape == x.shape[-1:]) for v in (weight, bias))
    require(
        fits,
        "group_norm",
        expected="x[*B, *S, C], weight[C] and bias[C] (or None), of float dtypes of at least 16 bits",
        fix="channels come last: move them there; cast with .astype",
        x=x,
        weight=weight,
        bias=bias,
    )
    if type(batch_dims) is not int or not 0 <= batch_dims < x.ndim:
        raise ArgumentError(
            "group_norm has no such number of batch dims",
            expected=f"an int from 0 to {x.ndim - 1}, for the channels are no batch",
            got=f"batch_dims = {batch_dims!r}, x = {describe(x)}",
            fix="leave it out if the first dim is the only batch dim; give 0 for a single sample",
        )
    if activation not in ("silu", None):
        raise ArgumentError(
            "group_norm has no such activation",
            expected='"silu" or None',
            got=f"activation = {activation!r}",
            fix="apply other functions to the result",
        )


def _size(channels: int, num_groups: Any, group_size: Any) -> int:
    """Channels of a group."""
    divisor = num_groups if group_size is None else group_size
    divisor = 32 if divisor is None else divisor
    one_is_none = num_groups is None or group_size is None
    if one_is_none and type(divisor) is int and divisor > 0 and channels % divisor == 0:
        return channels // divisor if group_size is None else divisor
    raise ArgumentError(
        "the groups of group_norm do not fit the channels",
        expected=f"num_groups or group_size, not both, a divisor of the {channels} channels",
        got=f"num_groups = {num_groups!r}, group_size = {group_size!r}",
        fix="num_groups is 32 if neither is given; for instance norm give group_size=1, for one group num_groups=1",
    )
