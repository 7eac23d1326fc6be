"""The definition of swiglu, in plain jnp."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def reference(gate: jax.Array, up: jax.Array, *, dtype: Any = None) -> jax.Array:
    """gate / (1 + exp(-gate)) * up, in the dtype of gate.

    Computed in `dtype`: if None in float32, in float64 for float64 inputs.
    """
    wide = dtype or jnp.promote_types(gate.dtype, jnp.float32)
    return (jax.nn.silu(gate.astype(wide)) * up.astype(wide)).astype(gate.dtype)
