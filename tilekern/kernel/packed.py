"""Arrays of 4-bit numbers as programs take and return them: bytes of two numbers each.

On CPUs, XLA holds two neighbours in a byte, too, the first number in the low half, across the ends of rows. So an array
whose rows are whole bytes lies there as `packed` returns it, and native code reads it without a copy.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilekern.ir.types import FOUR_BITS, packed_type


def packed(operands: Sequence[Any], in_place: Collection[int] = ()) -> list[Any]:
    """Arrays as a program takes them: 4-bit arrays as bytes of two numbers along the last dim, all others as they are.

    Args:
      operands: the arrays.
      in_place: numbers of operands that native code reads as XLA holds them on CPUs; of these, arrays whose rows are
        whole bytes stay arrays of 4-bit numbers.
    """

    def is_packed(number: int, x: Any) -> bool:
        return getattr(x, "dtype", None) in FOUR_BITS and (number not in in_place or x.shape[-1] % 2 > 0)

    return [_packed(x) if is_packed(number, x) else x for number, x in enumerate(operands)]


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
