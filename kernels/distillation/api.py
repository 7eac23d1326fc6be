"""The public function: checks, defaults, and leading dims."""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

import jax

from tilekern.authoring import hide_frames, takes_python_numbers
from tilekern.kernels.checks import as_rows, is_float, lies_in, refusal, require
from tilekern.kernels.conventions import renamed
from tilekern.kernels.distillation.kernel import distillation_forward
from tilekern.kernels.distillation.options import Divergence, Options

hide_frames(__file__)

_refusal = partial(refusal, "distillation")


@renamed(beta="teacher_share")
@takes_python_numbers
def distillation(
    hidden: jax.Array,
    weight: jax.Array,
    teacher: jax.Array,
    teacher_weight: jax.Array | None = None,
    *,
    divergence: Divergence = "forward_kl",
    teacher_share: float = 0.5,
    temperature: float = 1.0,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    target: str | None = None,
    block_t: int | None = None,
    block_v: int | None = None,
    block_d: int | None = None,
    block_e: int | None = None,
) -> jax.Array:
    """The divergence of each token's words, softmax(hidden @ weight), from a teacher's; no logits are in memory.

    With q of the student and p of the teacher, in natural logarithms: forward KL = Σ p ln(p / q), reverse KL =
    Σ q ln(q / p), Jensen-Shannon = β Σ p ln(p / m) + (1 - β) Σ q ln(q / m) with m = β p + (1 - β) q (Agarwal et al.
    2024, https://arxiv.org/abs/2306.13649). The cross entropy with soft labels p is the forward KL plus the entropy of
    p: give `jnp.log(p)` for the teacher's logits, and the gradient is that of both.

    Args:
      hidden: [*B, D], float32, bfloat16, float16 or float64.
      weight: [D, V] of the same dtype, V the size of the vocabulary.
      teacher: [*B, E] of the same dtype, hidden of the teacher; or [*B, V], its logits, of any float dtype.
      teacher_weight: [E, V] of the same dtype; None if `teacher` has logits.
      divergence: "forward_kl", "reverse_kl" or "jensen_shannon".
      teacher_share: β of "jensen_shannon", between 0 and 1; at the ends it would be 0. Unused by the KL divergences.
      temperature: divides the logits of student and teacher; from 1e-30 to 1e30. Some authors multiply the loss by its
        square.
      softcap: if given, the student's logits become softcap * tanh(logits / softcap) first; from 1e-30 to 1e30.
      teacher_softcap: likewise for the teacher's.
      target: lower for this target's blocks, e.g. "cpu:xla".
      block_t: tokens of a tile, instead of the schedule's; no block changes the result beyond rounding.
      block_v: words of the vocabulary in a tile.
      block_d: elements of the student's inner dim in a tile.
      block_e: elements of the teacher's inner dim in a tile.

    Returns:
      loss[*B] in float32 (float64 for float64 inputs), not averaged over tokens.

    A word with p = 0 adds nothing to a sum with the factor p; likewise for q. The teacher is a constant under
    differentiation. The forward pass names its results "distillation_loss" and "distillation_residuals" for the
    policies of `jax.checkpoint`.

    Raises:
      tilekern.errors.ArgumentError: shapes, dtypes or static arguments do not fit.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from tilekern.kernels.distillation import distillation
      >>> hidden, weight = jnp.ones((2, 8)), jnp.zeros((8, 4))
      >>> sure = jnp.array([[0, -jnp.inf, -jnp.inf, -jnp.inf], [0, 0, 0, 0]])  # of one word, and of none
      >>> distillation(hidden, weight, sure)  # ln 4, 0
      Array([1.3862944, 0.       ], dtype=float32)
      >>> jax.grad(lambda w: distillation(hidden, w, sure).sum())(weight)[0]
      Array([-0.75,  0.25,  0.25,  0.25], dtype=float32)
    """
    _check(hidden, weight, teacher, teacher_weight)
    options = Options(divergence, teacher_share, temperature, softcap, teacher_softcap)
    _check_options(options)
    loss, *_ = distillation_forward(
        as_rows(hidden),
        weight,
        jax.lax.stop_gradient(as_rows(teacher)),
        None if teacher_weight is None else jax.lax.stop_gradient(teacher_weight),
        options=options,
        target=target,
        block_t=block_t,
        block_v=block_v,
        block_d=block_d,
        block_e=block_e,
    )
    return loss.reshape(hidden.shape[:-1])


def _check(hidden: Any, weight: Any, teacher: Any, teacher_weight: Any) -> None:
    arrays = {"hidden": hidden, "weight": weight, "teacher": teacher}
    if teacher_weight is not None:
        arrays["teacher_weight"] = teacher_weight
    fits = all(map(is_float, arrays.values())) and hidden.dtype == weight.dtype
    fits = fits and hidden.ndim > 0 and weight.ndim == 2 and hidden.shape[-1] == weight.shape[0]
    fits = fits and teacher.ndim == hidden.ndim and teacher.shape[:-1] == hidden.shape[:-1]
    if teacher_weight is None:
        fits = fits and teacher.shape[-1] == weight.shape[1]
        expected = "hidden[*B, D] and weight[D, V] of one float dtype, teacher[*B, V]"
    else:
        fits = fits and teacher.dtype == teacher_weight.dtype == hidden.dtype
        fits = fits and teacher_weight.shape == (teacher.shape[-1], weight.shape[1])
        expected = "hidden[*B, D], weight[D, V], teacher[*B, E] and teacher_weight[E, V] of one float dtype"
    fix = "both vocabularies are the same; without teacher_weight, teacher has logits; cast with .astype"
    require(fits, "distillation", expected=expected, fix=fix, **arrays)


def _check_options(options: Options) -> None:
    names = get_args(Divergence)
    if options.divergence not in names:
        expected = f"one of {', '.join(map(repr, names))}"
        raise _refusal("divergence", expected, options.divergence, '"jensen_shannon" has a teacher_share')
    if not (lies_in(options.teacher_share, 0, 1) and 0 < options.teacher_share < 1):
        fix = 'for the ends use "forward_kl" and "reverse_kl"'
        raise _refusal("teacher_share", "a number between 0 and 1, without the ends", options.teacher_share, fix)
    if not lies_in(options.temperature, 1e-30, 1e30):
        fix = "1 leaves the logits as they are"
        raise _refusal("temperature", "a number from 1e-30 to 1e30", options.temperature, fix)
    for name in ("softcap", "teacher_softcap"):
        value = getattr(options, name)
        if value is not None and not lies_in(value, 1e-30, 1e30):
            raise _refusal(name, "a number from 1e-30 to 1e30, or None", value, "None caps nothing")
