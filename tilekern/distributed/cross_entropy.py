"""Cross entropy where several devices hold parts of the vocabulary.

Each device computes the logsumexp of its own logits, and its share of -Σ target logits. Two sums and a maximum of a
number for each token make the loss of the whole vocabulary; the gradient of a device's weight stays on the device.
Source: Shoeybi et al., Megatron-LM, https://arxiv.org/abs/1909.08053, section 3.
"""

from __future__ import annotations

import math
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from tilekern.authoring import hide_frames, takes_python_numbers
from tilekern.distributed.axes import axis_size
from tilekern.kernels.checks import as_int32, as_rows
from tilekern.kernels.cross_entropy.api import check_arrays, check_options
from tilekern.kernels.cross_entropy.kernel import cross_entropy_forward

hide_frames(__file__)


@takes_python_numbers
def vocab_parallel_cross_entropy(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    axis_name: str,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    temperature: float = 1.0,
    return_logsumexp: bool = False,
    target: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`cross_entropy` inside of `jax.shard_map`, where each device of an axis holds some words of the vocabulary.

    Neither the logits nor the whole weight is in the memory of a device. Devices exchange three float32 numbers for
    each token, and in the backward pass the cotangents of hidden. Derivatives of any order, in both modes.

    Args:
      hidden: [*B, D], the same on all devices of the axis: float32, bfloat16, float16 or float64.
      weight: [D, V / n] of the same dtype, this device's part of the V words: device i of n begins at word i V / n.
      labels: integers [*B] in [0, V), or `ignore_index`; the same on all devices. Any other label makes its loss NaN.
      axis_name: the mesh axis that divides the vocabulary, over n devices.
      ignore_index: as of `cross_entropy`.
      label_smoothing: as of `cross_entropy`; over all V words.
      softcap: as of `cross_entropy`.
      z_loss: as of `cross_entropy`.
      temperature: as of `cross_entropy`.
      return_logsumexp: return (loss, logsumexp).
      target: lower for this target's blocks, e.g. "cpu:xla".

    Returns:
      loss[*B] of the whole vocabulary, in float32 (float64 for float64 inputs), the same on all devices. With
      `return_logsumexp` also the logsumexp of all logits.

    Raises:
      tilekern.errors.ArgumentError: shapes, dtypes or static arguments do not fit, or the axis is unknown.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> from tilekern.distributed import vocab_parallel_cross_entropy
      >>> mesh = jax.make_mesh((1,), ("model",), (AxisType.Auto,), devices=jax.devices()[:1])
      >>> local = lambda *arrays: vocab_parallel_cross_entropy(*arrays, axis_name="model")
      >>> loss = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(None, "model"), P()), out_specs=P())
      >>> loss(jnp.ones((2, 8)), jnp.zeros((8, 1000)), jnp.array([7, -100]))
      Array([6.9077554, 0.       ], dtype=float32)
    """
    devices = axis_size(axis_name, "vocab_parallel_cross_entropy")
    check_arrays("vocab_parallel_cross_entropy", hidden, weight, labels)
    check_options(ignore_index, label_smoothing, softcap, z_loss, temperature)
    batch, words = labels.shape, weight.shape[1]
    # A label that becomes an end of int32 is neither a word nor ignored, nor a word of this device.
    label = as_int32(labels.reshape(math.prod(batch)))
    first = lax.axis_index(axis_name) * words
    here = (label >= first) & (label < first + words)
    share, part = cross_entropy_forward(
        as_rows(hidden),
        weight,
        jnp.where(here, label - first, -1),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        z_loss=0.0,
        temperature=temperature,
        vocabulary=devices * words,
        target=target,
    )
    most = cast(jax.Array, lax.pmax(lax.stop_gradient(part), axis_name))
    most = jnp.where(jnp.abs(most) == jnp.inf, 0, most)
    logsumexp = most + jnp.log(cast(jax.Array, lax.psum(jnp.exp(part - most), axis_name)))
    loss = logsumexp + cast(jax.Array, lax.psum(share, axis_name))
    if z_loss:
        loss = loss + z_loss * logsumexp * logsumexp
    is_word = (label >= 0) & (label < devices * words)
    loss = jnp.where(label == ignore_index, 0, jnp.where(is_word, loss, jnp.nan))
    return (loss.reshape(batch), logsumexp.reshape(batch)) if return_logsumexp else loss.reshape(batch)
