"""Barriers between accesses of one array, and the interpreter, which finds each one that is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lower.triton.running import assert_kernel
from tilekern.errors import WriteConflictError
from tilekern.lower.triton.emit import memory

X = np.random.default_rng(0).standard_normal((10, 16)).astype(np.float32)


def like(x: Any, **_: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def tiles_of(x: Any) -> tuple[tk.Tile, tk.Tiles]:
    """A program's rows, and a loop over columns."""
    return tk.parallel(x.shape[0], 4), tk.serial(x.shape[1], 4)


# --- programs whose accesses need an order ---------------------------------------------------------------------------


def a_part_is_stored_again(x: Any, out: Any) -> None:
    i, _ = tiles_of(x)
    out[i] = x[i]
    out[i, :1] = -x[i, :1]


def a_loop_stores_again(x: Any, out: Any) -> None:
    i, columns = tiles_of(x)

    def write(factor: int, j: Any) -> None:
        out[i, j] = x[i, j] * factor

    tk.foreach(columns, lambda j: write(1, j))
    tk.foreach(columns, lambda j: write(2, j))


def each_iteration_stores_again(x: Any, out: Any) -> None:
    i, columns = tiles_of(x)
    out[i] = x[i]

    def write(j: Any) -> None:
        out[i, :1] = x[i, j].max(1, keepdims=True)

    tk.foreach(columns, write)


def iterations_overlap(x: Any, out: Any) -> None:
    i, columns = tiles_of(x)
    out[i] = x[i]

    def write(j: Any) -> None:
        out[i, tk.ds(2 * j.index, 4)] = x[i, j]

    tk.foreach(columns, write)


def what_is_stored_is_loaded(x: Any, out: Any) -> None:
    i, _ = tiles_of(x)
    out[i] = x[i]
    out[i] = jnp.flip(out[i], 1) + x[i]


# The number of barriers.
ORDERED: dict[Callable[..., None], int] = {
    a_part_is_stored_again: 1,
    a_loop_stores_again: 1,
    each_iteration_stores_again: 2,
    iterations_overlap: 2,
    what_is_stored_is_loaded: 3,
}


@pytest.mark.parametrize("body", ORDERED)
def test_a_barrier_orders_what_may_touch_one_element(body: Callable[..., None]) -> None:
    program = assert_kernel(tk.kernel(out_type=like)(body), X)
    assert program.text.count("tl.debug_barrier()") == ORDERED[body]


@pytest.mark.parametrize("body", ORDERED)
def test_the_interpreter_finds_that_a_barrier_is_missing(
    body: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "barriers", lambda func: {})
    with pytest.raises(WriteConflictError, match=r"element \d+ of out_ptr is (stored|loaded) in any order"):
        assert_kernel(tk.kernel(out_type=like)(body), X)


# --- programs whose accesses lie apart -------------------------------------------------------------------------------


def halves(x: Any, out: Any) -> None:
    i, _ = tiles_of(x)
    out[i, :8] = x[i, 8:]
    out[i, 8:] = x[i, :8]


def a_loop(x: Any, out: Any) -> None:
    i, columns = tiles_of(x)

    def write(j: Any) -> None:
        out[i, j] = x[i, j]

    tk.foreach(columns, write)


def pairs_in_a_loop(x: Any, out: Any) -> None:
    i, columns = tk.parallel(x.shape[0], 4), tk.serial(x.shape[1], 4)

    def write(j: Any) -> None:
        out[i, tk.ds(4 * j.index, 2)] = x[i, tk.ds(4 * j.index + 2, 2)]
        out[i, tk.ds(4 * j.index + 2, 2)] = x[i, tk.ds(4 * j.index, 2)]

    tk.foreach(columns, write)


def updates(x: Any, out: Any) -> None:
    i, _ = tiles_of(x)
    out.at[i].max(x[i])
    out.at[i, :8].max(x[i, 8:])


@pytest.mark.parametrize("body", [halves, a_loop, pairs_in_a_loop])
def test_accesses_that_lie_apart_need_no_barrier(body: Callable[..., None]) -> None:
    program = assert_kernel(tk.kernel(out_type=like)(body), X)
    assert "tl.debug_barrier()" not in program.text


def test_atomic_updates_of_one_kind_need_no_barrier() -> None:
    program = assert_kernel(tk.kernel(out_type=lambda x: tk.Zeros(like(x)))(updates), X)
    assert "tl.debug_barrier()" not in program.text


@pytest.mark.parametrize("twice", [False, True])
def test_a_tile_that_is_stored_twice_is_not_copied_by_the_accelerator(twice: bool) -> None:
    def product(x: Any, out: Any, *, twice: bool) -> None:
        i = tk.parallel(x.shape[0], 64)
        total = tk.dot(x[i], x[i, :].T)
        out[i] = total.astype(out.dtype)
        if twice:
            out[i] = jnp.maximum(total, 0).astype(out.dtype)

    program = assert_kernel(tk.kernel(out_type=like)(product), np.ones((64, 64), np.float16), twice=twice)
    assert ("out_desc" in program.text) != twice
