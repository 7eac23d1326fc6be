"""Loops with several iterations unrolled: each iteration still runs once, in order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tilekern.lower.mosaic.emit.unrolled_loop import unrolled_loop


def ran(first: Any, last: Any, count: int) -> tuple[Any, Any]:
    """A number that tells which iterations ran in which order, and how many did."""

    def body(i: Any, carried: Sequence[Any]) -> Sequence[Any]:
        order, many = carried
        return order * 31 + jnp.uint32(i), many + 1

    order, many = unrolled_loop(first, last, body, (jnp.uint32(0), jnp.int32(0)), count)
    return order, many


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 4), st.booleans())
def test_each_iteration_runs_once_in_order(first: int, last: int, count: int, known: bool) -> None:
    expected = 0
    for i in range(first, last):
        expected = (expected * 31 + i) % 2**32
    run: Any = ran if known else jax.jit(ran, static_argnums=2)
    order, many = run(np.int32(first), np.int32(last), count)
    assert (int(order), int(many)) == (expected, max(0, last - first))


def test_few_iterations_are_no_loop() -> None:
    def program(count: int, x: jax.Array) -> Any:
        def body(i: Any, carried: Sequence[Any]) -> Sequence[Any]:
            return (carried[0] + x,)

        return unrolled_loop(np.int32(0), np.int32(4), body, (x,), count)

    whole, half = (str(jax.make_jaxpr(partial(program, count))(jnp.zeros(()))) for count in (4, 2))
    assert "scan" not in whole and "while" not in whole
    assert "scan" in half
