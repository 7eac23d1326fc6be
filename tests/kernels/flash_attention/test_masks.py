"""Masks as values: `&` combines conditions and ranges, and no pair outside of a range attends."""

from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tilekern.kernels.flash_attention.definition import _WholePairs
from tilekern.kernels.flash_attention.masks import (
    AllOf,
    ArrayMask,
    FirstKey,
    FunctionMask,
    KeyLengths,
    LastKey,
    Mask,
    QueryLengths,
    Segments,
    Span,
)
from tilekern.kernels.flash_attention.segments import ranges

QUERIES, KEYS, OFFSET = 9, 12, 2


class Rows(NamedTuple):
    """A tile of positions, inside of the extent."""

    start: int
    stop: int


class Element(NamedTuple):
    b: int
    offset: int


class Loads:
    """An array [B, T] that is read as a ref is."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)

    def load(self, index: tuple[int, Rows], fill: int) -> Any:
        return self[index]

    def __getitem__(self, index: tuple[int, Rows]) -> Any:
        b, tile = index
        return self.array[b, tile.start : tile.stop]


def segments(of_queries: list[int], of_keys: list[int], *, of_loop: str) -> Segments:
    """Segments whose ranges are those for a loop over "keys", or over "queries"."""
    ids = np.asarray([of_queries], np.int32), np.asarray([of_keys], np.int32)
    first, stop = ranges(*(ids if of_loop == "keys" else ids[::-1]))
    return Segments(ids, (Loads(first), Loads(stop)))


def ids(count: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 3), min_size=count, max_size=count)


def lengths(most: int) -> st.SearchStrategy[Any]:
    return st.integers(0, most).map(lambda n: np.asarray([n], np.int32))


def masks(of_loop: str) -> st.SearchStrategy[Mask]:
    """One mask of any class."""
    return st.one_of(
        st.builds(FirstKey, st.integers(0, 5)),
        st.builds(LastKey, st.integers(0, 5)),
        st.builds(QueryLengths, lengths(QUERIES)),
        st.builds(KeyLengths, lengths(KEYS)),
        st.builds(lambda q, k: segments(q, k, of_loop=of_loop), ids(QUERIES), ids(KEYS)),
        st.builds(
            lambda seed: ArrayMask(np.random.default_rng(seed).random((1, 1, QUERIES, KEYS)) < 0.7), st.integers(0)
        ),
        st.just(FunctionMask(lambda b, n, i, j: (i + j) % 3 != 0)),
    )


def whole(mask: Mask) -> np.ndarray[Any, Any]:
    """The mask as bool[T, S]."""
    i, j = np.arange(QUERIES)[None, None, :, None], np.arange(KEYS)[None, None, None, :]
    zero: Any = np.zeros((1, 1, 1, 1), np.int32)
    attends = mask.attends(_WholePairs(zero, zero, i, j, i + OFFSET))  # pyright: ignore[reportArgumentType] -- NumPy
    return np.broadcast_to(np.asarray(attends), (1, 1, QUERIES, KEYS))[0, 0]


@given(st.lists(masks("keys"), max_size=4))
def test_and_attends_where_each_mask_does(parts: list[Mask]) -> None:
    combined = reduce(lambda a, b: a & b, parts, AllOf())
    expected = np.logical_and.reduce([whole(part) for part in parts], initial=True)
    assert (whole(combined) == expected).all()


@given(st.lists(masks("keys"), max_size=4), st.integers(0, QUERIES - 1), st.integers(1, 4))
def test_no_query_of_a_tile_attends_to_a_key_outside_of_the_range(parts: list[Mask], start: int, size: int) -> None:
    mask = reduce(lambda a, b: a & b, parts, AllOf())
    tile = Rows(start, min(start + size, QUERIES))
    keys = mask.keys_of(tile, Span(0, KEYS, KEYS), Element(0, OFFSET))  # pyright: ignore[reportArgumentType] -- as a tile
    j = np.arange(KEYS)
    outside = (j < int(keys.start)) | (j >= int(keys.stop))
    assert not whole(mask)[tile.start : tile.stop, outside].any()


@given(st.lists(masks("queries"), max_size=4), st.integers(0, KEYS - 1), st.integers(1, 4))
def test_no_query_outside_of_the_range_attends_to_a_key_of_a_tile(parts: list[Mask], start: int, size: int) -> None:
    mask = reduce(lambda a, b: a & b, parts, AllOf())
    tile = Rows(start, min(start + size, KEYS))
    queries = mask.queries_of(tile, Span(0, QUERIES, QUERIES), Element(0, OFFSET))  # pyright: ignore[reportArgumentType] -- as a tile
    i = np.arange(QUERIES)
    outside = (i < int(queries.start)) | (i >= int(queries.stop))
    assert not whole(mask)[outside, tile.start : tile.stop].any()


def test_a_causal_window_visits_its_keys_only() -> None:
    mask = LastKey(0) & FirstKey(3)
    keys = mask.keys_of(Rows(4, 6), Span(0, KEYS, KEYS), Element(0, OFFSET))  # pyright: ignore[reportArgumentType] -- as a tile
    assert (keys.start, keys.stop) == (3, 8)


def test_block_maps_know_of_arrays_and_functions_only() -> None:
    mask = LastKey(0) & ArrayMask(None) & FunctionMask(None)
    assert mask.outside_of_block_map() == AllOf((LastKey(0),))
    assert not mask.all_alike_for_heads() and mask.outside_of_block_map().all_alike_for_heads()
