"""Cross entropy and distillation of large vocabularies, beside `jnp` with all logits in memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from bench.distillation import naive
from bench.tpu_static.cases.case import Case
from bench.tpu_static.cases.measured import Measured, types, with_gradient
from tilekern.kernels.cross_entropy import cross_entropy
from tilekern.kernels.cross_entropy.cases import CASES as CROSS_ENTROPIES
from tilekern.kernels.distillation import distillation
from tilekern.kernels.distillation.cases import CASES as DISTILLATIONS


def _cross_entropy(case: Any) -> tuple[Measured, Measured]:
    arguments = types(lambda: case.arrays(jax.random.key(0), jnp.bfloat16))
    flops = 2 * case.tokens * case.width * case.vocabulary
    forward = Measured(f"cross_entropy {case.name}", cross_entropy, arguments, {"xla": _cross_entropy_by_xla}, flops)
    return with_gradient(forward, (0, 1))


def _cross_entropy_by_xla(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    logits = jnp.matmul(hidden, weight, preferred_element_type=jnp.float32)
    target = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - target


def _distillation(case: Any) -> tuple[Measured, Measured]:
    """The teacher has no gradient, so its product is computed once."""
    arguments = types(lambda: case.arrays(jax.random.key(0), jnp.bfloat16))
    of_student, of_teacher = (2 * case.tokens * n * case.vocabulary for n in (case.width, case.of_teacher))
    formula = partial(naive, case.divergence)
    function = partial(distillation, divergence=case.divergence)
    forward = Measured(f"distillation {case.name}", function, arguments, {"xla": formula}, of_student + of_teacher)
    return with_gradient(forward, (0, 1), 3 * of_student + of_teacher)


CASES: tuple[Case, ...] = (*_cross_entropy(CROSS_ENTROPIES[1]), *_distillation(DISTILLATIONS[0]))
SMALL: tuple[Case, ...] = ()
