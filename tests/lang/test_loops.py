"""`fold` and `foreach`: their tiles, the order of the tiles, and the carries."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilekern as tk
from tests.lang.checks import (
    BLOCKS,
    COMPILED,
    EXTENTS,
    WIDE,
    both,
    check,
    interpreted,
    kernel,
    like_first,
    numbers,
    refused,
)
from tilekern.errors import ArgumentError, CarryError, TraceError

X = numbers(8)


# --- which tiles, in which order ------------------------------------------------------------------------------------


@tk.kernel(out_type=lambda x, bounds, **_: (jax.ShapeDtypeStruct((3,), np.int32), jax.ShapeDtypeStruct((), x.dtype)))
def walk(x, bounds, order, total, *, block: int | None, start: int | None, stop: int | None, reverse: bool):
    """Compute a number that depends on the tiles and their order, and pytrees of carries. Bounds of None are traced."""
    axis = tk.serial(
        x.shape[0],
        block,
        start=bounds[0] if start is None else start,
        stop=bounds[1] if stop is None else stop,
        reverse=reverse,
    )

    def step(t: Any, carry: Any) -> Any:
        index = t if block is None else t.index
        seen = carry["seen"][0] * 31 + index + 1, carry["seen"][1] + 1
        return {"seen": seen, "any": carry["any"] | (index == 1), "sum": carry["sum"] + x[t].sum(), "none": None}

    init = {"seen": (jnp.int32(7), 0), "any": False, "sum": 0.0, "none": None}
    last = tk.fold(axis, step, init)
    order[...] = jnp.stack([*last["seen"], last["any"].astype(jnp.int32)])
    total[...] = last["sum"]


def _walked(x: np.ndarray, bounds: np.ndarray, *, block: Any, start: Any, stop: Any, reverse: bool) -> Any:
    size = block or 1
    low = min(max(int(bounds[0]) if start is None else start, 0), len(x))
    high = min(max(int(bounds[1]) if stop is None else stop, 0), len(x))
    tiles = range(low // size, -(-high // size)) if low < high else range(0)
    order = 7
    for t in reversed(tiles) if reverse else tiles:
        order = (order * 31 + t + 1) % 2**32
    total = x[low : max(low, high)].sum()
    order -= 2**32 if order >= 2**31 else 0
    return np.array([order, len(tiles), 1 in tiles], np.int32), np.float32(total)


@pytest.mark.parametrize("run", [pytest.param(both, id="compiled"), pytest.param(interpreted, id="wide")])
def test_a_fold_walks_the_tiles_between_its_bounds(run) -> None:
    bound = st.integers(-5, 20)

    @(COMPILED if run is both else WIDE)
    @given(EXTENTS, st.none() | BLOCKS, bound, bound, st.none() | bound, st.none() | bound, st.booleans())
    def property(extent: int, block: Any, low: int, high: int, start: Any, stop: Any, reverse: bool) -> None:
        static = {"block": block, "start": start, "stop": stop, "reverse": reverse}
        check(walk, numbers(extent), np.int32([low, high]), oracle=_walked, run=run, **static)

    property()


@pytest.mark.smoke
@COMPILED
@given(EXTENTS, BLOCKS, BLOCKS)
def test_bounds_may_depend_on_the_program(extent: int, block_q: int, block_k: int) -> None:
    """Sums of all elements up to an element: the bound of causal attention."""
    check(prefix, numbers(extent), oracle=lambda x, **_: np.cumsum(x), block_q=block_q, block_k=block_k)


@like_first
def prefix(x, out, *, block_q: tk.Block = 4, block_k: tk.Block = 4):
    i = tk.parallel(x.shape[0], block_q)

    def step(j, acc):
        return acc + jnp.where(j.indices[None] <= i.indices[:, None], x[j][None], 0).sum(axis=1)

    out[i] = tk.fold(tk.serial(x.shape[0], block_k, stop=i.stop), step, tk.zeros(i))


@COMPILED
@given(EXTENTS, BLOCKS, BLOCKS, st.booleans())
def test_folds_nest(extent: int, block_i: int, block_j: int, reverse: bool) -> None:
    """The inner bounds and the inner carry depend on the outer tile."""

    def oracle(x: np.ndarray, **_: Any) -> Any:
        acc, blocks = np.int32(1), range(-(-extent // block_i))
        for i in reversed(blocks) if reverse else blocks:
            start, stop = i * block_i, min((i + 1) * block_i, extent)
            for j in range(start // block_j, -(-stop // block_j)):
                inside = x[max(j * block_j, start) : min((j + 1) * block_j, stop)]
                acc = np.int32((int(acc) * 7 + int(inside.sum()) + i) % 10007)
        return acc

    check(nest, numbers(extent), oracle=oracle, block_i=block_i, block_j=block_j, reverse=reverse)


@kernel(((), np.int32))
def nest(x, out, *, block_i: tk.Block = 4, block_j: tk.Block = 4, reverse: bool = False):
    def outer(i, acc):
        def inner(j, acc):
            return (acc * 7 + x[j].sum().astype(jnp.int32) + i.index) % 10007

        return tk.fold(tk.serial(x.shape[0], block_j, start=i.start, stop=i.stop), inner, acc)

    out[...] = tk.fold(tk.serial(x.shape[0], block_i, reverse=reverse), outer, 1)


@COMPILED
@given(EXTENTS, EXTENTS, BLOCKS, BLOCKS)
def test_foreach_stores(m: int, n: int, block_m: int, block_n: int) -> None:
    check(rows, numbers(m, n), oracle=lambda x, **_: x * 2, block_m=block_m, block_n=block_n)


@like_first
def rows(x, out, *, block_m: tk.Block = 4, block_n: tk.Block = 4):
    i = tk.parallel(x.shape[0], block_m)

    def step(j):
        out[i, j] = x[i, j] * 2

    tk.foreach(tk.serial(x.shape[1], block_n), step)


# --- carries --------------------------------------------------------------------------------------------------------


def test_a_carry_may_stay_as_it_is() -> None:
    """JAX removes unchanged carries from the loop."""

    @kernel(((3,), np.float32))
    def f(x, out):
        def step(n, carry):
            first, count, last = carry
            return first, count + 1, last

        out[...] = jnp.stack(tk.fold(tk.serial(8), step, (x[1], 0.0, x[7])))

    check(f, X, oracle=np.float32([2, 8, 8]))


@pytest.mark.parametrize("init", [0.0, (), {}, None, [1, (2.0, None)], True])
def test_a_body_that_changes_nothing(init) -> None:
    @like_first
    def f(x, out):
        assert jax.tree.structure(tk.fold(tk.serial(8, 3), lambda t, c: c, init)) == jax.tree.structure(init)
        out[...] = x[...]

    check(f, X, oracle=X)


def test_carries_swap() -> None:
    @kernel(((2,), np.float32))
    def f(x, out):
        out[...] = jnp.stack(tk.fold(tk.serial(7), lambda n, c: (c[1], c[0] + 1), (x[0], x[3])))

    check(f, X, oracle=np.float32([4 + 3, 1 + 4]))


def test_a_fold_over_nothing_gives_its_init() -> None:
    @kernel(((), np.float32))
    def f(x, out):
        out[...] = tk.fold(tk.serial(0, 4), lambda t, c: c + x[t].sum(), x[2])

    check(f, X, oracle=np.float32(3))


@pytest.mark.parametrize("dtype", ["f2", "i1", "?", "u4", "f4"])
def test_a_carry_of_any_dtype(dtype) -> None:
    @kernel(((), dtype))
    def f(x, out):
        out[...] = tk.fold(tk.serial(8), lambda n, c: jnp.maximum(c, x[n]), x[0])

    x = X.astype(dtype)
    check(f, x, oracle=x.max())


def test_a_fold_is_named_after_its_body() -> None:
    @kernel(((), np.float32))
    def f(x, out):
        def step(keys, total):
            return total + x[keys].sum()

        out[...] = tk.fold(tk.serial(8, 4), step, 0.0)

    assert "%keys" in str(f.trace(X))
    assert "%total" in str(f.trace(X))


def test_the_body_may_be_a_builtin_or_a_partial() -> None:
    @kernel(((), np.float32))
    def f(x, out):
        out[...] = tk.fold(tk.serial(8), jax.tree_util.Partial(lambda y, n, c: c + y * x[n], x[1]), 0.0)

    check(f, X, oracle=np.float32(72))


# --- errors ---------------------------------------------------------------------------------------------------------


def test_another_structure() -> None:
    @like_first
    def f(x, out):
        tk.fold(tk.serial(8, 4), lambda t, c: (c, c), 0.0)  # <-

    with refused(
        CarryError, "the body of a fold returned another structure than init", expected="*", got="(*, *)", fix="init"
    ):
        f.trace(X)


def test_a_body_that_returns_nothing() -> None:
    @like_first
    def f(x, out):
        tk.fold(tk.serial(8, 4), lambda t, c: None, 0.0)  # <-

    with refused(CarryError, "another structure than init", got="None", fix="returns its carry, always"):
        f.trace(X)


def test_another_type() -> None:
    @like_first
    def f(x, out):
        tk.fold(tk.serial(8, 4), lambda t, c: {"a": c["a"] + 1.5, "b": c["b"]}, {"a": 0, "b": 0})  # <-

    with refused(
        CarryError,
        "changed the type of carry['a']",
        expected="carry['a'] = int32[], as in init",
        got="carry['a'] = float32[]",
        fix=".astype",
    ):
        f.trace(X)


def test_another_shape() -> None:
    @like_first
    def f(x, out):
        tk.fold(tk.serial(8, 4), lambda t, c: c + x[t], 0.0)  # <-

    with refused(CarryError, "changed the type of carry", expected="carry = float32[]", got="carry = float32[4]"):
        f.trace(X)


def test_a_carry_that_is_no_array() -> None:
    @like_first
    def f(x, out):
        tk.fold(tk.serial(8, 4), lambda t, c: c, "text")  # <-

    with refused(CarryError, "a carry of a fold is no array", expected="numbers", got="init = 'text' (str)"):
        f.trace(X)


def test_a_ref_cannot_become_another() -> None:
    @kernel(None)
    def f(x, y, out):
        tk.fold(tk.serial(8, 4), lambda t, c: (c[1], c[0]), (x, y))  # <-

    with refused(CarryError, "another structure than init", got="'y'"):
        f.trace(X, X)


def test_foreach_returns_nothing() -> None:
    @like_first
    def f(x, out):
        tk.foreach(tk.serial(8, 4), lambda t: x[t])  # <-

    with refused(
        CarryError, "the body of tk.foreach returned a value", expected="None", got="float32[4]", fix="tk.fold"
    ):
        f.trace(X)


@pytest.mark.parametrize("axis", [8, "k", range(8), None])
def test_a_fold_takes_a_serial_axis(axis) -> None:
    @like_first
    def f(x, out):
        tk.fold(axis, lambda t, c: c, 0.0)  # <-

    with refused(
        ArgumentError, "tk.fold loops over a serial axis", expected="tk.serial(", got="axis = ", fix="tk.serial"
    ):
        f.trace(X)


def test_a_fold_does_not_take_a_tile() -> None:
    @like_first
    def f(x, out):
        tk.foreach(tk.parallel(8, 4), lambda t: None)  # <-

    with refused(ArgumentError, "tk.fold loops over a serial axis", got="axis = Tile", fix="tk.serial"):
        f.trace(X)


def test_a_fold_outside_a_kernel() -> None:
    with refused(TraceError, "tk.fold is used outside a kernel", got="no kernel being traced", fix="body"):
        tk.fold(tk.serial(8, 4), lambda t, c: c, 0.0)  # <-
