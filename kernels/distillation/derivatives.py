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
Constants = tuple[Any, Any, Any, Any, Any]  # (teacher, teacher_weight, logsumexp, teacher_logsumexp, slope)


@distillation_forward.defjvp
def _forward_jvp(
    primals: tuple[Any, ...], tangents: tuple[Any, ...], *, options: Options, **blocks: int
) -> tuple[Any, Any]:
    loss, *numbers = distillation_forward(*primals, options=options, **blocks)
    numbers = [checkpoint_name(x, "distillation_residuals") for x in numbers]

    def tangent(
        numbers: Sequence[jax.Array],
        hidden: jax.Array,
        moved: Any,
        teacher: jax.Array,
        weight: jax.Array,
        *weights: Any,
    ) -> jax.Array:
        moved_weight, of_teacher = weights
        constants: Any = (teacher, of_teacher, *numbers)
        return distillation_tangent(hidden, weight, constants, (moved, moved_weight), options=options)

    hidden, weight, teacher, of_teacher = primals
    rows = numbers, hidden, tangents[0], teacher
    moved = by_rows(tangent, rows, (weight, tangents[1], of_teacher))
    loss = checkpoint_name(loss, "distillation_loss")
    return (loss, *numbers), (moved, *(jnp.zeros_like(x) for x in numbers))


def _definition(constants: Constants, options: Options, hidden: jax.Array, weight: jax.Array) -> jax.Array:
    """The loss, [T], by the reference on portions of tokens."""
    teacher, of_teacher, *_ = constants

    def portion(hidden: jax.Array, teacher: jax.Array) -> jax.Array:
        return reference(hidden, weight, teacher, of_teacher, **asdict(options))

    return by_tokens(portion, (hidden, teacher), weight.shape[1])


def _tangent_type(hidden: Any, *unused: Any, options: Options) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(hidden.shape[:1], tk.accumulator(hidden.dtype))


@tk.op(out_type=_tangent_type, linear=("tangents",))
def distillation_tangent(
    hidden: jax.Array, weight: jax.Array, constants: Constants, tangents: Pair, *, options: Options
) -> jax.Array:
    """The tangent of the loss, [T], along tangents of hidden and weight."""
    return along(partial(_definition, constants, options), (hidden, weight), tangents)


def _cotangent_types(hidden: Any, weight: Any, *unused: Any, needs: tuple[bool, bool], options: Options) -> Pair:
    of_hidden, of_weight = (
        jax.ShapeDtypeStruct(x.shape, x.dtype) if n else None for x, n in zip((hidden, weight), needs, strict=True)
    )
    return of_hidden, of_weight


@tk.op(out_type=_cotangent_types, linear=("cotangent",))
def distillation_backward(
    hidden: jax.Array,
    weight: jax.Array,
    constants: Constants,
    cotangent: jax.Array,
    *,
    needs: tuple[bool, bool],
    options: Options,
    words: tk.Block = 2048,
) -> Pair:
    """The cotangent of the loss -> the cotangents of hidden and weight; None without a flag in `needs`.

    The gradient of the logits is in memory for `words` words at a time, for all tokens.
    """
    teacher, of_teacher, *numbers = constants

    def of_logits(first: jax.Array, done: jax.Array, some: Callable[[jax.Array], jax.Array]) -> jax.Array:
        arrays = (some(teacher), None) if of_teacher is None else (teacher, some(of_teacher))
        return distillation_backward_logits(hidden, some(weight), *arrays, *numbers, cotangent, done, options=options)

    return gradients_by_words(hidden, weight, of_logits, needs=needs, words=words)


@distillation_backward.schedule("")
def _words(hidden: Any, weight: Any, *unused: Any) -> dict[str, int]:
    return {"words": words_at_a_time(hidden, weight)}


@distillation_backward.schedule("cpu")
def _words_cpu(hidden: Any, weight: Any, *unused: Any) -> dict[str, int]:
    return {"words": words_at_a_time_on_cpus(hidden, weight)}


# --- transposes, and derivatives of derivatives -----------------------------------------------------------------------


@distillation_tangent.deftranspose
def _tangent_transpose(
    cotangent: Any, hidden: Any, weight: Any, constants: Constants, tangents: Pair, *, options: Options
) -> dict[str, Pair]:
    needs = tangents[0] is not None, tangents[1] is not None
    return {"tangents": distillation_backward(hidden, weight, constants, cotangent, needs=needs, options=options)}


@distillation_backward.deftranspose
def _backward_transpose(
    cotangents: Pair, hidden: Any, weight: Any, constants: Constants, cotangent: Any, *, needs: Any, options: Options
) -> dict[str, Any]:
    return {"cotangent": distillation_tangent(hidden, weight, constants, cotangents, options=options)}


# The definition computes the forward kernel's numbers from the other inputs: the numbers' own tangents add nothing.


@distillation_tangent.defjvp
def _tangent_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...], *, options: Options) -> tuple[Any, Any]:
    hidden, weight, constants, moved = primals
    function = partial(_definition, constants, options)
    moved_loss = along(lambda *pair: along(function, pair, moved), (hidden, weight), tangents[:2])
    return distillation_tangent(*primals, options=options), moved_loss


@distillation_backward.defjvp
def _backward_jvp(
    primals: tuple[Any, ...], tangents: tuple[Any, ...], *, needs: tuple[bool, bool], options: Options
) -> tuple[Pair, Any]:
    hidden, weight, constants, cotangent = primals
    function = partial(_definition, constants, options)
    moved = along(lambda *pair: against(function, pair, cotangent, needs), (hidden, weight), tangents[:2])
    return distillation_backward(*primals, needs=needs, options=options), moved
