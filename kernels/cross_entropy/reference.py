"""The definition of cross entropy, in plain jnp, with the whole logit matrix."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp


def reference(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    temperature: float = 1.0,
    vocabulary: int | None = None,
    return_logsumexp: bool = False,
    dtype: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """loss[*B] of the logits hidden[*B, D] @ weight[D, V]; with `return_logsumexp` also their logsumexp[*B].

    Computed in `dtype`; None: float32, or float64 for float64 inputs. A label outside [0, V) gives NaN, but
    `ignore_index` gives 0. With `vocabulary`, the size of a vocabulary of which `weight` is a part, the loss is the
    part's share of -Σ target logits, and no label is out of range or ignored.
    """
    out = jnp.promote_types(hidden.dtype, jnp.float32)
    wide = dtype or out
    logits = jnp.matmul(hidden.astype(wide), weight.astype(wide), precision=jax.lax.Precision.HIGHEST)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    logits = logits / temperature
    logsumexp = jax.nn.logsumexp(logits, axis=-1)
    target = jax.nn.one_hot(labels, weight.shape[1], dtype=jnp.bool_)
    picked = jnp.sum(logits, axis=-1, where=target)
    loss = -(1 - label_smoothing) * picked
    # A term with a factor of 0 is left out, because 0 * inf is NaN.
    on_each = label_smoothing / (vocabulary or weight.shape[1])
    loss = jnp.where(label_smoothing == 0, loss, loss - on_each * jnp.sum(logits, axis=-1))
    if vocabulary is not None:
        return (loss.astype(out), logsumexp.astype(out)) if return_logsumexp else loss.astype(out)
    loss = loss + logsumexp
    loss = jnp.where(z_loss == 0, loss, loss + z_loss * logsumexp**2)
    loss = jnp.where(target.any(axis=-1), loss, jnp.nan)
    loss = jnp.where(labels == ignore_index, 0, loss).astype(out)
    return (loss, logsumexp.astype(out)) if return_logsumexp else loss


def reference_with_logsumexp(*arrays: Any, **keywords: Any) -> tuple[jax.Array, jax.Array]:
    """`reference` with its second result, for arrays and keywords as of `reference`."""
    return cast("tuple[jax.Array, jax.Array]", reference(*arrays, return_logsumexp=True, **keywords))
