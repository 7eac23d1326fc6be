"""Routing of tokens to experts."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from tilekern.authoring import hide_frames
from tilekern.errors import ArgumentError
from tilekern.kernels.api import is_float, require

hide_frames(__file__)

type Gating = Literal["softmax", "sigmoid"]


def route(
    logits: jax.Array, *, experts_per_token: int, gating: Gating = "softmax", normalize: bool = True
) -> tuple[jax.Array, jax.Array]:
    """The experts of each token, those of the largest logits, and gates by which to multiply their results.

    Args:
      logits: [T, E], a number for each token and expert, of a float dtype.
      experts_per_token: k. Larger logits come first, of equal ones that of the lower index.
      gating: "softmax" over all experts, or "sigmoid" of each logit.
      normalize: divide the k gates of a token by their sum. For "softmax" this is the softmax of the chosen logits.

    Returns:
      Indices of experts int32[T, k], and gates [T, k] in float32 (float64 for float64).

    Raises:
      tilekern.errors.ArgumentError: logits or an option do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.distributed import route
      >>> experts, gates = route(jnp.array([[0.0, 3.0, 3.0]]), experts_per_token=2)
      >>> experts.tolist(), gates.tolist()
      ([[1, 2]], [[0.5, 0.5]])
    """
    _check(logits, experts_per_token, gating)
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    chosen, experts = lax.top_k(wide, experts_per_token)
    if gating == "softmax":
        # The sum of the chosen gates is divided out by a softmax over the chosen logits alone.
        return experts, jnp.exp(chosen - jax.nn.logsumexp(chosen if normalize else wide, axis=1, keepdims=True))
    gates = jax.nn.sigmoid(chosen)
    return experts, gates / gates.sum(1, keepdims=True) if normalize else gates


def _check(logits: Any, experts_per_token: Any, gating: Any) -> None:
    require(
        is_float(logits) and logits.ndim == 2,
        "route",
        expected="logits[T, E] of a float dtype of at least 16 bits",
        fix="reshape leading dims into T",
        logits=logits,
    )
    if not isinstance(experts_per_token, int) or not 1 <= experts_per_token <= logits.shape[1]:
        raise ArgumentError(
            "a token has at least one expert, and at most all",
            expected=f"experts_per_token from 1 to {logits.shape[1]}, dim 1 of logits",
            got=f"experts_per_token={experts_per_token!r}",
            fix="choose fewer experts for a token, or give logits of more",
        )
    if gating not in ("softmax", "sigmoid"):
        raise ArgumentError(
            "unknown gating",
            expected="'softmax' or 'sigmoid'",
            got=f"gating={gating!r}",
            fix="compute gates yourself, and call apply_experts",
        )
