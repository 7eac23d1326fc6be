"""The public function: checks, defaults, and leading dims."""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from tilekern.errors import ArgumentError
from tilekern.kernels.api import as_rows, is_float, is_integer, require
from tilekern.kernels.cross_entropy.kernel import cross_entropy_forward


@overload
def cross_entropy(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    return_logsumexp: Literal[False] = False,
    target: str | None = None,
    block_t: int | None = None,
    block_v: int | None = None,
    block_d: int | None = None,
) -> jax.Array: ...
@overload
def cross_entropy(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    return_logsumexp: Literal[True],
    target: str | None = None,
    block_t: int | None = None,
    block_v: int | None = None,
    block_d: int | None = None,
) -> tuple[jax.Array, jax.Array]: ...
def cross_entropy(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    return_logsumexp: bool = False,
    target: str | None = None,
    block_t: int | None = None,
    block_v: int | None = None,
    block_d: int | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """The cross entropy of each token's logits, hidden @ weight, with its label; the logits are never in memory.

    loss = logsumexp - logit[label], natural logarithms, in float32 (float64 for float64 inputs).

    Args:
      hidden: [*B, D], float32, bfloat16, float16 or float64.
      weight: [D, V] of the same dtype, V the size of the vocabulary.
      labels: integers [*B] in [0, V), or `ignore_index`. Any other label makes its loss NaN.
      ignore_index: the loss of tokens with this label is 0.
      label_smoothing: ε in [0, 1]: the target is (1 - ε) the label and ε the uniform distribution.
      softcap: if given, logits become softcap * tanh(logits / softcap) first.
      z_loss: times logsumexp² is added to the loss (PaLM, https://arxiv.org/abs/2204.02311, section 5: 1e-4).
      return_logsumexp: return (loss, logsumexp).
      target: lower for this target's blocks, e.g. "cpu:xla".
      block_t: tokens of a tile, instead of the schedule's; no block changes the result beyond rounding.
      block_v: words of the vocabulary in a tile.
      block_d: elements of the inner dim in a tile.

    Returns:
      loss[*B]: one for each token, not averaged. With `return_logsumexp` also the logsumexp of the logits, [*B].

    Raises:
      tilekern.errors.ArgumentError: shapes, dtypes or static arguments do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.cross_entropy import cross_entropy
      >>> hidden, weight = jnp.ones((3, 8)), jnp.zeros((8, 1000))
      >>> cross_entropy(hidden, weight, jnp.array([7, 999, -100]))  # ln 1000
      Array([6.9077554, 6.9077554, 0.       ], dtype=float32)
    """
    _check(hidden, weight, labels, label_smoothing, softcap)
    batch = labels.shape
    limits, narrow = jnp.iinfo(labels.dtype), jnp.iinfo(jnp.int32)
    # No vocabulary reaches the ends of int32, so that a label of a wider dtype stays outside when it is clamped.
    flat = jnp.clip(labels.reshape(math.prod(batch)), max(limits.min, narrow.min), min(limits.max, narrow.max))
    loss, logsumexp = cross_entropy_forward(
        as_rows(hidden),
        weight,
        flat.astype(jnp.int32),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        z_loss=z_loss,
        target=target,
        block_t=block_t,
        block_v=block_v,
        block_d=block_d,
    )
    return (loss.reshape(batch), logsumexp.reshape(batch)) if return_logsumexp else loss.reshape(batch)


def _check(hidden: Any, weight: Any, labels: Any, label_smoothing: float, softcap: float | None) -> None:
    fits = is_float(hidden) and is_float(weight) and is_integer(labels) and hidden.dtype == weight.dtype
    fits = fits and hidden.ndim > 0 and weight.ndim == 2
    require(
        fits and hidden.shape[-1] == weight.shape[0] and hidden.shape[:-1] == labels.shape,
        "cross_entropy",
        expected="hidden[*B, D] and weight[D, V] of one float dtype of at least 16 bits, integer labels[*B]",
        fix="labels are class numbers, not one-hot; cast with .astype",
        hidden=hidden,
        weight=weight,
        labels=labels,
    )
    if not 0 <= label_smoothing <= 1 or (softcap is not None and not softcap > 0):
        raise ArgumentError(
            "label_smoothing or softcap of cross_entropy is out of range",
            expected="0 <= label_smoothing <= 1, softcap > 0 or None",
            got=f"label_smoothing = {label_smoothing}, softcap = {softcap}",
            fix="leave them out for the plain loss",
        )
