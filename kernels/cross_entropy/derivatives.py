"""The derivatives of cross entropy: tangent kernel, backward op, and their transposes.

The tangent kernel is linear in tangents, the backward op linear in cotangents, and each is the other's transpose. Along
all other inputs, both are differentiated by their definition in plain JAX, by portions of tokens. Each portion keeps
only its inputs for the backward pass (`jax.checkpoint`), so that no order has the logits in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name  # pyright: ignore[reportUnknownVariableType] -- JAX's annotation

import tilekern as tk
from tilekern.kernels.cross_entropy.backward import cross_entropy_backward_logits
from tilekern.kernels.cross_entropy.kernel import cross_entropy_forward
from tilekern.kernels.cross_entropy.portions import (
    by_tokens,
    gradients_by_words,
    words_at_a_time,
    words_at_a_time_on_cpus,
)
from tilekern.kernels.cross_entropy.reference import reference_with_logsumexp
from tilekern.kernels.cross_entropy.tangent import Options, Pair, cross_entropy_tangent
from tilekern.kernels.derivatives import against, along


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

    def portion(hidden: jax.Array, labels: jax.Array) -> Any:
        return reference_with_logsumexp(hidden, weight, labels, **asdict(options))

    return by_tokens(portion, (hidden, labels), weight.shape[1])


# --- the backward op --------------------------------------------------------------------------------------------------


def _cotangent_types(hidden: Any, weight: Any, *unused: Any, needs: tuple[bool, bool], options: Options) -> Pair:
    of_hidden, of_weight = (
        jax.ShapeDtypeStruct(x.shape, x.dtype) if n else None for x, n in zip((hidden, weight), needs, strict=True)
    )
    return of_hidden, of_weight


@tk.op(out_type=_cotangent_types, linear=("cotangents",))
def cross_entropy_backward(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    logsumexp: jax.Array,
    cotangents: Pair,
    *,
    needs: tuple[bool, bool],
    options: Options,
    words: tk.Block = 2048,
) -> Pair:
    """Cotangents of loss and logsumexp (None: zeros) -> cotangents of hidden and weight; None if not in `needs`.

    The gradient of the logits is in memory for `words` words at a time, for all tokens.
    """
    vocabulary = weight.shape[1]
    of_words, of_target = _factors(labels, logsumexp, cotangents, vocabulary, options)

    def of_logits(first: jax.Array, done: jax.Array, some: Callable[[jax.Array], jax.Array]) -> jax.Array:
        return cross_entropy_backward_logits(
            hidden,
            some(weight),
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

    return gradients_by_words(hidden, weight, of_logits, needs=needs, words=words)


def _factors(labels: jax.Array, logsumexp: jax.Array, cotangents: Pair, vocabulary: int, options: Options) -> Pair:
    """a[T] and g[T], the factors of a token's probabilities and target; g is 0 where the loss is constant."""
    of_loss, of_logsumexp = (jnp.zeros_like(logsumexp) if c is None else c for c in cotangents)
    of_target = jnp.where(options.counts(labels, vocabulary), of_loss, 0)
    if options.vocabulary is not None:
        return of_logsumexp, of_target
    of_words = of_target * (1 + 2 * options.z_loss * logsumexp) if options.z_loss else of_target
    return of_words + of_logsumexp, of_target


@cross_entropy_backward.schedule("")
def _words(hidden: Any, weight: Any, *unused: Any) -> dict[str, int]:
    return {"words": words_at_a_time(hidden, weight)}


@cross_entropy_backward.schedule("cpu")
def _words_cpu(hidden: Any, weight: Any, *unused: Any) -> dict[str, int]:
    return {"words": words_at_a_time_on_cpus(hidden, weight)}


# --- transposes, and derivatives of derivatives -----------------------------------------------------------------------


@cross_entropy_tangent.deftranspose
def _tangent_transpose(
    cotangents: Pair, hidden: Any, weight: Any, labels: Any, logsumexp: Any, tangents: Pair, *, options: Options
) -> dict[str, Pair]:
    needs = tangents[0] is not None, tangents[1] is not None
    transposed = cross_entropy_backward(hidden, weight, labels, logsumexp, cotangents, needs=needs, options=options)
    return {"tangents": transposed}


@cross_entropy_backward.deftranspose
def _backward_transpose(
    cotangents: Pair, *inputs: Any, needs: tuple[bool, bool], options: Options
) -> dict[str, tuple[Any, ...]]:
    *primals, linear = inputs
    transposed = cross_entropy_tangent(*primals, cotangents, options=options)
    return {"cotangents": tuple(None if x is None else t for t, x in zip(transposed, linear, strict=True))}


# The definitions compute the logsumexp from hidden, weight and labels: its own tangent adds nothing.


@cross_entropy_tangent.defjvp
def _tangent_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...], *, options: Options) -> Pair:
    hidden, weight, labels, _, moved = primals
    function = partial(definition, labels, options)
    moved_result = along(lambda *arrays: along(function, arrays, moved), (hidden, weight), tangents[:2])
    return cross_entropy_tangent(*primals, options=options), moved_result


@cross_entropy_backward.defjvp
def _backward_jvp(
    primals: tuple[Any, ...], tangents: tuple[Any, ...], *, needs: tuple[bool, bool], options: Options
) -> Pair:
    hidden, weight, labels, logsumexp, cotangents = primals
    function = partial(definition, labels, options)
    whole = tuple(jnp.zeros_like(logsumexp) if c is None else c for c in cotangents)
    moved = along(lambda *arrays: against(function, arrays, whole, needs), (hidden, weight), tangents[:2])
    return cross_entropy_backward(*primals, needs=needs, options=options), moved
