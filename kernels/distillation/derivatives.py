"""The derivatives of distillation along hidden and weight of the student: the teacher is a constant.

The tangent op is linear in tangents, the backward op in the cotangent, and each is the other's transpose. The backward
op runs kernels. Forward mode and higher orders differentiate the definition in plain JAX, by portions of tokens, so
that no order has the logits in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name  # pyright: ignore[reportUnknownVariableType] -- JAX's annotation

import tilekern as tk
from tilekern.authoring import by_rows
from tilekern.kernels.cross_entropy.portions import (
    by_tokens,
    gradients_by_words,
    words_at_a_time,
    words_at_a_time_on_cpus,
)
from tilekern.kernels.derivatives import against, along
from tilekern.kernels.distillation.backward import distillation_backward_logits
from tilekern.kernels.distillation.kernel import distillation_forward
from tilekern.kernels.distillation.options import Options
from tilekern.kernels.distillation.reference import reference

Pair = tuple[Any, Any]
Rest = tuple[Any, Any, Any, Any, Any]  # of the teacher: hidden and weight; of the forward kernel: all but the loss


@distillation_forward.defjvp
def _forward_jvp(
    primals: tuple[Any, ...], tangents: tuple[Any, ...], *, options: Options, **blocks: int
) -> tuple[Any, Any]:
    loss, *numbers = distillation_forward(*primals, options=options, **blocks)
    numbers = [checkpoint_name(x, "distillation_residuals") for x in numbers]

    def tangent(
        numbers: Sequence[jax.Array], hidden: jax.Array, moved: Any, teacher: jax.Array, weight: jax.Array, *others: Any
    ) -> jax.Array:
        moved_weight, of_teacher = others
        rest: Any = (teacher, of_teacher, *numbers)
        return distillation_tangent(hidden, weight, rest, (moved, moved_weight), options=options)

    hidden, weight, teacher, of_teacher = primals
    rows = numbers, hidden, tangents[0], teacher
    moved = by_rows(tangent, rows, (weight, tangents[1], of_teacher))
    loss = checkpoint_name(loss, "distillation_loss")
    return (loss, *numbers), (moved, *(jnp.zeros_like(x) for x in numbers))


def _definition(rest: Rest, options: Options, hidden: jax.Array, weight: jax.Array) -> jax.Array:
    """The loss, [T], by the reference on portions of tokens."""
    teacher, of_teacher, *_ = rest

    def portion(hidden: jax.Array, teacher: jax.Array) -> jax.Array:
        return reference(hidden, weight, teacher, of_teacher, **asdict(options))

    return by_tokens(portion, (hidden, teacher), weight.shape[1])


def _tangent_type(hidden: Any, *others: Any, options: Options) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(hidden.shape[:1], tk.accumulator(hidden.dtype))


@tk.op(out_type=_tangent_type, linear=("tangents",))
def distillation_tangent(
    hidden: jax.Array, weight: jax.Array, rest: Rest, tangents: Pair, *, options: Options
) -> jax.Array:
    """The tangent of the loss along those of hidden and weight."""
    return along(partial(_definition, rest, options), (hidden, weight), tangents)


def _cotangent_types(hidden: Any, weight: Any, *others: Any, needs: tuple[bool, bool], options: Options) -> Pair:
    of_hidden, of_weight = (
        jax.ShapeDtypeStruct(x.shape, x.dtype) if w else None for x, w in zip((hidden, weight), needs, strict=True)
    )
    return of_hidden, of_weight


@tk.op(out_type=_cotangent_types, linear=("cotangent",))
def distillation_backward(
    hidden: jax.Array,
    weight: jax.Array,
    rest: Rest,
    cotangent: jax.Array,
    *,
    needs: tuple[bool, bool],
    options: Options,
    words: tk.Block = 2048,
) -> Pair:
    """The cotangent of the loss -> the cotangents of hidden and weight; None without a flag in `needs`.

    The gradient of the logits is in memory for `words` words at a time, for all tokens.
    """
    teacher, of_teacher, *numbers = rest

    def of_logits(first: jax.Array, done: jax.Array, some: Callable[[jax.Array], jax.Array]) -> jax.Array:
        taught = (some(teacher), None) if of_teacher is None else (teacher, some(of_teacher))
        return distillation_backward_logits(hidden, some(weight), *taught, *numbers, cotangent, done, options=options)

    return gradients_by_words(hidden, weight, of_logits, needs=needs, words=words)


@distillation_backward.schedule("")
def _words(hidden: Any, weight: Any, *others: Any) -> dict[str, int]:
    return {"words": words_at_a_time(hidden, weight)}


@distillation_backward.schedule("cpu")
def _words_cpu(hidden: Any, weight: Any, *others: Any) -> dict[str, int]:
    return {"words": words_at_a_time_on_cpus(hidden, weight)}


# --- transposes, and derivatives of derivatives -----------------------------------------------------------------------


@distillation_tangent.deftranspose
def _tangent_transpose(
    cotangent: Any, hidden: Any, weight: Any, rest: Rest, tangents: Pair, *, options: Options
) -> dict[str, Pair]:
    needs = tangents[0] is not None, tangents[1] is not None
    return {"tangents": distillation_backward(hidden, weight, rest, cotangent, needs=needs, options=options)}


@distillation_backward.deftranspose
def _backward_transpose(
    cotangents: Pair, hidden: Any, weight: Any, rest: Rest, cotangent: Any, *, needs: Any, options: Options
) -> dict[str, Any]:
    return {"cotangent": distillation_tangent(hidden, weight, rest, cotangents, options=options)}


# The numbers of the forward kernel are functions of the other inputs, which the definition computes: their own tangents
# add nothing.


@distillation_tangent.defjvp
def _tangent_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...], *, options: Options) -> tuple[Any, Any]:
    hidden, weight, rest, moved = primals
    function = partial(_definition, rest, options)
    found = along(lambda *pair: along(function, pair, moved), (hidden, weight), tangents[:2])
    return distillation_tangent(*primals, options=options), found


@distillation_backward.defjvp
def _backward_jvp(
    primals: tuple[Any, ...], tangents: tuple[Any, ...], *, needs: tuple[bool, bool], options: Options
) -> tuple[Pair, Any]:
    hidden, weight, rest, cotangent = primals
    function = partial(_definition, rest, options)
    found = along(lambda *pair: against(function, pair, cotangent, needs), (hidden, weight), tangents[:2])
    return distillation_backward(*primals, needs=needs, options=options), found
