"""Dropout of attention weights, in the words of Flax."""

from __future__ import annotations

from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from tilekern.authoring import hide_frames
from tilekern.kernels.checks import as_real, refusal

hide_frames(__file__)


class Dropout(TypedDict, total=False):
    """The keyword arguments of `flash_attention` that say which weights are dropped; empty for none."""

    dropout_rate: float
    dropout_key: jax.Array
    dropout_broadcast: bool


def dropout(function: str, rate: Any, rng: Any, broadcast: Any, deterministic: Any) -> Dropout:
    """The arguments of `flash_attention` for `dropout_rate`, `dropout_rng`, `broadcast_dropout` and `deterministic`.

    Raises:
      ArgumentError: of `function`, where an argument is of another kind, or weights are to be dropped without a key.
    """
    number = None if isinstance(rate, bool) else as_real(rate)
    if number is None or not 0 <= number <= 1:
        raise refusal(function, "dropout_rate", "a static number from 0 to 1", rate, "0 drops nothing")
    for name, flag in (("broadcast_dropout", broadcast), ("deterministic", deterministic)):
        if not isinstance(flag, (bool, np.bool_)):
            raise refusal(function, name, "True or False, known when the call is traced", flag, "make it static in jit")
    if deterministic or not number:
        return {}
    if rng is None:
        fix = "pass a key, such as module.make_rng('dropout'), or deterministic=True"
        raise refusal(function, "dropout_rng", "a key of jax.random, for weights are dropped", rng, fix)
    return {"dropout_rate": number, "dropout_key": _threefry(rng), "dropout_broadcast": bool(broadcast)}


def _threefry(rng: Any) -> jax.Array:
    """The data of a threefry key, uint32[2]: of the key itself, or drawn from a key of another kind."""
    key = jnp.asarray(rng) if not hasattr(rng, "dtype") else rng
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if typed and jax.random.key_impl(key) == "threefry2x32" and key.shape == ():
        return jax.random.key_data(key)
    if not typed and key.shape == (2,) and key.dtype == jnp.uint32:
        return key
    return jax.random.bits(key, (2,), jnp.uint32)
