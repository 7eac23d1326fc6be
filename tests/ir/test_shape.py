from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from tests.ir.funcs import evaluate
from tilekern.errors import VerifyError
from tilekern.ir.core import Op, Value
from tilekern.ir.shape import Broadcast, Concatenate, Iota, Pad, Reshape, Reverse, Slice, Transpose
from tilekern.ir.types import BF16, BOOL, DTYPES, F32, I32, TileType

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
FULL = st.lists(st.integers(1, 4), max_size=3).map(tuple)
Index = tuple[int, ...]


def numbered(shape: Index) -> np.ndarray:
    """Different elements, so that a moved one is known."""
    return np.arange(1, np.prod(shape, dtype=int) + 1, dtype=np.int32).reshape(shape)


def assert_moves(got: np.ndarray, x: np.ndarray, shape: Index, source: Callable[[Index], Index]) -> None:
    """Element i of the result is element `source(i)` of x."""
    assert got.shape == shape
    for i in np.ndindex(shape):
        assert got[i] == x[source(i)]


@given(st.data(), SHAPES)
def test_broadcast(data: Any, shape: Index) -> None:
    dims = tuple(i for i, keep in enumerate(data.draw(st.lists(st.booleans(), max_size=4))) if keep)[: len(shape)]
    x = numbered(shape[: len(dims)])
    result = data.draw(st.lists(st.integers(0, 3), min_size=max(dims, default=-1) + 1, max_size=5))
    for n, d in zip(x.shape, dims, strict=True):
        result[d] = data.draw(st.integers(0, 3)) if n == 1 else n
    got = evaluate(Broadcast, x, shape=tuple(result), dims=dims)
    assert_moves(
        got, x, tuple(result), lambda i: tuple(i[d] if n > 1 else 0 for n, d in zip(x.shape, dims, strict=True))
    )


@given(FULL, st.randoms())
def test_reshape(shape: Index, random: Any) -> None:
    x = numbered(shape)
    other = [*shape, 1]
    random.shuffle(other)
    merged = (other[0] * other[1], *other[2:]) if len(other) > 1 else tuple(other)
    got = evaluate(Reshape, x.T.copy().T, shape=merged)
    assert got.shape == merged and got.ravel().tolist() == x.ravel().tolist()


@given(st.data(), SHAPES)
def test_transpose(data: Any, shape: Index) -> None:
    x, order = numbered(shape), tuple(data.draw(st.permutations(range(len(shape)))))
    got = evaluate(Transpose, x, permutation=order)
    assert_moves(got, x, tuple(shape[d] for d in order), lambda i: tuple(i[order.index(d)] for d in range(len(shape))))


@given(st.data(), FULL.filter(bool), st.sampled_from(["i32", "i8", "f32", "bf16", "u16"]))
def test_iota(data: Any, shape: Index, dtype: str) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    got = evaluate(Iota, shape=shape, dtype=DTYPES[dtype], dim=dim)
    assert got.shape == shape and got.dtype == DTYPES[dtype]
    assert all(got[i] == i[dim] for i in np.ndindex(shape))


