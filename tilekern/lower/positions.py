"""Positions of accesses, and tiles of folds, as int32 for backends that emit JAX.

A position near the array is exact, any other position is out of bounds. A position is a sum of strides times digits.
Arithmetic in int32 computes the sum modulo 2³², so a position far from the array could wrap around into it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tilekern.ir.analysis.ranges import INT32, Interval, position_interval
from tilekern.ir.core import Axis
from tilekern.ir.memory import Position

FAR = 1 << 30
"""The result of `locate` for positions outside of [-2³⁰, 2³⁰)."""

# The float32 sum of products has an error below 2³⁰ if the magnitudes of the products add up to at most this.
_ROUGH = 1 << 50
_BITS = 11
_DIGITS = 6  # of _BITS bits, for strides below 2⁶⁵


def locate(position: Position, operands: Sequence[Any], intervals: Sequence[Interval | None] | None) -> Any:
    """A position as int32: exact in [-2³⁰, 2³⁰), `FAR` elsewhere. No dim of the array is longer than `FAR`.

    Args:
      position: the position.
      operands: the numbers of its terms, int32.
      intervals: the interval of each number, or None if it is unknown; None if all are unknown.
    """
    bounds = position_interval(position, intervals) if intervals is not None else None
    total = _modulo(position, operands)
    if bounds is not None and bounds.within(-FAR, FAR):
        return total
    if _magnitude(position) > _ROUGH:
        return jnp.where(_fits(position, operands, 30), total, np.int32(FAR))
    roughly: Any = np.float32(position.const)
    for term in position.terms:
        roughly = roughly + term.digit(operands[term.operand]).astype(jnp.float32) * np.float32(term.stride)
    return jnp.where(abs(roughly) < FAR, total, np.int32(FAR))


def index(
    position: Position, operands: Sequence[Any], intervals: Sequence[Interval | None], length: int, size: int
) -> Any:
    """The position of the first of `size` lanes as int32: each lane is exact, or out of bounds of a dim of `length`.

    Args:
      position: the position.
      operands: the numbers of its terms, int32.
      intervals: the interval of each number, or None if it is unknown.
      length: the number of elements along the dim, at most 2³¹ - 1.
      size: the number of consecutive lanes.
    """
    bounds = position_interval(position, [interval or INT32 for interval in intervals])
    total = _modulo(position, operands)
    # A position that wraps around into [0, length) is at least 2³² away from it.
    if bounds is None or bounds.within(length - 2**32, 2**32 - size):
        return total
    return jnp.where(_fits(position, operands, 31), total, np.int32(INT32.low))


def tile_range(start: Any, stop: Any, axis: Axis) -> tuple[Any, Any]:
    """The tiles of a fold, from its bounds in elements: the first tile, and the tile after the last; ints from ints."""
    extent, block = np.int32(axis.extent), np.int32(axis.block)
    first = axis.first_tile(start) if isinstance(start, int) else lax.div(jnp.clip(start, 0, extent), block)
    end = axis.end_tile(stop) if isinstance(stop, int) else lax.div(jnp.clip(stop, 0, extent) + (block - 1), block)
    return first, end


def wrapped(number: int) -> np.int32:
    """A number modulo 2³²."""
    return np.int64((number + 2**31) % 2**32 - 2**31).astype(np.int32)


def _modulo(position: Position, operands: Sequence[Any]) -> Any:
    total: Any = wrapped(position.const)
    for term in position.terms:
        total = total + term.digit(operands[term.operand]) * wrapped(term.stride)
    return total


def _magnitude(position: Position) -> int:
    return abs(position.const) + sum(abs(term.stride) << 31 for term in position.terms)


def _fits(position: Position, operands: Sequence[Any], bits: int) -> Any:
    """True if a position lies in [-2^bits, 2^bits), by long multiplication in digits of 11 bits."""
    columns: list[Any] = [*_digits(position.const + (1 << bits)), 0, 0]
    for term in position.terms:
        number = term.digit(operands[term.operand])
        parts = number & (1 << _BITS) - 1, number >> _BITS & (1 << _BITS) - 1, number >> 2 * _BITS
        for j, factor in enumerate(_digits(term.stride)):
            for k, part in enumerate(parts):
                columns[j + k] = columns[j + k] + part * np.int32(factor) if factor else columns[j + k]
    carry: Any = np.int32(0)
    above: Any = np.int32(0)
    for place, column in enumerate(columns):
        carry = carry + column
        if place >= 2:
            above = above | (carry & (1 << _BITS) - 1) >> (bits + 1 - 2 * _BITS if place == 2 else 0)
        carry = carry >> _BITS
    return (above | carry) == 0


def _digits(number: int) -> Iterator[int]:
    """The digits of a number, lowest first; the last one has the number's sign."""
    for _ in range(_DIGITS - 1):
        yield number & (1 << _BITS) - 1
        number >>= _BITS
    yield number
