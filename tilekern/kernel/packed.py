"""Arrays of 4-bit numbers as programs take and return them: bytes of two numbers each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilekern.ir.types import FOUR_BITS, packed_type


def packed(operands: Sequence[Any]) -> list[Any]:
    """Arrays as a program takes them: 4-bit arrays as bytes of two numbers along the last dim, all others as they are.

    XLA, too, holds two 4-bit numbers in a byte, so copies are as small.
    """
    return [_packed(x) if getattr(x, "dtype", None) in FOUR_BITS else x for x in operands]


def unpacked(results: Sequence[Any], types: Sequence[jax.ShapeDtypeStruct]) -> list[Any]:
    """Results of a program as arrays of `types`: the inverse of `packed`."""
    pairs = zip(results, types, strict=True)
    return [_unpacked(x, aval) if np.dtype(aval.dtype) in FOUR_BITS else x for x, aval in pairs]


def before_pairs(type: jax.ShapeDtypeStruct, dim: int | None) -> int | None:
    """The batch dim of an operand: `dim`; or 0 for a 4-bit array whose last dim, along which pairs are, it would be."""
    return 0 if type.dtype in FOUR_BITS and dim == len(type.shape) else dim


def _packed(x: Any) -> jax.Array:
    shape, dtype = packed_type(tuple(x.shape), np.dtype(x.dtype))
    padded = jnp.pad(jnp.asarray(x), [(0, 0)] * (x.ndim - 1) + [(0, x.shape[-1] % 2)])
    return jax.lax.bitcast_convert_type(padded.reshape(*shape, 2), dtype)


def _unpacked(x: Any, aval: jax.ShapeDtypeStruct) -> jax.Array:
    pairs: jax.Array = jax.lax.bitcast_convert_type(jnp.asarray(x), aval.dtype)
    *leading, count, _ = pairs.shape
    return pairs.reshape(*leading, 2 * count)[..., : aval.shape[-1]]
