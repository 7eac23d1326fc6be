"""The prelude: it holds the functions that a kernel calls, and they compute the right results."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ir.funcs import assert_same
from tests.lower.triton.sources import result, run
from tilekern.lower.triton.emit.prelude import prelude, reserved

ALL = ["maximum", "minimum", "add", "multiply", "bitwise_and", "bitwise_or", "bitwise_xor", "first", "log_add_exp"]
ALL += ["arg_maximum", "arg_minimum", "floor_divide", "floor_remainder", "sort1", "least12"]


def functions(text: str) -> list[str]:
    return [f.name for f in ast.parse(prelude(text)).body if isinstance(f, ast.FunctionDef)]


@given(names=st.lists(st.sampled_from(ALL), unique=True))
def test_what_is_called_and_what_that_calls(names: list[str]) -> None:
    text = "\n".join(f"y = {name}(x)" for name in names)
    also = {"maximum", "minimum"} if "log_add_exp" in names else set[str]()
    also |= {"merge1", "exchange1"} if "sort1" in names else set[str]()
    also |= {"merge12", "exchange12", "lesser12"} if "least12" in names else set[str]()
    also |= {"lane_bit", "lane_numbers"} if {"sort1", "least12"} & set(names) else set[str]()
    assert set(functions(text)) == {*names, *also}
    assert len(functions(text)) == len(set(functions(text)))
    assert prelude(text) == prelude("\n".join(reversed(text.split("\n"))))


def test_attributes_and_longer_names_are_no_calls() -> None:
    assert functions("y = tl.maximum(x, 0) + my_add + add_2 + x.first + sort + tl.sort2(x) + my_sort2(x)") == []


def test_reserved_names() -> None:
    assert all(map(reserved, ALL)) and not any(map(reserved, ["x", "sort", "sort0", "maximum_2", "sorted1"]))


# --- what they compute ----------------------------------------------------------------------------------------------

pytest.importorskip("triton", reason="needs triton")

X = np.array([1, -1, np.nan, np.inf, -np.inf, 0, -0.0, 5], np.float32)


def reduced(function: str, x: np.ndarray, oracle: Any) -> None:
    """Combine all pairs of elements."""
    a, b = (m.reshape(-1) for m in np.meshgrid(x, x))
    body = f"i = tl.arange(0, {a.size})\ntl.store(y0 + i, {function}(tl.load(x0 + i), tl.load(x1 + i)))"
    (found,) = run(body, [a, b], [result(a.shape, {"f": "f32", "i": "i32"}[x.dtype.kind])], functions=prelude(function))
    with np.errstate(all="ignore"):
        assert_same(found, oracle(a, b).astype(x.dtype), zeros=False)


def test_extremes_pass_nan_on() -> None:
    reduced("maximum", X, np.maximum)
    reduced("minimum", X, np.minimum)


def test_log_add_exp() -> None:
    a, b = (m.reshape(-1) for m in np.meshgrid(X, X))
    body = "i = tl.arange(0, 64)\ntl.store(y0 + i, log_add_exp(tl.load(x0 + i), tl.load(x1 + i)))"
    (found,) = run(body, [a, b], [result((64,), "f32")], functions=prelude("log_add_exp"))
    with np.errstate(all="ignore"):
        expected = np.logaddexp(a.astype(np.float64), b.astype(np.float64))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("n", [1, 3, 64, 2**20 + 1])
def test_division_rounds_down(n: int) -> None:
    rng = np.random.default_rng(n)
    x = np.concatenate([np.arange(-20, 21), [-(2**31), -(2**31) + 1, 2**31 - 1], rng.integers(-(2**31), 2**31, 20)])
    x = x.astype(np.int32)
    body = f"""
i = tl.arange(0, 64)
tl.store(y0 + i, floor_divide(tl.load(x0 + i), {n}))
tl.store(y1 + i, floor_remainder(tl.load(x0 + i), {n}))"""
    quotient, rest = run(body, [x], [result((64,), "i32")] * 2, functions=prelude("floor_divide floor_remainder"))
    np.testing.assert_array_equal(quotient, x.astype(np.int64) // n)
    np.testing.assert_array_equal(rest, x.astype(np.int64) % n)
