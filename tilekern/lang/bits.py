"""Random bits, stochastic rounding, and packed integers."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

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
      key_data: uint32[2], `jax.random.key_data(key)` of a threefry key, loaded from a ref; or a pair of uint32 arrays,
        the two words of many keys, which broadcast against the coordinates, such as the keys of the rows of a tile,
        `(keys[i, 0][:, None], keys[i, 1][:, None])`.
      *coordinates: integers or integer tiles that broadcast against each other. They are taken modulo 2³²: 64-bit
        coordinates that are equal modulo 2³² give the same bits.

    Returns:
      uint32 of the broadcast shape.
    """
    key = _words(key_data)
    if key is None or not coordinates:
        raise ArgumentError(
            "tk.random_bits takes the data of a key, and coordinates",
            expected="key_data = uint32[2], or a pair of uint32 arrays, and at least one coordinate",
            got=f"key_data = {describe(key_data)}, {len(coordinates)} coordinates",
            fix="pass jax.random.key_data(key) to the kernel, and tile.indices of each dim",
        )
    words = [jnp.asarray(c).astype(jnp.uint32) for c in jnp.broadcast_arrays(*map(_integer, coordinates))]
    words += [jnp.zeros_like(words[0])] * (len(words) % 2)
    first, second = key
    for pair in zip(words[::2], words[1::2], strict=True):
        first, second = _threefry(first, second, *pair)
    return first


def _words(key_data: Any) -> tuple[jax.Array, jax.Array] | None:
    """The two words of a key, or of many keys; None for anything else."""
    if isinstance(key_data, tuple):
        words = cast(tuple[Any, ...], key_data)
        fits = len(words) == 2 and all(getattr(word, "dtype", None) == jnp.uint32 for word in words)
        return (jnp.asarray(words[0]), jnp.asarray(words[1])) if fits else None
    key = jnp.asarray(key_data)
    return (key[0], key[1]) if key.shape == (2,) and key.dtype == jnp.uint32 else None


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
def stochastic_round(tile: Any, bits: Any, dtype: Any) -> jax.Array:
    """Round to a neighbour in a narrower dtype, up or down by chance, so that the mean of many results is the tile.

    A number x between two neighbours, near (closer to 0) and far, becomes far if (x - near) / (far - near) is more than
    bits · 2⁻³². For bfloat16 the upper 16 bits count, for other dtypes the upper 24. Numbers of the dtype stay, and so
    do infinities and NaN. A number below the next power of two of the largest finite number never becomes infinite or
    NaN by chance. Sums of small updates in bfloat16 keep addends that rounding to the nearest would lose.

    The derivative is the derivative of `astype`.

    Args:
      tile: floats of float32, or narrower.
      bits: uint32 that broadcast to the tile's shape, one for each element, such as the result of `tk.random_bits`.
      dtype: bfloat16, float16, float8_e4m3fn or float8_e5m2.

    Returns:
      The rounded tile, of this dtype.
    """
    array, chance = jnp.asarray(tile), jnp.asarray(bits)
    try:
        target = jnp.dtype(dtype)
    except TypeError:
        target = None
    fits = jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize <= 4 and chance.dtype == jnp.uint32
    spread = (1,) * (array.ndim - chance.ndim) + chance.shape
    if (
        target not in _FORMATS
        or not fits
        or len(spread) != array.ndim
        or any(s not in (1, whole) for s, whole in zip(spread, array.shape, strict=True))
    ):
        raise ArgumentError(
            "tk.stochastic_round takes floats, random bits and a dtype",
            expected="a tile of float32 or narrower, uint32 that broadcast to it, and a dtype of "
            + ", ".join(d.name for d in _FORMATS),
            got=f"tile = {describe(tile)}, bits = {describe(bits)}, dtype = {getattr(target, 'name', dtype)}",
            fix="cast with .astype(jnp.float32); draw bits with tk.random_bits",
        )
    return _rounded(array.astype(jnp.float32), jnp.broadcast_to(chance, array.shape), target)


_FORMATS = {
    # Bits of the mantissa, the least exponent of a normal number, and the largest number.
    jnp.dtype(jnp.bfloat16): (7, -126, 3.3895313892515355e38),
    jnp.dtype(jnp.float16): (10, -14, 65504.0),
    jnp.dtype(jnp.float8_e4m3fn): (3, -6, 448.0),
    jnp.dtype(jnp.float8_e5m2): (2, -14, 57344.0),
}


@partial(cast(Any, jax.custom_jvp), nondiff_argnums=(2,))
def _rounded(x: jax.Array, bits: jax.Array, dtype: Any) -> jax.Array:
    mantissa, exponent, largest = _FORMATS[dtype]
    upper_half = dtype == jnp.bfloat16
    least, greatest = _between_bfloat16(x, bits) if upper_half else _between(x, bits, mantissa, exponent)
    rounded = jnp.where(jnp.abs(greatest) <= largest, greatest, least)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(dtype)


@_rounded.defjvp
def _rounded_jvp(dtype: Any, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _rounded(*primals, dtype), tangents[0].astype(dtype)


def _between_bfloat16(x: jax.Array, bits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(x cut after its upper 16 bits, the same number or by chance the next bfloat16 number away from 0)."""
    number = jax.lax.bitcast_convert_type(x, jnp.uint32)
    upper = jnp.uint32(0xFFFF0000)
    carried = number + (~bits >> jnp.uint32(16))
    return _as_float(number & upper), _as_float(carried & upper)


def _between(x: jax.Array, bits: jax.Array, mantissa: int, least_exponent: int) -> tuple[jax.Array, jax.Array]:
    """(x rounded towards 0 to a multiple of its neighbours' distance, the same or by chance the next multiple)."""
    exponent = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x7F800000)
    exponent = jnp.maximum(exponent, jnp.uint32((least_exponent + 127) << 23))
    distance = _as_float(exponent - jnp.uint32(mantissa << 23))
    inverse = _as_float(jnp.uint32((254 + mantissa) << 23) - exponent)
    size = jnp.abs(x) * inverse
    least = jnp.floor(size)
    chance = (bits >> jnp.uint32(8)).astype(jnp.int32).astype(jnp.float32) * 2.0**-24
    greatest = jnp.where(chance < size - least, least + 1, least)
    sign = jnp.where(jax.lax.bitcast_convert_type(x, jnp.int32) < 0, -distance, distance)
    return least * sign, greatest * sign


def _as_float(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


@checked
def unpack(tile: Any, axis: int = -1) -> jax.Array:
    """Unpack the 4-bit integers of a tile of bytes. The low half of a byte comes before the high half.

    Args:
      tile: int8 (two signed integers in each byte) or uint8 (two unsigned integers in each byte).
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
