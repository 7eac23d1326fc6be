"""Batches of programs, which make no difference to the results."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilekern as tk
from tests.lang.checks import check, kernel, like_first, numbers
from tilekern.ir.core import Axis
from tilekern.lower.xla import calibration
from tilekern.lower.xla.plan import batching
from tilekern.lower.xla.plan.batching import balanced_count, split_axis


@given(st.integers(0, 40), st.integers(0, 9))
def test_chunks_are_of_nearly_one_size(tiles: int, limit: int) -> None:
    count = balanced_count(tiles, limit)
    assert 1 <= count <= max(1, limit)
    chunks = -(-tiles // count)
    assert chunks == -(-tiles // max(1, limit))
    assert chunks * count - tiles < max(1, chunks)


@given(st.integers(0, 60), st.integers(1, 8), st.integers(1, 7))
def test_segments_cover_an_axis_once(extent: int, block: int, count: int) -> None:
    axis = Axis("i", extent, block)
    covered: list[int] = []
    for segment in split_axis(axis, count):
        assert segment.chunks > 0
        tiles = range(segment.first, segment.first + segment.chunks * segment.count)
        assert axis.full_tiles not in tiles or len(tiles) == 1  # the ragged tile is alone
        covered.extend(tiles)
    assert covered == list(range(axis.tiles))


def segments(function: tk.Kernel, *arrays: Any, **keywords: Any) -> list[list[tuple[int, int, int]]]:
    """For each axis its segments: first tile, chunks, tiles of a chunk."""
    planned = batching.plan_batches(function.trace(*arrays, **keywords).ir).segments
    return [[(s.first, s.chunks, s.count) for s in axis] for axis in planned]


@like_first
def double(x, out, *, block_m: tk.Block = 2, block_n: tk.Block = 2):
    i, j = tk.parallel(x.shape[0], block_m), tk.parallel(x.shape[1], block_n)
    out[i, j] = x[i, j] * 2


def test_programs_are_batched_as_far_as_their_tiles_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    x = numbers(9, 7)
    assert segments(double, x) == [[(0, 1, 4), (4, 1, 1)], [(0, 1, 3), (3, 1, 1)]]
    monkeypatch.setattr(calibration, "BATCH_BYTES", 16 * 6)  # six tiles of 2 x 2 float32
    assert segments(double, x) == [[(0, 2, 2), (4, 1, 1)], [(0, 1, 3), (3, 1, 1)]]
    monkeypatch.setattr(calibration, "BATCH_BYTES", 16)
    assert segments(double, x) == [[(0, 4, 1), (4, 1, 1)], [(0, 3, 1), (3, 1, 1)]]


def test_an_axis_that_decides_what_runs_is_a_loop() -> None:
    @kernel(((8, 6), np.float32))
    def causal(x, out):
        i, j = tk.parallel(8, 2), tk.parallel(6, 2)
        total = tk.fold(tk.serial(8, 2, stop=i.stop), lambda k, acc: acc + x[k].sum(), 0.0)
        out[i, j] = tk.full((i, j), total)

    assert segments(causal, numbers(8)) == [[(0, 4, 1)], [(0, 1, 3)]]


def test_an_axis_that_no_store_mentions_is_a_loop() -> None:
    """All programs along the axis store the same elements, so it is not batched."""

    @kernel(((6,), np.float32))
    def first(x, out):
        i, j = tk.parallel(6, 2), tk.parallel(3)
        out.store(i, x[i], mask=jnp.full(2, j == 0))

    x = numbers(6)
    assert segments(first, x) == [[(0, 1, 3)], [(0, 3, 1)]]
    check(first, x, oracle=x)


# --- it makes no difference -----------------------------------------------------------------------------------------


def _mixed() -> dict[str, tuple[tk.Kernel, Any]]:
    """Kernels whose values depend on the batched axes in various ways; and their oracles."""

    @like_first
    def loops(x, out, *, block: tk.Block):
        """A while whose carries depend on the program, a fold, a branch on one axis."""
        i, j = tk.parallel(x.shape[0]), tk.parallel(x.shape[1], block)
        factor = jax.lax.while_loop(lambda c: c < 3, lambda c: c + 1 + jnp.int32(i * 0), i % 2)
        shift = jax.lax.cond(i > 2, lambda: 10.0, lambda: 20.0)
        out[i, j] = tk.fold(tk.serial(2), lambda n, acc: acc + i + n, x[i, j]) * factor + shift

    def loops_oracle(x: np.ndarray, **_: Any) -> np.ndarray:
        i = np.arange(len(x))[:, None]
        return ((x + 2 * i + 1) * 3 + np.where(i > 2, 10, 20)).astype(np.float32)

    @like_first
    def gathers(x, out, *, block: tk.Block):
        """Positions that form no box: rows in reverse, columns by a vector, masks by program."""
        i, j = tk.parallel(x.shape[0]), tk.parallel(x.shape[1], block)
        columns = x.shape[1] - 1 - j.indices
        tile = x.load((x.shape[0] - 1 - i, columns), mask=(columns + i) % 3 != 0, fill=-1.0)
        out.store((i, j), tile, mask=j.indices % 2 == 0)
        out.store((i, j.indices), tile * 2, mask=j.indices % 2 == 1)

    def gathers_oracle(x: np.ndarray, **_: Any) -> np.ndarray:
        i, j = np.indices(x.shape)
        columns = x.shape[1] - 1 - j
        tile = np.where((columns + i) % 3 != 0, x[::-1, ::-1], -1)
        return (tile * (1 + j % 2)).astype(np.float32)

    @kernel(((13, 5), np.float32))
    def transposed(x, out, *, block: tk.Block):
        """Two batched axes in one dim: i = 5 * g + r, stored across."""
        g, r, j = tk.parallel(1), tk.parallel(x.shape[0]), tk.parallel(x.shape[1], block)
        out[j, g * 5 + r] = x[g * 5 + r, j]

    return {
        "loops": (loops, loops_oracle),
        "gathers": (gathers, gathers_oracle),
        "transposed": (transposed, lambda x, **_: x.T),
    }


@pytest.mark.parametrize("name", _mixed())
@pytest.mark.parametrize(("batch", "block"), [(1, 4), (64, 3), (1 << 20, 4), (1 << 20, 1)])
def test_batches_change_no_result(name: str, batch: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "BATCH_BYTES", batch)
    function, oracle = _mixed()[name]
    check(function, numbers(5, 13), oracle=oracle, block=block)


@pytest.mark.parametrize("length", [8192, 32768])
def test_scratch_does_not_grow_with_the_arrays(length: int) -> None:
    x = jax.ShapeDtypeStruct((length, 64), np.float32)
    scratch = double.trace(x, block_m=64, block_n=64).lower("cpu:xla").compile().memory_analysis().temp_size_in_bytes
    assert scratch <= 4 * calibration.BATCH_BYTES
