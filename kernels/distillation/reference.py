"""The definition of distillation, in plain jnp, with both logit matrices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tilekern.kernels.distillation.options import Divergence, Options


def reference(
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
    dtype: Any = None,
) -> jax.Array:
    """loss[*B], the divergence of the student's logits hidden[*B, D] @ weight[D, V] from the teacher's, a constant.

    Computed in `dtype`; None: float32, or float64 for float64 inputs.
    """
    out = jnp.promote_types(hidden.dtype, jnp.float32)
    wide = dtype or out
    options = Options(divergence, teacher_share, temperature, softcap, teacher_softcap)

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.matmul(x.astype(wide), w.astype(wide), precision=jax.lax.Precision.HIGHEST)

    def log_probabilities(logits: jax.Array, cap: float | None) -> jax.Array:
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
        return jax.nn.log_softmax(logits / temperature)

    t = teacher.astype(wide) if teacher_weight is None else product(teacher, teacher_weight)
    log_q = log_probabilities(product(hidden, weight), softcap)
    log_p = jax.lax.stop_gradient(log_probabilities(t, teacher_softcap))
    return options.shares(log_q, log_p).sum(axis=-1).astype(out)
