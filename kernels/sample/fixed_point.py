"""Logarithms and powers of 2 in integers, whose bits are the same on every machine.

Floats differ between machines in their last bit: each has its own `log`, and a compiler may fuse a product with a sum.
A token that is drawn must not depend on that. All functions take scalars, arrays and tiles. A fraction is a uint32 in
units of 2^-32, a logarithm an int32 in units of 2^-20 (`UNIT`).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

UNIT = 20
"""The bits of a logarithm behind its point."""

WEIGHT = 29
"""The bits of the largest weight, 2^29: 2^19 of them have a sum below 2^48."""


def _scaled(bits: int, coefficients: Sequence[float]) -> tuple[int, ...]:
    return tuple(round(c * 2.0**bits) for c in coefficients)


# Polynomials in x, 0 <= x < 1, by interpolation at Chebyshev points; all sums and differences stay positive.
# log2(1 + x) / x in units of 2^-30, with alternating signs; x times its error is below 2^-22.
_LOG = _scaled(
    30, (1.44269472, 0.72130676, 0.48001246, 0.35309635, 0.25517635, 0.15415201, 0.06274843, 0.01207702)
)  # fmt: skip
# log2(-ln(1 - x / 2) / (x / 2)) / x in units of 2^-32, by least squares with positive signs; the error is below 2^-22.
_RATIO = _scaled(
    32, (0.36067385, 0.07513223, 0.02265505, 0.00730524, 0.00410028, 0.00045123, 0.0, 0.00091559)
)  # fmt: skip
# (2^x - 1) / x in units of 2^-32; the error is below 2^-26.
_POWER = _scaled(32, (0.693147171, 0.240227204, 0.0554960236, 0.00965219506, 0.00126921661, 0.000208179150))
# -log2(ln 2) in units of 2^-20.
_LOG_OF_LN_2 = round(0.5287663729448977 * 2**UNIT)


def high(a: jax.Array, b: jax.Array) -> jax.Array:
    """The upper 32 bits of the product of uint32s, too small by up to 2: products of 16 bits, without the lowest."""
    mask = jnp.uint32(0xFFFF)
    upper_a, upper_b = a >> 16, b >> 16
    return upper_a * upper_b + (upper_a * (b & mask) >> 16) + ((a & mask) * upper_b >> 16)


def log2(n: jax.Array) -> jax.Array:
    """log2 of a uint32 n > 0, within 2^-19, as int32 in units of 2^-20."""
    zeros = lax.clz(n)
    x = (n << zeros) << 1  # n 2^zeros is 2^31 (1 + x)
    factor = jnp.full_like(x, _LOG[-1])
    for coefficient in _LOG[-2::-1]:
        factor = jnp.uint32(coefficient) - high(factor, x)
    fraction = high(factor, x) >> (30 - UNIT)
    return ((31 - zeros.astype(jnp.int32)) << UNIT) + fraction.astype(jnp.int32)


def gumbel(bits: jax.Array) -> jax.Array:
    """The number of the standard Gumbel distribution, in units of ln 2, that 32 bits stand for: int32, from -4.5 to 32.

    It is -log2(-ln(1 - v)) of v = (bits | 1) / 2^32. If v < 1/2, -ln(1 - v) is v times a ratio close to 1, whose
    logarithm is a polynomial: a small v has many digits. Otherwise the logarithm is taken twice.
    """
    v = bits | jnp.uint32(1)
    is_small = v < jnp.uint32(1 << 31)
    first = (32 << UNIT) - log2(jnp.where(is_small, v, ~v + jnp.uint32(1)))  # -log2 of v, or of 1 - v
    x = v << 1
    factor = jnp.full_like(x, _RATIO[-1])
    for coefficient in _RATIO[-2::-1]:
        factor = jnp.uint32(coefficient) + high(factor, x)
    of_small = first - (high(factor, x) >> (32 - UNIT)).astype(jnp.int32)
    of_large = (UNIT << UNIT) - log2(first.astype(jnp.uint32)) + _LOG_OF_LN_2
    return jnp.where(is_small, of_small, of_large)


def power(exponent: jax.Array) -> jax.Array:
    """2^29 2^exponent, within 8, as uint32, of an int32 exponent <= 0 in units of 2^-20; 0 from 2^-31 down."""
    whole, fraction = exponent >> UNIT, exponent & ((1 << UNIT) - 1)
    x = fraction.astype(jnp.uint32) << (32 - UNIT)
    factor = jnp.full_like(x, _POWER[-1])
    for coefficient in _POWER[-2::-1]:
        factor = jnp.uint32(coefficient) + high(factor, x)
    mantissa = jnp.uint32(1 << WEIGHT) + (high(factor, x) >> (32 - WEIGHT))
    shift = jnp.minimum(-whole, 31).astype(jnp.uint32)
    return mantissa >> shift


def ordered(x: jax.Array) -> jax.Array:
    """Maps float32 to int32 in the same order; -0 is 0, and NaN is -inf."""
    x = jnp.where(x == 0, jnp.float32(0), jnp.where(jnp.isnan(x), -jnp.inf, x))
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))


def from_ordered(key: jax.Array) -> jax.Array:
    """The float32 that `ordered` maps to a key."""
    return lax.bitcast_convert_type(key ^ ((key >> 31) & jnp.int32(0x7FFFFFFF)), jnp.float32)


LOWEST = -(2**31) + 0x007FFFFF
"""`ordered` of -inf."""
