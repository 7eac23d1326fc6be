"""Random bits, and packed integers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tilekern.errors import ArgumentError, checked
from tilekern.lang.tiles import describe

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


@checked
def random_bits(key_data: Any, *coordinates: Any) -> jax.Array:
    """32 random bits for each element, a function of a key and of the element's coordinates only.

    The generator is Threefry-2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3",
    section 4), applied to the coordinates in pairs. With global coordinates (`tile.indices`), all backends and all
    block sizes give the same bits.

    Args:
      key_data: uint32[2], `jax.random.key_data(key)` of a threefry key, loaded from a ref.
      *coordinates: integers or integer tiles that broadcast against each other. They are taken modulo 2³²: 64-bit
        coordinates that are equal modulo 2³² give the same bits.

    Returns:
      uint32 of the broadcast shape.
    """
    key = jnp.asarray(key_data)
    if key.shape != (2,) or key.dtype != jnp.uint32 or not coordinates:
        raise ArgumentError(
            "tk.random_bits takes the data of a key, and coordinates",
            expected="key_data = uint32[2], and at least one coordinate",
            got=f"key_data = {describe(key_data)}, {len(coordinates)} coordinates",
            fix="pass jax.random.key_data(key) to the kernel, and tile.indices of each dim",
        )
    words = [jnp.asarray(c).astype(jnp.uint32) for c in jnp.broadcast_arrays(*map(_integer, coordinates))]
    words += [jnp.zeros_like(words[0])] * (len(words) % 2)
    first, second = key[0], key[1]
    for pair in zip(words[::2], words[1::2], strict=True):
        first, second = _threefry(first, second, *pair)
    return first


def _integer(value: Any) -> jax.Array:
    array = jnp.asarray(value)
    if jnp.issubdtype(array.dtype, jnp.integer):
        return array
    raise ArgumentError(
        "a coordinate of tk.random_bits must be an integer",
        expected="an integer or an integer tile",
        got=describe(value),
        fix="use tile.indices",
    )


def _threefry(k0: Any, k1: Any, x0: jax.Array, x1: jax.Array) -> tuple[jax.Array, jax.Array]:
    keys = (k0, k1, k0 ^ k1 ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = x0 + k0, x1 + k1
    for step in range(5):
        for rotation in _ROTATIONS[step % 2]:
            x0 = x0 + x1
            x1 = x0 ^ ((x1 << jnp.uint32(rotation)) | (x1 >> jnp.uint32(32 - rotation)))
        x0 = x0 + keys[(step + 1) % 3]
        x1 = x1 + keys[(step + 2) % 3] + jnp.uint32(step + 1)
    return x0, x1


@checked
def unpack(tile: Any, axis: int = -1) -> jax.Array:
    """Unpack the 4-bit integers of a tile of bytes. The low half of a byte comes before the high half.

    Args:
      tile: int8 (two signed integers in each byte) or uint8 (two unsigned ones).
      axis: the dim along which neighbours share a byte.

    Returns:
      The same dtype, with `axis` twice as long.
    """
    array = jnp.asarray(tile)
    if array.dtype not in (jnp.int8, jnp.uint8) or not -array.ndim <= axis < array.ndim:
        raise ArgumentError(
            "tk.unpack takes a tile of bytes",
            expected="int8 or uint8, and one of its dims",
            got=f"tile = {describe(tile)}, axis = {axis}",
            fix="view packed data as int8 or uint8 outside the kernel",
        )
    axis %= array.ndim
    four = jnp.asarray(4, array.dtype)
    # A right shift of int8 keeps the sign.
    halves = jnp.stack([(array << four) >> four, array >> four], axis=axis + 1)
    return halves.reshape(*array.shape[:axis], 2 * array.shape[axis], *array.shape[axis + 1 :])
