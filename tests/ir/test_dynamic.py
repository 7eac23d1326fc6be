from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from tests.ir.funcs import assert_same, evaluate
from tilekern.errors import VerifyError
from tilekern.ir.core import Op, Value
from tilekern.ir.dynamic import DynamicSlice, DynamicUpdateSlice, Take
from tilekern.ir.types import BF16, DTYPES, F32, I32, INDEX, TileType

PLACES = st.integers(-6, 9) | st.sampled_from([-(2**31), 2**31 - 1])


def numbered(shape: tuple[int, ...], start: int = 0) -> np.ndarray:
    """Different numbers."""
    return np.arange(start, start + int(np.prod(shape))).reshape(shape).astype(np.int16)


def value(shape: tuple[int, ...] = (2,), dtype: Any = F32) -> Value:
    return Value(TileType(shape, dtype))


def rejected(message: str, kind: type[Op], *operands: Value, **fields: Any) -> None:
    with pytest.raises(VerifyError, match=message):
        kind(operands=operands, **fields)


@st.composite
def windows(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...], list[np.ndarray]]:
    """A shape, the sizes of a part of it, and starts anywhere."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    sizes = tuple(draw(st.integers(0, n)) for n in shape)
    return shape, sizes, [np.array(draw(PLACES), np.int32) for _ in shape]


def place(index: tuple[int, ...], starts: Any, shape: Any, sizes: Any) -> tuple[int, ...]:
    """The index in the whole of the element at `index` of a window."""
    bounds = zip(index, map(int, starts), shape, sizes, strict=True)
    return tuple(i + max(0, min(s, n - size)) for i, s, n, size in bounds)


@given(windows())
def test_dynamic_slice_and_update(case: Any) -> None:
    shape, sizes, starts = case
    x, update = numbered(shape), numbered(sizes, start=1000)
    part = evaluate(DynamicSlice, x, *starts, sizes=sizes)
    given_x = x.copy()
    changed = evaluate(DynamicUpdateSlice, x, update, *starts)
    assert_same(x, given_x)
    inside = {place(index, starts, shape, sizes): index for index in np.ndindex(*sizes)}
    for index in np.ndindex(*shape):
        if index in inside:
            assert part[inside[index]] == x[index] and changed[index] == update[inside[index]]
        else:
            assert changed[index] == x[index]
    assert part.shape == sizes and changed.shape == shape


@given(st.lists(st.integers(0, 4), min_size=1, max_size=3), st.data())
def test_take(shape: list[int], data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    shape[dim] += 1
    lanes = tuple(data.draw(st.lists(st.integers(0, 3), max_size=2)))
    count = int(np.prod(lanes))
    indices = np.array(data.draw(st.lists(PLACES, min_size=count, max_size=count)), np.int32).reshape(lanes)
    x = numbered(tuple(shape))
    got = evaluate(Take, x, indices, dim=dim)
    assert got.shape == (*shape[:dim], *lanes, *shape[dim + 1 :])
    for index in np.ndindex(*got.shape):
        lane = index[dim : dim + len(lanes)]
        at = max(0, min(int(indices[lane]), shape[dim] - 1))
        assert got[index] == x[(*index[:dim], at, *index[dim + len(lanes) :])]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=3), st.data())
def test_take_along(shape: list[int], data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    shape[dim] += 1
    lanes = (*shape[:dim], data.draw(st.integers(0, 4)), *shape[dim + 1 :])
    count = int(np.prod(lanes))
    indices = np.array(data.draw(st.lists(PLACES, min_size=count, max_size=count)), np.int32).reshape(lanes)
    x = numbered(tuple(shape))
    got = evaluate(Take, x, indices, dim=dim, along=True)
    assert got.shape == lanes
    for index in np.ndindex(*lanes):
        at = max(0, min(int(indices[index]), shape[dim] - 1))
        assert got[index] == x[(*index[:dim], at, *index[dim + 1 :])]


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_moves_unchanged(name: str) -> None:
    x = numbered((3, 4)).astype(DTYPES[name])
    two, far = np.int32(2), np.int32(99)
    starts = (np.asarray(two), np.asarray(far))
    assert_same(evaluate(DynamicSlice, x, *starts, sizes=(1, 2)), x[2:3, 2:])
    assert_same(evaluate(DynamicUpdateSlice, x, x[:1, :2], *starts)[2:3, 2:], x[:1, :2])
    assert_same(evaluate(Take, x, np.array([3, 0], np.int32), dim=1), x[:, [3, 0]])


@pytest.mark.parametrize("start", [-(2**31), -1, 0, 1, 2, 3, 2**31 - 1])
def test_clamping_is_that_of_jax(start: int) -> None:
    x, update, at = numbered((4,)), numbered((2,), 50), np.asarray(start, np.int32)
    # By default JAX counts negative starts from the end before it clamps.
    part = lax.dynamic_slice(x, (at,), (2,), allow_negative_indices=False)
    changed = lax.dynamic_update_slice(x, update, (at,), allow_negative_indices=False)
    assert_same(evaluate(DynamicSlice, x, at, sizes=(2,)), np.asarray(part))
    assert_same(evaluate(DynamicUpdateSlice, x, update, at), np.asarray(changed))


def test_type_rules() -> None:
    x, i = value((2, 3)), Value(INDEX)
    rejected("needs a start and a size for every dim", DynamicSlice, x, i, sizes=(1, 1))
    rejected("needs a start and a size for every dim", DynamicSlice, x, i, i, sizes=(1,))
    rejected("starts of a dynamic_slice must be int32 scalars", DynamicSlice, x, i, value((), F32), sizes=(1, 1))
    rejected("starts of a dynamic_slice must be int32 scalars", DynamicSlice, x, i, value((1,), I32), sizes=(1, 1))
    rejected(r"sizes \(3, 1\) does not fit into f32\[2, 3\]", DynamicSlice, x, i, i, sizes=(3, 1))
    rejected(r"sizes \(-1, 1\) does not fit into f32\[2, 3\]", DynamicSlice, x, i, i, sizes=(-1, 1))
    rejected("takes a tile and what replaces", DynamicUpdateSlice, x)
    rejected(r"of f32\[2, 3\] by bf16\[1, 1\]", DynamicUpdateSlice, x, value((1, 1), BF16), i, i)
    rejected("does not fit into", DynamicUpdateSlice, x, value((2, 4)), i, i)
    rejected("needs a start and a size", DynamicUpdateSlice, x, value((2,)), i, i)
    rejected("take takes 2 operands, got 1", Take, x, dim=0)
    rejected("take needs int32 indices", Take, x, value((2,), F32), dim=0)
    rejected("not different dims", Take, x, value((2,), I32), dim=2)
    rejected("has no element", Take, value((2, 0)), value((2,), I32), dim=1)
    rejected(r"take along dim 1 of f32\[2, 3\] by i32\[3, 3\]", Take, x, value((3, 3), I32), dim=1, along=True)
    rejected(r"take along dim 1 of f32\[2, 3\] by i32\[2\]", Take, x, value((2,), I32), dim=1, along=True)
