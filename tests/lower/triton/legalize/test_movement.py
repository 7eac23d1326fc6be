"""Every op that moves elements, on tiles of any sizes."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lower.triton.legalize.meaning import assert_keeps, counting, one, shapes
from tests.lower.triton.legalize.promises import assert_padded, ops_of
from tilekern.ir.core import Func
from tilekern.ir.dynamic import DynamicSlice, DynamicUpdateSlice, Take
from tilekern.ir.shape import Broadcast, Concatenate, Pad, Reshape, Reverse, Slice, Transpose
from tilekern.ir.types import BF16, DTYPES, F32, I32
from tilekern.lower.triton.legalize.pad_tiles import pad_tiles

Case = tuple[Func, list[np.ndarray]]
# Places inside, at the ends, and outside.
PLACES = st.one_of(st.integers(-2, 13), st.sampled_from([-(2**31), 2**31 - 1]))


def padded(func: Func) -> Func:
    result = pad_tiles(func)
    assert_padded(result)
    return result


def position(draw: Any) -> np.ndarray:
    return np.array(draw(PLACES), np.int32)


@st.composite
def slices(draw: Any) -> Case:
    shape = draw(shapes())
    starts = [draw(st.integers(0, n)) for n in shape]
    stops = [draw(st.integers(a, n)) for a, n in zip(starts, shape, strict=True)]
    stride = tuple(draw(st.integers(1, 3)) for _ in shape)
    return one(Slice, counting(shape, F32), start=tuple(starts), stop=tuple(stops), stride=stride)


@st.composite
def pads(draw: Any) -> Case:
    shape = draw(shapes(most=2))
    interior = [draw(st.integers(0, 2)) for _ in shape]
    spread = [n + (n - 1) * i for n, i in zip(shape, interior, strict=True)]
    low = [draw(st.integers(-min(n, 3), 3)) for n in spread]
    high = [draw(st.integers(max(-3, -(n + a)), 3)) for n, a in zip(spread, low, strict=True)]
    fill = np.float32(-1).reshape(())
    return one(Pad, counting(shape, F32), fill, low=tuple(low), high=tuple(high), interior=tuple(interior))


@st.composite
def concatenations(draw: Any) -> Case:
    shape = draw(shapes(1))
    dim = draw(st.integers(0, len(shape) - 1))
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    parts = [(*shape[:dim], n, *shape[dim + 1 :]) for n in sizes]
    return one(Concatenate, *(counting(p, F32) + 100 * n for n, p in enumerate(parts)), dim=dim)


@st.composite
def reversals(draw: Any) -> Case:
    shape = draw(shapes())
    dims = draw(st.sets(st.sampled_from(range(len(shape))))) if shape else ()
    return one(Reverse, counting(shape, F32), dims=tuple(dims))


@st.composite
def transpositions(draw: Any) -> Case:
    shape = draw(shapes())
    return one(Transpose, counting(shape, F32), permutation=tuple(draw(st.permutations(range(len(shape))))))


@st.composite
def broadcasts(draw: Any) -> Case:
    shape = draw(shapes(most=4))
    dims = sorted(draw(st.sets(st.sampled_from(range(len(shape))), max_size=3))) if shape else []
    before = tuple(draw(st.sampled_from([1, shape[d]])) for d in dims)
    return one(Broadcast, counting(before, F32), shape=shape, dims=tuple(dims))


@st.composite
def factorings(draw: Any, size: int) -> tuple[int, ...]:
    """A shape of so many elements."""
    shape: list[int] = []
    while size > 1 and len(shape) < 3:
        shape.append(draw(st.sampled_from([n for n in range(2, size + 1) if size % n == 0])))
        size //= shape[-1]
    units = draw(st.lists(st.integers(0, len(shape)), max_size=2))
    for place in units:
        shape.insert(place, 1)
    return (*shape, size) if size > 1 else tuple(shape)


@st.composite
def reshapes(draw: Any) -> Case:
    size = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24, 30, 48, 60, 64]))
    return one(Reshape, counting(draw(factorings(size)), F32), shape=draw(factorings(size)))


@st.composite
def dynamic_slices(draw: Any) -> Case:
    shape = draw(shapes())
    sizes = tuple(draw(st.integers(0, n)) for n in shape)
    return one(DynamicSlice, counting(shape, F32), *(position(draw) for _ in shape), sizes=sizes)


@st.composite
def dynamic_updates(draw: Any) -> Case:
    shape = draw(shapes())
    update = counting(tuple(draw(st.integers(0, n)) for n in shape), F32) + 100
    return one(DynamicUpdateSlice, counting(shape, F32), update, *(position(draw) for _ in shape))


@st.composite
def takes(draw: Any) -> Case:
    shape = draw(shapes(1))
    dim, along = draw(st.integers(0, len(shape) - 1)), draw(st.booleans())
    wanted = draw(shapes(most=2)) if not along else (*shape[:dim], draw(st.integers(1, 9)), *shape[dim + 1 :])
    indices = np.array([draw(PLACES) for _ in range(min(prod(wanted), 9))], np.int32)
    return one(Take, counting(shape, F32), np.resize(indices, wanted), dim=dim, along=along)


MOVES: dict[str, Callable[[], st.SearchStrategy[Case]]] = {
    f.__name__: f
    for f in (
        *(slices, pads, concatenations, reversals, transpositions, broadcasts, reshapes),
        *(dynamic_slices, dynamic_updates, takes),
    )
}


@pytest.mark.parametrize("move", MOVES)
@given(data=st.data())
def test_moves(move: str, data: st.DataObject) -> None:
    assert_keeps(padded, *data.draw(MOVES[move]()))


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_moves(name: str) -> None:
    x = counting((3, 5), DTYPES[name])
    for func, arrays in (
        one(Slice, x, start=(1, 0), stop=(3, 5), stride=(1, 2)),
        one(Pad, x, x[0, 0], low=(1, -1), high=(0, 2), interior=(1, 0)),
        one(Concatenate, x, x, dim=1),
        one(Reshape, x, shape=(5, 3)),
        one(Take, x, np.array([4, 0, 2], np.int32), dim=1),
    ):
        assert_keeps(padded, func, arrays)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((3, 8), (3, 4, 2)),
        ((3, 8), (24,)),
        ((5, 4, 8), (5, 32)),
        ((1, 3, 1), (3,)),
        ((5, 1, 3), (1, 5, 3, 1)),
        ((4, 8), (2, 16)),
        ((3, 4, 5), (3, 2, 2, 5)),
    ],
)
def test_a_reshape_that_keeps_the_order_of_padded_lanes_takes_nothing(
    before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    for pair in ((before, after), (after, before)):
        result = assert_keeps(padded, *one(Reshape, counting(pair[0], BF16), shape=pair[1]))
        assert len(ops_of(result, Reshape)) == 1 and not ops_of(result, Take)


def test_what_moves_nothing_takes_nothing() -> None:
    x, zero = counting((3, 5), F32), np.zeros((), I32)
    for func, arrays in (
        one(Slice, x, start=(0, 0), stop=(3, 5), stride=(1, 1)),
        one(Pad, x, np.float32(7).reshape(()), low=(0, 0), high=(0, 0), interior=(0, 0)),
        one(DynamicSlice, x, zero, zero, sizes=(3, 5)),
    ):
        assert not ops_of(assert_keeps(padded, func, arrays), Take)


def test_tiles_of_one_element_along_a_dim_are_repeated_not_taken() -> None:
    """Two halves side by side, as packed numbers are unpacked."""
    func, arrays = one(Concatenate, counting((4, 8, 1), F32), counting((4, 8, 1), F32), dim=2)
    assert not ops_of(assert_keeps(padded, func, arrays), Take)
