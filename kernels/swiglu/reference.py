"""The definition of swiglu, in plain jnp."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

ACTIVATIONS = MappingProxyType[str, Callable[[jax.Array], jax.Array]](
    {
        "silu": jax.nn.silu,
        "gelu": partial(jax.nn.gelu, approximate=False),
        "gelu_tanh": partial(jax.nn.gelu, approximate=True),
        "relu": jax.nn.relu,
        "sigmoid": jax.nn.sigmoid,
    }
)


def reference(gate: jax.Array, up: jax.Array, *, activation: str = "silu", dtype: Any = None) -> jax.Array:
    """activation(gate) * up, in the dtype of gate; silu(gate) = gate / (1 + exp(-gate)).

    Computed in `dtype`: if None in float32, in float64 for float64 inputs.
    """
    wide = dtype or jnp.promote_types(gate.dtype, jnp.float32)
    return (ACTIVATIONS[activation](gate.astype(wide)) * up.astype(wide)).astype(gate.dtype)