@given(st.data(), SHAPES)
def test_slice(data: Any, shape: Index) -> None:
    bounds = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in shape]
    stride = tuple(data.draw(st.integers(1, 3)) for _ in shape)
    start, stop = (tuple(b[side] for b in bounds) for side in (0, 1))
    x = numbered(shape)
    result = tuple((b - a + s - 1) // s for (a, b), s in zip(bounds, stride, strict=True))
    got = evaluate(Slice, x, start=start, stop=stop, stride=stride)
    assert_moves(got, x, result, lambda i: tuple(a + n * s for a, n, s in zip(start, i, stride, strict=True)))


@given(st.data(), SHAPES.filter(bool), st.lists(st.integers(0, 3), min_size=1, max_size=3))
def test_concatenate(data: Any, shape: Index, sizes: list[int]) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    xs = [100 * n + numbered((*shape[:dim], size, *shape[dim + 1 :])) for n, size in enumerate(sizes)]
    got = evaluate(Concatenate, *xs, dim=dim)
    assert got.shape == (*shape[:dim], sum(sizes), *shape[dim + 1 :])
    parts = [got.take(range(sum(sizes[:n]), sum(sizes[: n + 1])), axis=dim) for n in range(len(sizes))]
    assert all((part == x).all() for part, x in zip(parts, xs, strict=True))


PADDING = st.tuples(st.integers(0, 4), st.integers(-6, 4), st.integers(-6, 4), st.integers(0, 2)).filter(
    lambda p: p[0] + max(p[0] - 1, 0) * p[3] + p[1] + p[2] >= 0
)


@given(st.lists(PADDING, max_size=2))
def test_pad(dims: list[tuple[int, int, int, int]]) -> None:
    shape, low, high, interior = tuple(zip(*dims, strict=True)) or ((),) * 4
    x = numbered(shape)
    got = evaluate(Pad, x, np.int32(-7), low=low, high=high, interior=interior)
    size = tuple(n + max(n - 1, 0) * i + lo + hi for n, lo, hi, i in dims)
    assert got.shape == size
    for index in np.ndindex(size):
        places = [divmod(p - lo, i + 1) for p, (_, lo, _, i) in zip(index, dims, strict=True)]
        inside = all(0 <= q < n and r == 0 for (q, r), n in zip(places, shape, strict=True))
        assert got[index] == (x[tuple(q for q, _ in places)] if inside else -7)


@pytest.mark.parametrize("dtype", [F32, BF16, I32])
@pytest.mark.parametrize(
    ("low", "high", "interior"), [(0, 0, 0), (2, 1, 1), (-1, -1, 2), (-3, 4, 0), (4, -6, 0), (-5, 4, 0), (-2, -2, 2)]
)
def test_pad_is_that_of_jax(dtype: Any, low: int, high: int, interior: int) -> None:
    x, fill = np.arange(1, 4).astype(dtype), np.asarray(9, dtype)
    got = evaluate(Pad, x, fill, low=(low,), high=(high,), interior=(interior,))
    np.testing.assert_array_equal(got, lax.pad(jnp.asarray(x), jnp.asarray(fill), [(low, high, interior)]))


@given(st.data(), SHAPES)
def test_reverse(data: Any, shape: Index) -> None:
    dims = tuple(data.draw(st.sets(st.sampled_from(range(len(shape)))))) if shape else ()
    x = numbered(shape)
    got = evaluate(Reverse, x, dims=dims)
    assert_moves(got, x, shape, lambda i: tuple(shape[d] - 1 - n if d in dims else n for d, n in enumerate(i)))


X, SCALAR = Value(TileType((2, 3), F32)), Value(TileType((), F32))


@pytest.mark.parametrize(
    ("kind", "operands", "fields", "message"),
    [
        (Broadcast, (X, X), {"shape": (2, 3), "dims": (0, 1)}, "broadcast takes 1 operands, got 2"),
        (Broadcast, (X,), {"shape": (2, 3), "dims": (0,)}, "needs one dim each"),
        (Broadcast, (X,), {"shape": (2, 3), "dims": (1, 0)}, "must increase"),
        (Broadcast, (X,), {"shape": (2, 3), "dims": (0, 2)}, "leave"),
        (Broadcast, (X,), {"shape": (2, 4), "dims": (0, 1)}, "does not broadcast"),
        (Reshape, (X,), {"shape": (5,)}, "cannot be reshaped"),
        (Reshape, (), {"shape": (5,)}, "reshape takes 1 operands, got 0"),
        (Transpose, (X,), {"permutation": (0, 0)}, "no permutation"),
        (Transpose, (X,), {"permutation": (0,)}, "no permutation"),
        (Iota, (X,), {"shape": (2,), "dtype": I32, "dim": 0}, "no operand"),
        (Iota, (), {"shape": (2,), "dtype": I32, "dim": 1}, "along dim 1"),
        (Iota, (), {"shape": (2,), "dtype": BOOL, "dim": 0}, "does not accept bool"),
        (Slice, (X,), {"start": (0,), "stop": (1, 1), "stride": (1, 1)}, "bounds for every dim"),
        (Slice, (X,), {"start": (0, 0), "stop": (1, 4), "stride": (1, 1)}, "leaves"),
        (Slice, (X,), {"start": (0, 2), "stop": (1, 1), "stride": (1, 1)}, "leaves"),
        (Slice, (X,), {"start": (0, -1), "stop": (1, 1), "stride": (1, 1)}, "leaves"),
        (Slice, (X,), {"start": (0, 0), "stop": (1, 1), "stride": (1, 0)}, "leaves"),
        (Concatenate, (), {"dim": 0}, "at least one"),
        (Concatenate, (X,), {"dim": 2}, "along dim 2"),
        (Concatenate, (X, SCALAR), {"dim": 0}, "equal dtypes and other dims"),
        (Concatenate, (X, Value(TileType((2, 4), F32))), {"dim": 0}, "equal dtypes and other dims"),
        (Concatenate, (X, Value(TileType((2, 3), I32))), {"dim": 0}, "equal dtypes and other dims"),
        (Pad, (X,), {"low": (0, 0), "high": (0, 0), "interior": (0, 0)}, "pad takes 2 operands, got 1"),
        (Pad, (X, X), {"low": (0, 0), "high": (0, 0), "interior": (0, 0)}, "must be a scalar"),
        (Pad, (X, SCALAR), {"low": (0,), "high": (0, 0), "interior": (0, 0)}, "amounts for every dim"),
        (Pad, (X, SCALAR), {"low": (0, 0), "high": (0, 0), "interior": (0, -1)}, "must not be negative"),
        (Pad, (X, SCALAR), {"low": (-1, 0), "high": (-2, 0), "interior": (0, 0)}, "negative size"),
        (Reverse, (X,), {"dims": (2,)}, "not different dims"),
        (Reverse, (X,), {"dims": (1, 1)}, "not different dims"),
    ],
)
def test_type_rules(kind: type[Op], operands: tuple[Value, ...], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        kind(operands=operands, **fields)
