"""The attention function that layers of Flax take: `nnx.MultiHeadAttention(attention_fn=attention_fn)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tilekern.authoring import array_of, hide_frames, takes_python_numbers
from tilekern.kernels.checks import is_float, refusal
from tilekern.kernels.flash_attention import flash_attention
from tilekern.nn.dropout import dropout
from tilekern.nn.promotion import algorithm_of, promoted

hide_frames(__file__)


@takes_python_numbers
def attention_fn(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    promote_dtype: Callable[..., Any] | None = None,
    is_causal: bool = False,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., Any] | None = None,
    qk_attn_weights_einsum: Callable[..., Any] | None = None,
    attn_weights_value_einsum: Callable[..., Any] | None = None,
) -> jax.Array:
    """Attention with the arguments of Flax' `dot_product_attention`, of NNX and of Linen, by `flash_attention`.

    `nnx.MultiHeadAttention(..., attention_fn=attention_fn)` and
    `linen.MultiHeadDotProductAttention(..., attention_fn=attention_fn)` pass their options to it. Each is honoured, or
    refused by its name. Softmax and sums are in float32 (float64 for float64), and no weights are in memory.

    Different from Flax: a query that attends to no key is 0, where Flax has the mean of all values; and other weights
    are dropped than Flax drops for the same key, by the same rule.

    Args:
      query: [*B, T, N, H].
      key: [*B, S, K, H]; K divides N, and head n reads key head n // (N / K).
      value: [*B, S, K, Hv].
      bias: numbers that broadcast to the scores [*B, N, T, S], and are added to them.
      mask: of any dtype and such a shape: a query attends to a key where the mask is not 0.
      broadcast_dropout: True drops the same pairs of query and key in all heads and elements of the batch.
      dropout_rng: a key of `jax.random`, of any kind; needed where weights are dropped.
      dropout_rate: the share of weights that become 0, a static number from 0 to 1. All other weights are divided by
        1 - dropout_rate.
      deterministic: True drops nothing.
      dtype: of the computation and the result; None: what query, key and value promote to.
      precision: of products of float32, as JAX has it. `jax.lax.Precision` says how exact products are at least: all of
        them multiply as float32 here. A `jax.lax.DotAlgorithmPreset` allows a backend its algorithm.
      module: None. Where a layer has `sow_weights=True`, Flax passes the layer.
      promote_dtype: called with ((query, key, value), dtype=dtype) in the place of the promotion above.
      is_causal: query i attends to the keys j <= i.
      force_fp32_for_softmax: of no effect: the softmax is in float32 at least.
      einsum_dot_general: None.
      qk_attn_weights_einsum: None.
      attn_weights_value_einsum: None.

    Returns:
      out[*B, T, N, Hv].

    Raises:
      tilekern.errors.ArgumentError: shapes, dtypes or options do not fit, or an option needs the matrix of weights.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.nn import attention_fn
      >>> q, mask = jnp.ones((2, 5, 4, 8)), jnp.tril(jnp.ones((5, 5)))
      >>> attention_fn(q, q, q, mask=mask, dropout_rate=0.1, dropout_rng=jax.random.key(0)).shape
      (2, 5, 4, 8)
    """
    _refuse_weights(
        module=module,
        einsum_dot_general=einsum_dot_general,
        qk_attn_weights_einsum=qk_attn_weights_einsum,
        attn_weights_value_einsum=attn_weights_value_einsum,
    )
    promote = promoted if promote_dtype is None else promote_dtype
    q, k, v = map(array_of, promote((query, key, value), dtype=dtype))
    return flash_attention(
        q,
        k,
        v,
        None if bias is None else _like_scores("bias", bias, q, k),
        None if mask is None else _like_scores("mask", mask, q, k),
        causal=is_causal,
        precision=algorithm_of("attention_fn", precision),
        **dropout("attention_fn", dropout_rate, dropout_rng, broadcast_dropout, deterministic),
    )


def _refuse_weights(**options: Any) -> None:
    """Refuse options with which Flax computes, or keeps, the matrix of weights by other means."""
    for name, value in options.items():
        if value is None:
            continue
        fix = "sow_weights=False" if name == "module" else "leave it out"
        raise refusal(
            "attention_fn",
            name,
            f"{name} = None: the matrix of weights is never in memory",
            value,
            f"{fix}, or take the attention function of Flax where weights are looked at",
        )


def _like_scores(name: str, argument: Any, query: jax.Array, key: jax.Array) -> jax.Array:
    """A bias of floats, or a mask of bools, with the dims [*B, N, T, S]: all of *B whole, or all of size 1."""
    batch = query.shape[:-3]
    scores = (*batch, query.shape[-2], query.shape[-3], key.shape[-3])
    array = jnp.asarray(argument)
    array = array.reshape((1,) * (len(scores) - array.ndim) + array.shape)
    fits = len(array.shape) == len(scores) and all(n in (1, m) for n, m in zip(array.shape, scores, strict=True))
    if not fits or jnp.issubdtype(array.dtype, jnp.complexfloating):
        expected = f"numbers that broadcast to {list(scores)}"
        raise refusal("attention_fn", name, expected, argument, "the order is batch, heads, queries, keys")
    if any(n != 1 for n in array.shape[: len(batch)]):
        array = jnp.broadcast_to(array, (*batch, *array.shape[len(batch) :]))
    if name == "mask":
        return array != 0
    return array if is_float(array) else array.astype(jnp.float32)
