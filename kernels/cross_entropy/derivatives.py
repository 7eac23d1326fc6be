"""The derivatives of cross entropy: tangent kernel, backward op, and their transposes.

The tangent kernel is linear in tangents, the backward op linear in cotangents, and each is the other's transpose. Along
all other inputs, both are differentiated by their definition in plain JAX, by portions of tokens. Each portion keeps
only its inputs for the backward pass (`jax.checkpoint`), so that no order has the logits in memory.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name  # pyright: ignore[reportUnknownVariableType] -- JAX's annotation

import tilekern as tk
from tilekern.kernels.blocks import tiled
from tilekern.kernels.cross_entropy.backward import cross_entropy_backward_hidden, cross_entropy_backward_logits
from tilekern.kernels.cross_entropy.kernel import cross_entropy_forward
from tilekern.kernels.cross_entropy.reference import reference
from tilekern.kernels.cross_entropy.tangent import Options, Pair, cross_entropy_tangent
from tilekern.kernels.derivatives import against, along
from tilekern.kernels.matmul import matmul

# Logits of a portion of tokens.
_PORTION, _MOST_TOKENS = 1 << 22, 128


@cross_entropy_forward.defjvp
def _forward_jvp(
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
    *,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    temperature: float,
    vocabulary: int | None,
    **blocks: int,
) -> tuple[Pair, Pair]:
    options = Options(ignore_index, label_smoothing, softcap, z_loss, temperature, vocabulary)
    loss, logsumexp = cross_entropy_forward(*primals, **asdict(options), **blocks)
    logsumexp = checkpoint_name(logsumexp, "cross_entropy_logsumexp")
    moved = cross_entropy_tangent(*primals, logsumexp, tangents[:2], options=options)
    return (checkpoint_name(loss, "cross_entropy_loss"), logsumexp), moved


# --- the definition ---------------------------------------------------------------------------------------------------


def definition(labels: jax.Array, options: Options, hidden: jax.Array, weight: jax.Array) -> Pair:
    """The loss and the logsumexp, [T] each, by the reference on portions of tokens."""
    (tokens, width), vocabulary = hidden.shape, weight.shape[1]
    size = max(1, min(tokens, _MOST_TOKENS, _PORTION // max(1, vocabulary)))
    count = tk.cdiv(tokens, size)
    more = count * size - tokens

    @jax.checkpoint
    def portion(weight: jax.Array, cut: tuple[jax.Array, jax.Array]) -> Any:
        hidden, labels = cut
        return reference(hidden, weight, labels, **asdict(options))

    cut = (
        jnp.pad(hidden, ((0, more), (0, 0))).reshape(count, size, width),
        jnp.pad(labels, (0, more), constant_values=options.ignore_index).reshape(count, size),
    )
    loss, logsumexp = cast(Any, jax.lax.map(partial(portion, weight), cut))
    return loss.reshape(-1)[:tokens], logsumexp.reshape(-1)[:tokens]


# --- the backward op --------------------------------------------------------------------------------------------------


def _wanted_types(hidden: Any, weight: Any, *others: Any, wanted: tuple[bool, bool], options: Options) -> Pair:
    of_hidden, of_weight = (
        jax.ShapeDtypeStruct(x.shape, x.dtype) if w else None for x, w in zip((hidden, weight), wanted, strict=True)
    )
    return of_hidden, of_weight


@tk.op(out_type=_wanted_types, linear=("cotangents",))
def cross_entropy_backward(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    logsumexp: jax.Array,
    cotangents: Pair,
    *,
    wanted: tuple[bool, bool],
    options: Options,
    words: tk.Block = 2048,
) -> Pair:
    """Cotangents of the loss and the logsumexp (None: of zeros) -> those of hidden and weight, as far as `wanted`.

    The gradient of the logits is in memory for `words` words at a time, for all tokens.
    """
    (tokens, width), vocabulary = hidden.shape, weight.shape[1]
    wide = tk.accumulator(hidden.dtype)
    dhidden = jnp.zeros(hidden.shape, wide) if wanted[0] else None
    dweight = jnp.zeros(weight.shape, weight.dtype) if wanted[1] else None
    if not tokens * width * vocabulary:
        return None if dhidden is None else dhidden.astype(hidden.dtype), dweight
    of_words, of_target = _factors(labels, logsumexp, cotangents, vocabulary, options)
    words = min(words, vocabulary)
    count = tk.cdiv(vocabulary, words)

    def step(number: Any, carry: Pair) -> Pair:
        # Each step has as many words. The first one is that of the last words, and leaves those before them out.
        dhidden, dweight = carry
        number = jnp.asarray(number, jnp.int32)
        first = jnp.where(number == 0, vocabulary - words, (number - 1) * words)
        done = jnp.where(number == 0, count * words - vocabulary, 0)
        some = jax.lax.dynamic_slice_in_dim(weight, first, words, axis=1)
        dlogits = cross_entropy_backward_logits(
            hidden,
            some,
            labels - first,
            logsumexp,
            of_words,
            of_target,
            done,
            on_label=1 - options.label_smoothing,
            on_each=options.on_each(vocabulary),
            softcap=options.softcap,
            temperature=options.temperature,
        )
        if dhidden is not None:
            dhidden = cross_entropy_backward_hidden(dhidden, dlogits, some)
        if dweight is not None:
            found = matmul(hidden, dlogits, transpose_x=True)
            dweight = jax.lax.dynamic_update_slice_in_dim(dweight, found, first, axis=1)
        return dhidden, dweight

    dhidden, dweight = cast(Pair, jax.lax.fori_loop(0, count, step, (dhidden, dweight)))
    return None if dhidden is None else dhidden.astype(hidden.dtype), dweight


def _factors(labels: jax.Array, logsumexp: jax.Array, cotangents: Pair, vocabulary: int, options: Options) -> Pair:
    """The factors of a token's probabilities and of its target, [T] each; a loss of no word's label is constant."""
    of_loss, of_logsumexp = (jnp.zeros_like(logsumexp) if c is None else c for c in cotangents)
    of_target = jnp.where(options.counts(labels, vocabulary), of_loss, 0)
    if options.vocabulary is not None:
        return of_logsumexp, of_target
    of_words = of_target * (1 + 2 * options.z_loss * logsumexp) if options.z_loss else of_target
    return of_words + of_logsumexp, of_target


@cross_entropy_backward.schedule("")
def _words(hidden: Any, weight: Any, *others: Any) -> dict[str, int]:
    """∂s of 32 MiB, but of 256 words at least, for products with it to be large ones.

    Its rows start at multiples of 128 elements for any vocabulary of at least as many words: GPUs copy these best.
    """
    vocabulary = weight.shape[1]
    most = max(128, vocabulary // 128 * 128)
    return {"words": tiled(vocabulary, min(most, _fitting(32 << 20, hidden)), 128)}


@cross_entropy_backward.schedule("cpu")
def _words_cpu(hidden: Any, weight: Any, *others: Any) -> dict[str, int]:
    """∂s of 8 MiB, which stays in the cache that all cores share."""
    return {"words": tiled(weight.shape[1], _fitting(8 << 20, hidden), 128)}


def _fitting(nbytes: int, hidden: Any) -> int:
    """Words of which ∂s has at most so many bytes."""
    return max(256, nbytes // max(1, hidden.shape[0] * hidden.dtype.itemsize) // 128 * 128)


# --- transposes, and derivatives of derivatives -----------------------------------------------------------------------


@cross_entropy_tangent.deftranspose
def _tangent_transpose(
    cotangents: Pair, hidden: Any, weight: Any, labels: Any, logsumexp: Any, tangents: Pair, *, options: Options
) -> dict[str, Pair]:
    wanted = tangents[0] is not None, tangents[1] is not None
    found = cross_entropy_backward(hidden, weight, labels, logsumexp, cotangents, wanted=wanted, options=options)
    return {"tangents": found}


@cross_entropy_backward.deftranspose
def _backward_transpose(
    cotangents: Pair, *inputs: Any, wanted: tuple[bool, bool], options: Options
) -> dict[str, tuple[Any, ...]]:
    *primals, linear = inputs
    found = cross_entropy_tangent(*primals, cotangents, options=options)
    return {"cotangents": tuple(None if x is None else f for f, x in zip(found, linear, strict=True))}


# The logsumexp is a function of the other inputs, which the definitions compute: its own tangent adds nothing.


@cross_entropy_tangent.defjvp
def _tangent_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...], *, options: Options) -> Pair:
    hidden, weight, labels, _, moved = primals
    function = partial(definition, labels, options)
    found = along(lambda *arrays: along(function, arrays, moved), (hidden, weight), tangents[:2])
    return cross_entropy_tangent(*primals, options=options), found


@cross_entropy_backward.defjvp
def _backward_jvp(
    primals: tuple[Any, ...], tangents: tuple[Any, ...], *, wanted: tuple[bool, bool], options: Options
) -> Pair:
    hidden, weight, labels, logsumexp, cotangents = primals
    function = partial(definition, labels, options)
    whole = tuple(jnp.zeros_like(logsumexp) if c is None else c for c in cotangents)
    found = along(lambda *arrays: against(function, arrays, whole, wanted), (hidden, weight), tangents[:2])
    return cross_entropy_backward(*primals, wanted=wanted, options=options), found
