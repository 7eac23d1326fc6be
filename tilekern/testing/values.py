"""Arrays of numbers of a kind, by a seed: ordinary ones, tiny or huge ones, NaN and infinities, equal rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast, get_args

import ml_dtypes
import numpy as np

from tilekern.errors import ArgumentError
from tilekern.ir.core import Array
from tilekern.ir.types import DTYPES, FOUR_BITS, DType, is_float8, kind_of

Numbers = Literal["normal", "equal rows", "zeros", "tiny", "huge", "specials", "positive"]
NUMBERS: tuple[Numbers, ...] = get_args(Numbers)
"""The kinds of numbers, the simplest one first."""

# One element in so many is NaN or infinite.
_SPECIAL = 10

# So many integers at most are wide: too few to make sums overflow.
_MOST_WIDE = 8


def values(numbers: Numbers, dtype: Any, shape: Sequence[int], seed: int = 0) -> Array:
    """Random numbers.

    Args:
      numbers: "normal": standard normal. "equal rows": the first row (of the last dim) again and again. "zeros".
        "tiny" and "huge": normal times a power of two whose square the dtype can just hold. "specials": normal, one
        number in ten NaN or infinite, as far as the dtype has these. "positive": from 1 to 9/8, so that long sums grow
        until a narrow float loses a share of each addend. Integers are from -2 to one above the largest dim in all of
        these, so that they can be indices, labels and lengths. Among "positive" ones of at least 32 bits a few are odd
        numbers above 2²⁴, which float32 does not hold. Bools are fair coins.
      dtype: a dtype, or its name, "f32" or "float32".
      shape: of the array.
      seed: of the numbers.

    Raises:
      ArgumentError: there are no such numbers, or no such dtype.
    """
    if numbers not in NUMBERS:
        raise ArgumentError(
            "there are no such numbers",
            expected=f"one of {', '.join(map(repr, NUMBERS))}",
            got=f"numbers = {numbers!r}",
            fix="name one of these",
        )
    kind, shape = dtype_of(dtype), tuple(shape)
    random = np.random.default_rng(seed)
    if numbers == "equal rows" and shape and shape[0] > 1:
        row = _numbers("normal", kind, shape[-1:], random, max(shape))
        return np.array(np.broadcast_to(row, shape))
    return _numbers(numbers, kind, shape, random, max(shape, default=1))


def _numbers(numbers: Numbers, dtype: DType, shape: tuple[int, ...], random: Any, largest: int) -> Array:
    base = FOUR_BITS.get(dtype, dtype)
    if kind_of(base) == "bool":
        return np.asarray(random.random(shape) < 0.5)
    if kind_of(base) != "float":
        least, most = _range(dtype)
        integers = np.asarray(random.integers(max(-2, least), min(largest + 1, most), shape, endpoint=True))
        if numbers == "positive" and most > 1 << 25 and integers.size:
            wide = random.integers(integers.size, size=min(_MOST_WIDE, integers.size))
            integers.reshape(-1)[wide] = (1 << 24) + 2 * random.integers(128, size=len(wide)) + 1
        return integers.astype(dtype)
    if numbers == "zeros":
        return np.zeros(shape, dtype)
    if numbers == "positive":
        return np.asarray(random.uniform(1, 1.125, shape)).astype(dtype)
    floats: Array = random.standard_normal(shape) * _scale(numbers, base)
    if numbers == "specials" and dtype not in FOUR_BITS:
        odd = [np.nan] if is_float8(dtype) else [np.nan, np.inf, -np.inf]
        floats = np.where(random.random(shape) < 1 / _SPECIAL, random.choice(odd, shape), floats)
    return np.asarray(floats).astype(dtype)


def _range(dtype: DType) -> tuple[int, int]:
    info = cast(Any, ml_dtypes.iinfo(dtype))
    return int(info.min), int(info.max)


def _scale(numbers: Numbers, dtype: DType) -> float:
    if numbers not in ("tiny", "huge"):
        return 1.0
    info = cast(Any, ml_dtypes.finfo(dtype))
    return 2.0 ** (int(info.minexp) // 2 if numbers == "tiny" else int(info.maxexp) // 2 - 2)


def dtype_of(dtype: Any) -> DType:
    """The dtype of a name of ours or NumPy's.

    Raises:
      ArgumentError: the language does not have it.
    """
    try:
        resolved = DTYPES[dtype] if isinstance(dtype, str) and dtype in DTYPES else np.dtype(_by_name(dtype))
    except TypeError:
        resolved = None
    if resolved is None or (resolved not in DTYPES.values() and resolved not in FOUR_BITS):
        raise ArgumentError(
            "the language has no such dtype",
            expected=f"one of {', '.join(DTYPES)}, or a name of NumPy or JAX",
            got=f"dtype = {dtype!r}",
            fix='write, for example, "f32"',
        )
    return resolved


def _by_name(dtype: Any) -> Any:
    return getattr(ml_dtypes, dtype, dtype) if isinstance(dtype, str) else dtype
