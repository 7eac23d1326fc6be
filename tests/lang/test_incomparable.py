"""Tiles and refs are not values: to compare them, or to ask for their truth, is an error, never silently False."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import check, like_first, numbers, refused
from tilekern.errors import IndexingError, TraceError

pytestmark = pytest.mark.sweep(1)  # all cases: they take little time

X = numbers(8)
COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]
OTHERS = [0, 1.5, None, "a", np.int32(3), np.float64(3), np.arange(3), jnp.int32(3), jnp.arange(3), [0]]


@pytest.mark.parametrize("compare", COMPARISONS)
@pytest.mark.parametrize("other", OTHERS, ids=repr)
@pytest.mark.parametrize("swapped", [False, True])
def test_a_tile_does_not_compare(compare: Callable[[Any, Any], Any], other: Any, swapped: bool) -> None:
    @like_first
    def f(x, out):
        def step(t):
            compare(other, t) if swapped else compare(t, other)  # <-

        tk.foreach(tk.serial(8, 4), step)

    with refused(TraceError, "a Tile is used where a number is needed", got="tile ", fix="tile.index"):
        f.trace(X)


@pytest.mark.parametrize("use", [*COMPARISONS, operator.add])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_slice_does_not_compare(use: Callable[[Any, Any], Any], swapped: bool) -> None:
    @like_first
    def f(x, out):
        part = tk.ds(tk.parallel(8, 4).start, 4)
        use(0, part) if swapped else use(part, 0)  # <-

    with refused(TraceError, "a tk.ds is used where a number is needed", got="tk.ds(int32[], 4)", fix="x[tk.ds("):
        f.trace(X)


@pytest.mark.parametrize("compare", COMPARISONS)
@pytest.mark.parametrize("other", OTHERS, ids=repr)
@pytest.mark.parametrize("swapped", [False, True])
def test_a_ref_does_not_compare(compare: Callable[[Any, Any], Any], other: Any, swapped: bool) -> None:
    @like_first
    def f(x, out):
        compare(other, x) if swapped else compare(x, other)  # <-

    with refused(IndexingError, "a ref is used where a tile is needed", got="x", fix="x[...]"):
        f.trace(X)


@pytest.mark.parametrize(
    "use", [bool, lambda t: not t, lambda t: t and 1, lambda t: 1 if t else 0, lambda t: t in [3], lambda t: 3 in t]
)
def test_a_tile_has_no_truth(use: Callable[[Any], Any]) -> None:
    @like_first
    def f(x, out):
        use(tk.parallel(8, 4))

    with pytest.raises(TraceError, match="a Tile is used where a number is needed"):
        f.trace(X)


@pytest.mark.parametrize("use", [bool, lambda x: not x, lambda x: x in [3], lambda x: 3 in x, lambda x: x in (None, 3)])
def test_a_ref_has_no_truth(use: Callable[[Any], Any]) -> None:
    @like_first
    def f(x, out):
        use(x)

    with pytest.raises(IndexingError, match="a ref "):
        f.trace(X)


def test_the_truth_of_a_ref_names_the_remedy() -> None:
    @like_first
    def f(x, out):
        if x:  # <-
            out[...] = x[...]

    with refused(IndexingError, "a ref is used", expected="may be None", got="bool(x)", fix="x is not None"):
        f.trace(X)


def test_a_comparison_names_the_remedy() -> None:
    @like_first
    def f(x, out):
        i = tk.parallel(8, 4)
        out[i] = jnp.where(i == 0, x[i], 0)  # <-

    with refused(TraceError, "a Tile is used", expected="tile.index", got="tile == 0 (int)", fix="for all"):
        f.trace(X)


def test_identity_and_hashes_work() -> None:
    @like_first
    def f(x, out):
        i = tk.parallel(8, 4)
        assert i is not None and x is not out
        by_tile = {i: 1, x: 2}
        assert by_tile[i] == 1 and by_tile[x] == 2 and i in by_tile and i in [i] and x in {x}
        out[i] = x[i]

    check(f, X, oracle=X)


REF_USES = [
    *(lambda x: x + 1, lambda x: 1 + x, lambda x: x + x, lambda x: x @ x, lambda x: -x, lambda x: abs(x)),
    *(lambda x: x.cumsum(), lambda x: x.sum(), lambda x: x.astype(jnp.int32), lambda x: len(x), lambda x: float(x)),
    *(lambda x: np.exp(x), lambda x: np.float32(2) * x, lambda x: X + x, lambda x: f"{x:.2f}"),
]


@pytest.mark.parametrize("use", REF_USES)
def test_a_ref_is_no_array(use: Callable[[Any], Any]) -> None:
    @like_first
    def f(x, out):
        use(x)

    with pytest.raises(IndexingError, match="a ref is used where a tile is needed") as raised:
        f.trace(X)
    error = raised.value
    assert error.loc.file == __file__
    assert "ref<f32[8], in>" in error.got and ("x[...]" in error.fix or "x.shape[0]" in error.fix)


def test_arithmetic_of_a_ref_names_the_remedy() -> None:
    @like_first
    def f(x, out):
        out[...] = x + 1  # <-

    with refused(IndexingError, "a ref is used", expected="a loaded tile", got="x + 1 (int), where x: ", fix="x[...]"):
        f.trace(X)


def test_a_ref_is_asked_for_what_it_may_have() -> None:
    @like_first
    def f(x, out):
        assert not hasattr(x, "no_such_thing") and f"{x}" == "Ref(x: ref<f32[8], in>)"
        out[...] = x[...]

    check(f, X, oracle=X)
