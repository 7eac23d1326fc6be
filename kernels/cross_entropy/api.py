"""The public function: checks, defaults, and leading dims."""

from __future__ import annotations

import math
import numbers
from functools import partial
from typing import Any, Literal, overload

import jax

from tilekern.authoring import hide_frames, takes_python_numbers
from tilekern.kernels.checks import as_int32, as_rows, is_float, is_integer, lies_in, refusal, require
from tilekern.kernels.cross_entropy.kernel import cross_entropy_forward

hide_frames(__file__)

_refusal = partial(refusal, "cross_entropy")


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
    temperature: float = 1.0,
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
    temperature: float = 1.0,
    return_logsumexp: Literal[True],
    target: str | None = None,
    block_t: int | None = None,
    block_v: int | None = None,
    block_d: int | None = None,
) -> tuple[jax.Array, jax.Array]: ...
@takes_python_numbers
def cross_entropy(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    temperature: float = 1.0,
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
      ignore_index: the loss of tokens with this label is 0; an int between the ends of int32.
      label_smoothing: ε in [0, 1]: the target is (1 - ε) the label and ε the uniform distribution.
      softcap: if given, logits become softcap * tanh(logits / softcap) first; from 1e-30 to 1e30.
      z_loss: factor z of the term z logsumexp² of the loss (PaLM, https://arxiv.org/abs/2204.02311, section 5: 1e-4).
      temperature: logits are divided by it, after the softcap; from 1e-30 to 1e30.
      return_logsumexp: return (loss, logsumexp).
      target: lower for this target's blocks, e.g. "cpu:xla".
      block_t: tokens of a tile, instead of the schedule's; no block changes the result beyond rounding.
      block_v: words of the vocabulary in a tile.
      block_d: elements of the inner dim in a tile.

    Returns:
      loss[*B], not averaged over tokens. With `return_logsumexp` also the logsumexp of the logits, [*B].

    Under differentiation, the loss of a token is a constant if its label is ignored or no word. `loss` and `logsumexp`
    have the names "cross_entropy_loss" and "cross_entropy_logsumexp" for the policies of `jax.checkpoint`: saving both
    avoids a second forward pass.

    Raises:
      tilekern.errors.ArgumentError: shapes, dtypes or static arguments do not fit.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from tilekern.kernels.cross_entropy import cross_entropy
      >>> hidden, weight = jnp.ones((3, 8)), jnp.zeros((8, 1000))
      >>> cross_entropy(hidden, weight, jnp.array([7, 999, -100]))  # ln 1000
      Array([6.9077554, 6.9077554, 0.       ], dtype=float32)
      >>> jax.grad(lambda w: cross_entropy(hidden, w, jnp.array([7, 999, -100]), z_loss=1e-4).mean())(weight).shape
      (8, 1000)
    """
    check_arrays("cross_entropy", hidden, weight, labels)
    check_options(ignore_index, label_smoothing, softcap, z_loss, temperature)
    batch = labels.shape
    loss, logsumexp = cross_entropy_forward(
        as_rows(hidden),
        weight,
        # A label that becomes an end of int32 is neither a word nor ignored.
        as_int32(labels.reshape(math.prod(batch))),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        z_loss=z_loss,
        temperature=temperature,
        target=target,
        block_t=block_t,
        block_v=block_v,
        block_d=block_d,
    )
    return (loss.reshape(batch), logsumexp.reshape(batch)) if return_logsumexp else loss.reshape(batch)


def check_arrays(function: str, hidden: Any, weight: Any, labels: Any) -> None:
    """Refuse arrays that are no operands of `cross_entropy`."""
    fits = is_float(hidden) and is_float(weight) and is_integer(labels) and hidden.dtype == weight.dtype
    fits = fits and hidden.ndim > 0 and weight.ndim == 2
    require(
        fits and hidden.shape[-1] == weight.shape[0] and hidden.shape[:-1] == labels.shape,
        function,
        expected="hidden[*B, D] and weight[D, V] of one float dtype of at least 16 bits, integer labels[*B]",
        fix="labels are class numbers, not one-hot; cast with .astype",
        hidden=hidden,
        weight=weight,
        labels=labels,
    )


def check_options(ignore_index: Any, label_smoothing: Any, softcap: Any, z_loss: Any, temperature: Any) -> None:
    """Refuse values with which the kernel cannot compute.

    A label beyond int32 becomes an end of int32, so neither end can be the ignored label. In float32 the quotient
    logit / softcap loses at most 2⁻¹²⁶ (subnormals may be 0): 1e-8 after multiplication by a softcap of 1e30.
    """
    index = type(ignore_index) is not bool and isinstance(ignore_index, numbers.Integral)
    if not index or not -(2**31) < int(ignore_index) < 2**31 - 1:
        raise _refusal("ignore_index", "an int with |ignore_index| < 2³¹ - 1", ignore_index, "-100 is usual")
    if softcap is not None and not lies_in(softcap, 1e-30, 1e30):
        fix = "leave it out: the logits would stay as they are" if softcap == math.inf else "None caps nothing"
        raise _refusal("softcap", "a number from 1e-30 to 1e30, or None", softcap, fix)
    if not lies_in(label_smoothing, 0, 1):
        raise _refusal("label_smoothing", "a number from 0 to 1", label_smoothing, "leave it out for the plain loss")
    if not lies_in(z_loss, -1e30, 1e30):
        raise _refusal("z_loss", "a number from -1e30 to 1e30", z_loss, "leave it out for the plain loss")
    if not lies_in(temperature, 1e-30, 1e30):
        raise _refusal("temperature", "a number from 1e-30 to 1e30", temperature, "1 leaves the logits as they are")
