"""The parts of a Func by its sharding rule, interpreted one by one: together they are the Func."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any, cast

import ml_dtypes
import numpy as np

from tilekern.ir.analysis.sharding import Factor, sharding_of
from tilekern.ir.core import Array, Func, Value
from tilekern.ir.interpret import interpret
from tilekern.ir.verify import verify
from tilekern.passes.divide import divide


def assert_parts_agree(func: Func, arrays: Sequence[Any], most_parts: int = 8) -> int:
    """Assert that the parts of a Func compute the parts of its results, for each factor and number of parts.

    Results that follow a factor have the same bits. If a result is a sum over its parts, the sum of the addends is as
    near as a sum of floats in another order.

    Args:
      func: as it was traced.
      arrays: its inputs.
      most_parts: the greatest number of parts.

    Returns:
      How many pairs of a factor and a number of parts were compared.

    Raises:
      AssertionError: with the Func, the factor and the number of parts.
    """
    whole, count = interpret(func, *arrays, orders=1), 0
    for factor in sharding_of(func).factors:
        common = gcd(*factor.sizes)
        for parts in (n for n in range(2, most_parts + 1) if common and common % n == 0):
            _compare(func, factor, parts, arrays, whole)
            count += 1
    return count


def _compare(func: Func, factor: Factor, parts: int, arrays: Sequence[Any], whole: Sequence[Array]) -> None:
    part = divide(func, {factor: parts})
    verify(part)
    results = [
        interpret(
            part, *(_slice(func, factor, p, x, n, parts) for p, x in zip(func.inputs, arrays, strict=True)), orders=1
        )
        for n in range(parts)
    ]
    for param, expected, *of_parts in zip(func.outputs, whole, *results, strict=True):
        where = f"{param.name} of {parts} parts of {factor.name} in\n{func}"
        if func.params.index(param) in factor.addends:
            assert _is_near(expected, of_parts), f"the sum is {sum(of_parts)}, should be {expected}: {where}"
            continue
        dim = next((n for number, n in factor.dims if func.params[number] is param), None)
        joined = of_parts[0] if dim is None else np.concatenate(of_parts, dim)
        same = (joined == expected) | ((joined != joined) & (expected != expected))
        assert same.all(), f"{joined[~same][:4]} should be {expected[~same][:4]}: {where}"


def _slice(func: Func, factor: Factor, param: Value, array: Any, part: int, parts: int) -> Array:
    """The part of an input."""
    dims = [n for number, n in factor.dims if func.params[number] is param]
    return np.split(np.asarray(array), parts, dims[0])[part] if dims else np.asarray(array)


def _is_near(expected: Array, addends: Sequence[Array]) -> bool:
    """True if a sum is one of the addends: as far from it as 64 roundings of the greatest number, or of 1.

    NaN and infinities are near to each other, for the order decides which of both a sum becomes.
    """
    wide, exact = np.stack(addends).astype(np.float64), expected.astype(np.float64)
    with np.errstate(all="ignore"):
        finite = np.isfinite(exact) & np.isfinite(wide).all(0)
        greatest = np.abs(np.where(finite, wide, 0)).max(initial=1)
        near = np.abs(wide.sum(0) - exact) <= 64 * float(cast(Any, ml_dtypes.finfo(expected.dtype)).eps) * greatest
    return bool((near | ~finite).all())
