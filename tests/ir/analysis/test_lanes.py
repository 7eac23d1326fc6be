"""Axes that may be cut between any two elements, and random kernels whose parts are interpreted one by one."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.ir.analysis.random_rows import random_rows
from tests.lang.checks import before_passes, like_first
from tilekern.testing.programs.parts import assert_parts_agree

X = np.arange(60, dtype=np.float32).reshape(20, 3) / 8 - 3
_CHUNK = 40


@pytest.mark.sweep(5)
@pytest.mark.parametrize("chunk", range(25))
def test_the_parts_of_random_kernels_are_their_whole(chunk: int) -> None:
    compared = 0
    for seed in range(chunk * _CHUNK, (chunk + 1) * _CHUNK):
        func, arrays, _ = random_rows(Random(seed))
        compared += assert_parts_agree(func, arrays)
    assert compared > _CHUNK / 2


def sizes_of(kernel: Any, *arrays: Any) -> set[int] | None:
    """The sizes that the number of devices must divide, of the axis of rows; None if it is not divided."""
    assert_parts_agree(before_passes(kernel, *arrays), arrays)
    return next((set(sizes) for sizes in kernel.sharding_rule(*arrays).sizes.values()), None)


ANYWHERE = {
    "one row": lambda t, i: jnp.exp(t) - t.max(axis=1, keepdims=True),
    "a constant along columns": lambda t, i: t * np.array([1, 2, 3], np.float32),
    "an arange along columns": lambda t, i: t + jnp.arange(3.0),
    "rows by a mask": lambda t, i: jnp.where(i.valid[:, None], t, 1),
    "a transposed tile": lambda t, i: jnp.cumsum(t.T, axis=0).T,
    "a product with a matrix": lambda t, i: tk.dot(t, np.eye(3, dtype=np.float32)),
    "two tiles of the same rows": lambda t, i: t * jnp.sin(t) + t.sum(axis=1, keepdims=True),
}
BETWEEN_TILES = {
    "an arange along rows": lambda t, i: t + jnp.arange(4.0)[:, None],
    "signs of rows": lambda t, i: t * np.array([1, -1, 1, -1], np.float32)[:, None],
    "one-hot rows": lambda t, i: t + jnp.eye(4, 3),
    "the first rows": lambda t, i: jnp.where(jnp.arange(4)[:, None] < 2, t, 0),
    "the first row": lambda t, i: t - t[:1],
    "bits of a place": lambda t, i: t * (jnp.arange(4) & 1)[:, None],
    "rows in another order": lambda t, i: t[::-1],
    "all pairs of rows": lambda t, i: t * tk.dot(t, t.T).sum(),
    "a reshape across rows": lambda t, i: t.reshape(3, 4).T,
}


@jax.custom_jvp
def doubled(t):
    return 2 * t


@doubled.defjvp
def _(primals, tangents):
    return doubled(*primals), tangents[0] * jnp.arange(4.0)[:, None]


BETWEEN_TILES["a derivative that knows the places of rows"] = lambda t, i: doubled(t)
BETWEEN_TILES["a batch of all pairs of rows"] = lambda t, i: jax.lax.dot_general(
    *_all_pairs(t[:, :, None]), (((2,), (2,)), ((0, 1), (0, 1)))
)[:, :3]


def _all_pairs(t: Any) -> tuple[Any, Any]:
    """Two tiles [4, 4, ...]: element [a, b] of the first one is of row a, that of the second one of row b."""
    rows, shape = t.sum(axis=1), (4, 4, *t.shape[2:])
    return jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(rows[None], shape)


@pytest.mark.parametrize("rows", [20, 22])
@pytest.mark.parametrize("name", [*ANYWHERE, *BETWEEN_TILES])
def test_where_rows_may_be_cut(name: str, rows: int) -> None:
    @like_first
    def kernel(x, out):
        i = tk.parallel(x.shape[0], 4)
        out[i, :] = (ANYWHERE | BETWEEN_TILES)[name](x[i, :], i)

    sizes = {20} if name in ANYWHERE else {20, 5}
    anywhere_or_whole = {22} if name in ANYWHERE else None
    assert sizes_of(kernel, np.resize(X, (rows, 3))) == (sizes if rows == 20 else anywhere_or_whole)


SUMS: dict[str, tuple[Callable[[Any, Any], Any], bool]] = {
    "of rows": (lambda t, i: t, True),
    "of squares": (lambda t, i: t * t, True),
    "of a product of tiles that are 0 behind the end": (lambda t, i: 3 * t * jnp.tanh(t), True),
    "of exponentials": (lambda t, i: jnp.exp(t), False),  # exp(0) = 1 behind the end
    "of cosines": (lambda t, i: jnp.cos(t), False),
    "of distances": (lambda t, i: (t - 2) ** 2, False),
    "of exponentials of rows": (lambda t, i: jnp.where(i.valid[:, None], jnp.exp(t), 0), True),
    "of what may be 0 times infinity": (lambda t, i: t * (1 / t), False),
    "of ones": (lambda t, i: jnp.ones((4, 3)), False),
    "of signs": (lambda t, i: t * np.array([1, -1, 1, -1], np.float32)[:, None], False),
    "of the first rows of each tile": (
        lambda t, i: jnp.where((i.valid & (jnp.arange(4) < 2))[:, None], t, 0),
        False,
    ),
    "of all pairs of rows": (lambda t, i: t[:, None] * t[None], False),
    "of a dot of all pairs of rows": (
        lambda t, i: jax.lax.dot_general(*_all_pairs(t), (((0, 1), (0, 1)), ((), ()))),
        False,
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_which_sums_may_be_cut(name: str) -> None:
    """Sums over rows: lanes behind the end must add 0, for parts have others than the whole."""
    value, anywhere = SUMS[name]

    @tk.kernel(out_type=lambda x: tk.Sum(jax.ShapeDtypeStruct((), x.dtype)))
    def summed(x, out):
        i = tk.parallel(x.shape[0], 4)
        out.at[()].add(value(x[i, :], i).sum())

    @tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct((), x.dtype))
    def folded(x, out):
        axis = tk.serial(x.shape[0], 4)
        out[()] = tk.fold(axis, lambda i, total: total + value(x[i, :], i).sum(), jnp.zeros((), x.dtype))

    for kernel in (summed, folded):
        assert sizes_of(kernel, X) == ({20} if anywhere else {20, 5})
        assert sizes_of(kernel, np.resize(X, (22, 3))) == ({22} if anywhere else None)


def _once(start: Any, step: Callable[[Any], Any]) -> Any:
    return tk.fold(tk.serial(1, 1), lambda j, carry: step(carry), start)


def _twice(start: Any, total: Any) -> Any:
    """The second carry is the total, then 0, then 5."""
    return tk.fold(tk.serial(2, 1), lambda j, carry: (jnp.float32(5), carry[0]), (start, total))[1]


OF_TILES: dict[str, tuple[Callable[[Any, Any, Any], Any], bool]] = {
    "a sum or 0": (lambda t, i, flag: jax.lax.cond(flag > 0, t.sum, lambda: jnp.float32(0)), True),
    "a sum or 5": (lambda t, i, flag: jax.lax.cond(flag > 0, t.sum, lambda: jnp.float32(5)), False),
    "a sum in a loop": (lambda t, i, flag: _once(jnp.float32(0), lambda c: c + t.sum()), True),
    "a sum or nothing in a loop": (
        lambda t, i, flag: _once(jnp.float32(0), lambda c: jax.lax.cond(flag > 0, lambda: c + t.sum(), lambda: c)),
        True,
    ),
    "5 after a sum": (lambda t, i, flag: _once(t.sum(), lambda c: jnp.float32(5)), False),
    "5 after a sum and 0": (lambda t, i, flag: _twice(jnp.float32(0), t.sum()), False),
    "a count of rows": (lambda t, i, flag: i.valid.sum().astype(jnp.float32), True),
    "a count of the first rows": (
        lambda t, i, flag: jnp.where(i.index * 4 + jnp.arange(2) < 20, jnp.float32(1), 0).sum(),
        False,
    ),
    "a maximum": (lambda t, i, flag: t.max(), False),
    "half of a count": (lambda t, i, flag: jax.lax.div(i.valid.sum(), jnp.int32(2)).astype(jnp.float32), False),
    "a sum of integers that wraps around": (
        lambda t, i, flag: (t.astype(jnp.int32) * 2**28).sum().astype(jnp.float32),
        False,
    ),
}


@pytest.mark.parametrize("name", OF_TILES)
def test_which_numbers_of_tiles_add_up(name: str) -> None:
    value, anywhere = OF_TILES[name]

    @tk.kernel(out_type=lambda x, flags: tk.Sum(jax.ShapeDtypeStruct((), x.dtype)))
    def summed(x, flags, out):
        i = tk.parallel(x.shape[0], 4)
        t = x[i, :]
        out.at[()].add(value(t, i, flags[0]) + t.sum())

    for flag in (0, 1):
        flags = np.full(1, flag, np.float32)
        assert sizes_of(summed, X, flags) == ({20} if anywhere else {20, 5})


def test_half_of_each_tile() -> None:
    @tk.kernel(out_type=lambda x: tk.Sum(jax.ShapeDtypeStruct((3,), x.dtype)))
    def halves(x, out):
        i = tk.parallel(x.shape[0], 4)
        out.at[:].add(x[tk.ds(i.index * 4, 2), :].sum(axis=0))

    assert sizes_of(halves, X) == {20, 5}


def test_a_carry_of_all_tiles_has_no_rows_of_its_own() -> None:
    """Lane n of the carry adds up row n of each tile; parts that are no tiles add other rows."""

    @tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct((4, 3), x.dtype))
    def by_place(x, out):
        out[:, :] = tk.fold(tk.serial(x.shape[0], 4), lambda k, total: total + x[k, :], jnp.zeros((4, 3), x.dtype))

    assert sizes_of(by_place, X) == {20, 5}


def test_updates_at_places_of_data_are_divided_between_tiles() -> None:
    @tk.kernel(out_type=lambda x, ids: tk.Sum(jax.ShapeDtypeStruct((8, 3), x.dtype)))
    def by_id(x, ids, out):
        i = tk.parallel(x.shape[0], 4)
        out.at[ids[i], :].add(jnp.exp(x[i, :]))

    assert sizes_of(by_id, X, np.arange(20, dtype=np.int32) % 8) == {20, 5}


@pytest.mark.parametrize(
    "mask, sizes",
    [(lambda t: t > 0, {20}), (lambda t: jnp.broadcast_to(jnp.arange(4)[:, None] < 2, t.shape), {20, 5})],
    ids=["of numbers of rows", "of places in a tile"],
)
def test_the_mask_of_a_load_decides_lanes_too(mask: Callable[[Any], Any], sizes: set[int]) -> None:
    @like_first
    def kernel(x, out):
        i = tk.parallel(x.shape[0], 4)
        out[i, :] = x.load((i, slice(None)), mask=mask(x[i, :]))

    assert sizes_of(kernel, X) == sizes


@pytest.mark.parametrize(
    "mask, sizes",
    [(lambda t: t > 0, {20}), (lambda t: jnp.broadcast_to(jnp.arange(4)[:, None] < 2, t.shape), {20, 5})],
    ids=["of numbers of rows", "of places in a tile"],
)
def test_the_mask_of_a_store_decides_lanes_too(mask: Callable[[Any], Any], sizes: set[int]) -> None:
    @like_first
    def kernel(x, out):
        i = tk.parallel(x.shape[0], 4)
        out[i, :] = x[i, :]
        out.store((i, slice(None)), x[i, :] * 2, mask=mask(x[i, :]))

    assert sizes_of(kernel, X) == sizes


@pytest.mark.parametrize("fill, sizes", [(0.0, {20}), (1e-60, {20, 5})])
def test_products_behind_the_end_that_only_float32_takes_for_0(fill: float, sizes: set[int]) -> None:
    @tk.kernel(out_type=lambda x: tk.Sum(jax.ShapeDtypeStruct((3, 3), x.dtype)))
    def squares(x, out):
        t = x.load((tk.parallel(x.shape[0], 4), slice(None)), fill=fill)
        out.at[:, :].add(tk.dot(t.T, t))

    with jax.enable_x64(True):
        assert sizes_of(squares, X.astype(np.float64)) == sizes
