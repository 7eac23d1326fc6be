"""Reductions and scans in Triton's interpreter: each test fails without the correction."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given

from tests.lower.triton.sources import TILE, assert_same, result, run
from tilekern.errors import InterpreterError
from tilekern.ir.types import DTYPES, F32, F64
from tilekern.testing import arrays, assert_close

pytest.importorskip("triton", reason="needs triton")

SPECIALS = (0.0, -0.0, np.nan, np.inf, -np.inf)

tiles = arrays(np.float32, (8, 8))

COMBINE = """
@triton.jit
def affine(a, b, c, d):
    ratio = c * 1
    return a * ratio, b * c + d

@triton.jit
def largest(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)

@triton.jit
def wrong(x, y):
    return (x + y).to(tl.float64)
"""


def affine(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The maps t → x[k] t + 2 x[k], one after the other, along the last dim."""
    factors, terms = x.copy(), 2 * x
    for k in range(1, x.shape[-1]):
        factors[:, k] = factors[:, k - 1] * x[:, k]
        terms[:, k] = terms[:, k - 1] * x[:, k] + 2 * x[:, k]
    return factors, terms


@given(x=arrays(np.int32, (8, 8)).map(lambda x: np.clip(x, -2, 2)))
@pytest.mark.parametrize("reverse", [False, True])
def test_pairs_are_scanned_in_order(reverse: bool, x: np.ndarray) -> None:
    stores = "tl.store(y0 + i, a)\ntl.store(y1 + i, b)"
    body = f"{TILE}a, b = tl.associative_scan((x, x * 2), 1, affine, reverse={reverse})\n{stores}"
    results = run(body, [x], [result([8, 8], "i32")] * 2, functions=COMBINE)
    step = -1 if reverse else 1
    for found, expected in zip(results, affine(x[:, ::step]), strict=True):
        assert_same(found, expected[:, ::step])


@given(x=tiles)
@pytest.mark.parametrize("reverse", [False, True])
def test_sums_are_scanned(reverse: bool, x: np.ndarray) -> None:
    (y,) = run(f"{TILE}tl.store(y0 + i, tl.cumsum(x, 0, reverse={reverse}))", [x], [result([8, 8], "f32")])
    turned = x[::-1] if reverse else x
    oracle, low = (np.cumsum(turned.astype(dtype), 0, dtype) for dtype in (F64, F32))
    assert_close(y[::-1] if reverse else y, oracle, low, length=8)


@given(x=arrays(np.float32, (8, 8), SPECIALS))
@pytest.mark.parametrize("axis", [0, 1])
def test_pairs_and_nan_are_reduced(axis: int, x: np.ndarray) -> None:
    folds = (f"tl.reduce(x, {axis}, largest)", f"tl.max(x, {axis})")
    stores = "\n".join(f"tl.store(y{n} + tl.arange(0, 8), {fold})" for n, fold in enumerate(folds))
    every, numbers = run(TILE + stores, [x], [result([8], "f32")] * 2, functions=COMBINE)
    assert_same(every, np.max(x, axis))
    assert_same(numbers, np.fmax.reduce(x, axis))


@given(x=tiles)
def test_a_tile_is_reduced_to_a_scalar_or_in_place(x: np.ndarray) -> None:
    body = f"{TILE}tl.store(y0, tl.sum(x))\ntl.store(y1 + i, x - tl.max(x, 1, keep_dims=True))\n"
    body += "tl.store(y2 + tl.arange(0, 1)[:, None], tl.max(x, keep_dims=True))"
    total, rest, largest = run(body, [x], [result([], "f32"), result([8, 8], "f32"), result([1, 1], "f32")])
    assert_close(total, x.astype(F64).sum(), x.sum(), length=64)
    assert_same(rest, x - x.max(1, keepdims=True))
    assert largest == x.max()


@given(x=arrays(DTYPES["bf16"], (64,)))
def test_a_sum_of_bfloat16_adds_numbers(x: np.ndarray) -> None:
    (y,) = run("tl.store(y0, tl.sum(tl.load(x0 + tl.arange(0, 64)), 0))", [x], [result([], "bf16")])
    steps = x
    while steps.size > 1:
        steps = np.add(*np.split(steps, 2))
    assert_close(y, x.astype(F64).sum(), steps[0])


@given(x=arrays(np.bool_, (64,)))
def test_booleans_are_counted(x: np.ndarray) -> None:
    assert run("tl.store(y0, tl.sum(tl.load(x0 + tl.arange(0, 64)), 0))", [x], [result([], "i32")])[0] == x.sum()


def test_a_combining_function_keeps_dtypes() -> None:
    with pytest.raises(InterpreterError, match="a combining function must return"):
        run(
            f"{TILE}tl.store(y0, tl.reduce(tl.sum(x, 0), 0, wrong))",
            [np.zeros((8, 8), F32)],
            [result([], "f64")],
            functions=COMBINE,
        )


@given(x=tiles)
@pytest.mark.parametrize(
    ("expression", "meaning"),
    [
        ("tl.sort(x)", np.sort),
        ("tl.flip(x, 0)", np.flipud),
        ("x.T", np.transpose),
        ("tl.permute(x, (1, 0))", np.transpose),
        ("tl.reshape(tl.trans(x), (8, 8))", np.transpose),
        ("tl.gather(x, (i // 8 + 1) % 8, 0)", lambda x: np.roll(x, -1, 0)),
    ],
)
def test_tiles_are_rearranged(expression: str, meaning: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> None:
    (y,) = run(f"{TILE}tl.store(y0 + i, {expression})", [x], [result([8, 8], "f32")])
    assert_same(y, meaning(x))


@given(x=arrays(np.int32, (8, 8)))
def test_bits_are_added(x: np.ndarray) -> None:
    (y,) = run(f"{TILE}tl.store(y0 + tl.arange(0, 8), tl.xor_sum(x, 1))", [x], [result([8], "i32")])
    assert_same(y, np.bitwise_xor.reduce(x, 1))


@given(x=tiles)
def test_tiles_are_split_and_joined(x: np.ndarray) -> None:
    body = f"{TILE}a, b = tl.split(tl.reshape(x, (8, 4, 2)))\ntl.store(y0 + i, tl.reshape(tl.join(b, a), (8, 8)))"
    (y,) = run(body, [x], [result([8, 8], "f32")])
    assert_same(y, x.reshape(8, 4, 2)[..., ::-1].reshape(8, 8))
