"""One tolerance rule for numeric results, derived from a float64 oracle.

The rule is that of FlashAttention's tests (https://github.com/Dao-AILab/flash-attention): a kernel may be as wrong as
twice the naive computation in the dtype of its input. No tolerance is chosen by hand.

    inputs = (q, k, v)
    oracle, _ = in_float64(reference, *inputs)
    low, _ = reference(*inputs, dtype=q.dtype)
    assert_close(flash_attention(*inputs), oracle, low, length=keys)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tilekern import _jax
from tilekern.ir.core import Array
from tilekern.ir.types import F64, DType, accumulator, dtype_name, kind_of

# Types of arguments that `in_float64` traces, so that one compiled oracle serves all values.
_TRACED = (int, float, np.ndarray, jax.Array)


# --- the rule -------------------------------------------------------------------------------------------------------


def assert_close(out: Any, oracle: Any, low: Any, *, length: int = 1, factor: float = 2.0) -> None:
    """Assert max|out - oracle| <= factor * max|low - oracle| + ε, and NaN and ±inf exactly where the oracle has them.

    Args:
      out: the result under test, of a float dtype.
      oracle: the same in float64, from `in_float64`.
      low: the same by the naive computation in the dtype of the inputs; of the dtype that `out` must have.
      length: how many terms the longest sum behind an element has.
      factor: how many times the naive error is allowed; gradients take 3.

    Raises:
      AssertionError: with the worst element, its index, both errors and the bound.
    """
    out, oracle, low = (np.asarray(x) for x in (out, oracle, low))
    named = {"out": out, "oracle": oracle, "low": low}
    shown = ", ".join(f"{name} {dtype_name(x.dtype)}{list(x.shape)}" for name, x in named.items())
    _require(out.shape == oracle.shape == low.shape, f"shapes differ: {shown}")
    _require(oracle.dtype == F64, f"the oracle must be f64: {shown}")
    _require(kind_of(out.dtype) == "float" and out.dtype == low.dtype, f"out must have the float dtype of low: {shown}")
    expected = _rounded(oracle, out.dtype)
    _require_same_specials(out, expected)

    naive = _errors(low, oracle, np.isfinite(expected))
    error, bound = _errors(out, oracle, np.isfinite(expected)), bound_of(oracle, low, length=length, factor=factor)
    if error.max(initial=0.0) <= bound:
        return
    worst = np.unravel_index(int(error.argmax()), error.shape)
    raise AssertionError(
        f"out {dtype_name(out.dtype)}{list(out.shape)} is too far from the oracle\n"
        f"  worst element: out{_at(worst)} = {float(out[worst])!r}, oracle {float(oracle[worst])!r}\n"
        f"  error: {error[worst]:.3e}; of the naive computation: {naive[worst]:.3e} there, {naive.max():.3e} at most\n"
        f"  bound: {bound:.3e} = {factor:g} * {naive.max():.3e} + {bound - factor * naive.max():.3e} (rounding)\n"
        f"  too far: {np.count_nonzero(error > bound)} of {error.size} elements"
    )


def bound_of(oracle: Array, low: Array, *, length: int = 1, factor: float = 2.0) -> float:
    """The largest error that the rule allows: `factor` times that of `low`, and the rounding of the largest element."""
    finite = np.isfinite(_rounded(oracle, low.dtype))
    largest = float(np.max(np.abs(oracle), where=finite, initial=0.0))
    return factor * float(_errors(low, oracle, finite).max(initial=0.0)) + _rounding(low.dtype, length) * largest


def errors(out: Array, oracle: Array) -> Array:
    """|out - oracle| where the oracle is finite in the dtype of `out`; elsewhere 0 where both agree, else infinity."""
    expected = _rounded(oracle, out.dtype)
    error = _errors(out, oracle, np.isfinite(expected))
    return np.where(_same_specials(out, expected), error, np.inf)


def _rounded(oracle: Array, dtype: DType) -> Array:
    with np.errstate(over="ignore"):  # what is finite in float64 may be too large for the dtype of the result
        return oracle.astype(dtype)


def _errors(values: Array, oracle: Array, finite: Array) -> Array:
    """|values - oracle|, and 0 where the oracle is not finite or the values (the naive computation's) overflowed."""
    values = values.astype(F64)
    both = finite & np.isfinite(values)
    return np.abs(np.where(both, values, 0) - np.where(both, oracle, 0))


def _rounding(dtype: DType, length: int) -> float:
    """ε as a part of the largest element: the relative error that even the best computation has.

    The naive error may be zero by luck, but the result is rounded to its dtype, by at most half the machine epsilon.
    Before that, n terms are accumulated in some order with unit roundoff w. With independent terms of size 1 a partial
    sum of k has size √k, so step k rounds by at most w √k; these errors are independent, too, and add up to
    w √(1 + 2 + … + n) ≈ w n / √2, where the whole sum has size √n: an error of w √(n / 2) relative to it. We allow four
    times that, four standard deviations, as there are many elements.

    The oracle of a float64 result has rounded as often as the result, so there both errors count.
    """
    once = unit_roundoff(dtype) + 4 * unit_roundoff(accumulator(dtype)) * math.sqrt(max(length, 1) / 2)
    return 2 * once if dtype == F64 else once


def unit_roundoff(dtype: DType) -> float:
    """The largest relative error of rounding to nearest."""
    return float(np.spacing(np.ones((), dtype))) / 2


def _require_same_specials(out: Array, expected: Array) -> None:
    """NaN and ±inf stand where the oracle has them, and nowhere else."""
    same = _same_specials(out, expected)
    if same.all():
        return
    first = np.unravel_index(int(same.argmin()), same.shape)
    raise AssertionError(
        "NaN and ±inf must be where the oracle has them\n"
        f"  first element: out{_at(first)} = {float(out[first])!r}, oracle {float(expected[first])!r}\n"
        f"  different: {np.count_nonzero(~same)} of {same.size} elements"
    )


def _same_specials(out: Array, expected: Array) -> Array:
    return (out == expected) | (np.isfinite(out) & np.isfinite(expected)) | (np.isnan(out) & np.isnan(expected))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _at(index: Sequence[Any]) -> str:
    return str([int(i) for i in index])


def in_float64(reference: Callable[..., Any], *arrays: Any, **keywords: Any) -> Any:
    """The oracle: `reference` on float64 copies of the float arrays, with 64-bit types on.

    Keywords that are arrays or numbers are passed as such, all others are static. Returns the results as NumPy arrays.
    """
    with jax.enable_x64(True):
        wide = [np.asarray(a).astype(F64) if kind_of(np.asarray(a).dtype) == "float" else a for a in arrays]
        static = [n for n, v in keywords.items() if isinstance(v, bool) or not isinstance(v, _TRACED)]
        oracle = jax.jit(reference, static_argnames=static, compiler_options=_jax.UNOPTIMIZED)
        return jax.tree.map(np.asarray, oracle(*wide, **keywords))
