"""Factors of loops inside of loops, and of loops that run or do not run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tilekern as tk
from tests.lang.checks import like_first

X, W, CHOSEN = jnp.ones((16, 8)), jnp.ones((3, 8, 4)), jnp.ones(3, jnp.int32)


def grouped(kind: str) -> Any:
    """For each row the product with one matrix: a loop over matrices around the loop over k."""

    @tk.kernel(out_type=lambda x, w, chosen: jax.ShapeDtypeStruct((x.shape[0], w.shape[2]), x.dtype))
    def body(x, w, chosen, out):
        i = tk.parallel(x.shape[0], 4)

        def add(g, tile):
            def step(k, total):
                rows = x[i, k] + tile[:, :1] if kind == "addends of sums" else x[i, k]
                return total + tk.dot(rows, w[g, k, :])

            stop = {
                "always": lambda: x.shape[1],
                "other end": lambda: jnp.where(chosen[g] > 0, x.shape[1], 4),
                "sum decides": lambda: jnp.where(tile[0, 0] > 0, x.shape[1], 0),
            }.get(kind, lambda: jnp.where(chosen[g] > 0, x.shape[1], 0))()
            product = tk.fold(tk.serial(x.shape[1], 2, stop=stop, whole_tiles=True), step, jnp.zeros((4, 4)))
            product = product * stop if kind == "end is a factor" else product
            mine = (chosen[i.index % 3] == g)[None, None]
            found = jnp.where(mine, product, tile)
            return {
                "squares": lambda: found * found,
                "reset": lambda: jnp.where(mine, product, 1),
                "bias": lambda: found + 1,
            }.get(kind, lambda: found)()

        start = jnp.ones((4, 4)) if kind == "start" else jnp.zeros((4, 4))
        out[i, :] = tk.fold(tk.serial(w.shape[0]), add, start)

    return body


DIVISIBLE = ("select", "always")
OTHERS = "other end", "sum decides", "end is a factor", "addends of sums", "squares", "reset", "bias", "start"


@pytest.mark.parametrize("kind", [*DIVISIBLE, *OTHERS])
def test_sums_that_a_loop_around_carries(kind: str) -> None:
    rule = grouped(kind).sharding_rule(X, W, CHOSEN)
    assert ("k" in rule.sizes) == (kind in DIVISIBLE)
    if kind in DIVISIBLE:
        assert rule.sizes["k"] == {8} and rule.sums["k"] == {0}


def test_what_is_left_of_an_array_that_a_loop_updates_is_no_sum() -> None:
    """Devices would add up the rows that no program writes."""

    @tk.kernel(out_type=lambda total, x, w: (), donate=("total",))
    def into(total, x, w):
        i = tk.parallel(1)
        total[tk.ds(4 * i, 4), :] = tk.fold(
            tk.serial(x.shape[1], 2), lambda k, t: t + tk.dot(x[:4, k], w[k, :]), jnp.zeros((4, 4))
        )

    assert "k" not in into.sharding_rule(jnp.ones((8, 4)), X, jnp.ones((8, 4))).sizes


@pytest.mark.parametrize("grows", [False, True])
def test_a_carry_that_begins_at_0_is_no_sum_if_it_grows(grows: bool) -> None:
    """A tile adds up its rows and the carry: with other tiles the carry is added more often."""

    @tk.kernel(out_type=lambda x: tk.Sum(jax.ShapeDtypeStruct((8,), x.dtype)))
    def body(x, out):
        i = tk.parallel(x.shape[0], 4)

        def step(_, carry):
            total, count = carry
            return total + x[i, :].sum(axis=0) + count, count + 1 if grows else count

        out.at[:].add(tk.fold(tk.serial(3), step, (jnp.zeros(8), jnp.zeros(8)))[0])

    assert body.sharding_rule(X).sizes["i"] == {16, 4}


def test_a_loop_over_tiles_that_is_chosen_by_its_own_rows() -> None:
    @like_first
    def body(x, out):
        i = tk.parallel(x.shape[0], 4)
        out[i, :] = x[i, :] + tk.fold(
            tk.serial(x.shape[0], 4), lambda k, t: t + x[k, :].sum(axis=0)[None], jnp.zeros((1, 8))
        )

    assert not body.sharding_rule(X).sizes
