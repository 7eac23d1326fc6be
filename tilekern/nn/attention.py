"""`jax.nn.dot_product_attention` on flash attention."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any, Literal, TypedDict, Unpack, cast, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

import tilekern as tk
from tilekern.authoring import describe, is_traced, takes_python_numbers
from tilekern.errors import ArgumentError
from tilekern.kernels.checks import as_int32, is_float, refusal
from tilekern.kernels.flash_attention import flash_attention
from tilekern.nn.dropout import dropout

_refusal = partial(refusal, "dot_product_attention")
_IMPLEMENTATIONS = (None, "xla", "cudnn")


class Options(TypedDict, total=False):
    """The keyword arguments of `dot_product_attention` but `return_residual`, which decides the type of the result."""

    dropout_rate: float
    dropout_rng: ArrayLike | None
    broadcast_dropout: bool
    deterministic: bool
    scale: float | None
    is_causal: bool
    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    local_window_size: int | tuple[int, int] | None
    implementation: Literal["xla", "cudnn"] | None


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[False] = ...,
    **options: Unpack[Options],
) -> jax.Array: ...
@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[True],
    **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array]: ...
@takes_python_numbers
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
    dropout_rate: float = 0.0,
    dropout_rng: ArrayLike | None = None,
    broadcast_dropout: bool = True,
    deterministic: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`jax.nn.dot_product_attention` by `flash_attention`: same arguments, same results, no matrix of scores in memory.

    softmax(scale * query·key + bias) value for each head, with scores and softmax in float32, in float64 for float64
    inputs. Every derivative that JAX has works, in either mode.

    Different from jax.nn, whose results depend on a large negative number in the place of a mask, on elements behind
    the mask, or on the machine:

    - A query that attends to no key is 0, and so are its gradients; its residual is -inf. In jax.nn `query_seq_lengths`
      does the same to out, but other masks give the mean of all values, bias of -inf gives NaN, and the residual is
      about -2.4e38.
    - Keys and values from `key_value_seq_lengths` on, and queries from `query_seq_lengths` on, may be NaN or infinite.
    - float32 inputs multiply as float32 on every platform, whatever `jax.default_matmul_precision` says, and the
      softmax of float64 inputs is in float64.
    - Inputs are float32, bfloat16, float16 or float64. Bias and mask broadcast to the scores, never the scores to them.
    - Values may be wider or narrower than keys.
    - Weights can be dropped. Flax' Linen passes its layer's `dropout_rate` to each attention function that has such a
      parameter, and to any other function says nothing of it.

    Args:
      query: [B, T, N, H] or [T, N, H].
      key: [B, S, K, H] or [S, K, H] of the same dtype; K divides N, and head n reads key head n // (N / K).
      value: [B, S, K, Hv] or [S, K, Hv] of the same dtype.
      bias: numbers that are added to the scores [B, N, T, S]; leading dims may be absent, all dims may be of size 1.
      mask: bool of such a shape, True: attend.
      scale: of the dot products; H ** -0.5 if None. It may be traced, and differentiated.
      is_causal: query i attends to the keys j <= i.
      query_seq_lengths: int32[B] (B = 1 for inputs without batch): later queries attend to nothing.
      key_value_seq_lengths: int32[B]: nothing attends to later keys.
      local_window_size: (left, right): query i attends to i - left <= j <= i + right; an int is both. Negative numbers
        leave out the nearest keys: (8, -1) are the 8 before.
      implementation: None, "xla" or "cudnn", and of no effect: all are this kernel, on every platform, without the
        restrictions of cuDNN.
      return_residual: return (out, residual).
      dropout_rate: the share of weights that become 0, a static number from 0 to 1. All other weights are divided by
        1 - dropout_rate. The mean of many results is the result without dropout.
      dropout_rng: a key of `jax.random`, of any kind; needed where weights are dropped. Equal keys drop equal weights.
        They are not the weights that Flax' own function drops.
      broadcast_dropout: True drops the same pairs of query and key in all heads and elements of the batch.
      deterministic: True drops nothing.

    Returns:
      out[B, T, N, Hv] or [T, N, Hv] of the dtype of query. With `return_residual` also the logsumexp of the scores
      (natural logarithm), [B, T, N] or [T, N] in the dtype of the inputs, through which no gradient flows, as in
      jax.nn; the logsumexp of `flash_attention` is differentiable, and in float32.

    Raises:
      tilekern.errors.ArgumentError: where jax.nn raises a ValueError; this error is a ValueError, too.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.nn import dot_product_attention
      >>> q, k = jnp.ones((2, 100, 4, 32)), jnp.ones((2, 100, 2, 32))
      >>> dot_product_attention(q, k, k, is_causal=True, local_window_size=(16, 0)).shape
      (2, 100, 4, 32)
    """
    q, k, v = (_ranked(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    _check_arrays(q, k, v)
    if implementation not in _IMPLEMENTATIONS:
        raise _refusal("implementation", "None, 'xla' or 'cudnn'", implementation, "leave it out: all do the same")
    scores = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    q_lengths = _lengths("query_seq_lengths", query_seq_lengths, q.shape[0])
    kv_lengths = _lengths("key_value_seq_lengths", key_value_seq_lengths, q.shape[0])
    causal, offset, window = _positions(bool(is_causal), local_window_size)
    if window is not None and window[0] + window[1] < 0:
        window, kv_lengths = None, jnp.zeros(q.shape[0], jnp.int32)  # no key is in such a window
    factor, bias, score_mod = _scaled(scale, None if bias is None else _like_scores("bias", bias, scores), q)
    out, logsumexp = flash_attention(
        q,
        k,
        v,
        bias,
        None if mask is None else _like_scores("mask", mask, scores),
        scale=factor,
        causal=causal,
        q_offset=offset,
        window=window,
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
        score_mod=score_mod,
        return_logsumexp=True,
        **dropout("dot_product_attention", dropout_rate, dropout_rng, broadcast_dropout, deterministic),
    )
    shape = jnp.shape(query)
    out = out.reshape(*shape[:-1], v.shape[-1])
    if not return_residual:
        return out
    return out, jax.lax.stop_gradient(logsumexp.astype(q.dtype).reshape(shape[:-1]))


# --- positions and scores in the words of flash_attention ------------------------------------------------------------


def _positions(causal: bool, local_window_size: Any) -> tuple[bool, int, tuple[int, int] | None]:
    """(causal, q_offset, window) for `flash_attention`: (False, (8, -1)) -> (False, -1, (7, 0)).

    An empty window has left + right < 0.
    """
    if local_window_size is None:
        return causal, 0, None
    pair = cast(Any, local_window_size if isinstance(local_window_size, (tuple, list)) else (local_window_size,) * 2)
    try:
        left, right = map(operator.index, pair)
    except (TypeError, ValueError):
        fix = "one int stands for both; None for no window"
        raise _refusal("local_window_size", "an int, or (left, right)", local_window_size, fix) from None
    if min(left, right) >= 0:
        return causal, 0, (left, right)
    # A window without position i is a window around i + offset, its nearest key.
    right = min(right, 0) if causal else right
    offset = -left if left < 0 else right
    return False, offset, (left + offset, right - offset)


def _scaled(scale: Any, bias: jax.Array | None, query: jax.Array) -> tuple[float | None, jax.Array | None, Any]:
    """(scale, bias, score_mod) for `flash_attention`: (1.0, None, score_mod) if the scale is traced.

    The score_mod multiplies by the scale and adds the bias, which must come after it.
    """
    if scale is None:
        return None, bias, None
    if jnp.shape(scale) != ():
        raise _refusal("scale", "a number, or None", scale, "multiply the query by what differs among heads or queries")
    if not is_traced(scale):
        return float(scale), bias, None
    factor = scale.astype(tk.accumulator(query.dtype))
    carried = (factor,) if bias is None else (factor, bias)
    return 1.0, None, jax.tree_util.Partial(_scale_and_bias, *carried)


def _scale_and_bias(scale: Any, *arguments: Any) -> Any:
    """score * scale + bias[b, n, i, j]: a `score_mod` once scale and bias are bound.

    `arguments` are (bias, score, b, n, i, j), or (score, b, n, i, j) without a bias.
    """
    *bias, score, b, n, i, j = arguments
    scaled = score * scale
    for array in bias:
        at = (0 if size == 1 else position for size, position in zip(array.shape, (b, n, i, j), strict=True))
        scaled = scaled + array[tuple(at)].astype(scaled.dtype)
    return scaled


# --- checks ----------------------------------------------------------------------------------------------------------


def _ranked(name: str, argument: Any) -> jax.Array:
    """The argument as an array of four dims; absent leading dims become dims of size 1."""
    array = jnp.asarray(argument)
    if array.ndim > 4:
        raise _refusal(name, "an array of at most 4 dims", array, "jax.vmap maps over more")
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def _check_arrays(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    fits = is_float(query) and query.dtype == key.dtype == value.dtype and key.shape[:-1] == value.shape[:-1]
    fits = fits and (query.shape[0], query.shape[3]) == (key.shape[0], key.shape[3])
    if fits and key.shape[2] and query.shape[2] % key.shape[2] == 0:
        return
    raise ArgumentError(
        "the arrays of dot_product_attention do not fit",
        expected="query[B, T, N, H], key[B, S, K, H], value[B, S, K, Hv] of one float dtype of at least 16 bits, "
        "K dividing N",
        got=f"query = {describe(query)}, key = {describe(key)}, value = {describe(value)}",
        fix="the layout is batch, time, heads, width; cast with .astype",
    )


def _like_scores(name: str, argument: Any, scores: tuple[int, ...]) -> jax.Array:
    """A bias, float, or a mask, bool, of four dims that broadcast to `scores`."""
    array = _ranked(name, argument)
    fits = all(n in (1, m) for n, m in zip(array.shape, scores, strict=True))
    if fits and name == "mask" and array.dtype == jnp.bool_:
        return array
    if fits and name == "bias" and not jnp.issubdtype(array.dtype, jnp.complexfloating):
        return array if is_float(array) else array.astype(jnp.float32)
    kind = "numbers" if name == "bias" else "bool"
    fix = "the order is batch, heads, queries, keys"
    if name == "mask":
        fix += (
            "; what is added goes into bias; tilekern.nn.attention_fn takes masks of 0 and 1 of any dtype, as Flax does"
        )
    raise _refusal(name, f"{kind}{list(scores)}, or 1 in place of any dim", array, fix)


def _lengths(name: str, lengths: Any, batch: int) -> jax.Array | None:
    if lengths is None:
        return None
    array = jnp.asarray(lengths)
    if array.shape == (batch,) and array.dtype == jnp.int32:
        # Without 64-bit types JAX cuts off the upper bits of NumPy's integers.
        return as_int32(lengths) if isinstance(lengths, np.ndarray) else array
    raise _refusal(
        name, f"int32[{batch}], a length for each element of the batch", array, "cast with .astype(jnp.int32)"
    )
