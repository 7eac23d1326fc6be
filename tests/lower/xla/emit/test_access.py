"""Positions of the XLA backend at the ends of int32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import both, kernel


@pytest.mark.parametrize("index", [2**30, -(2**30), 2**29, 2**31 - 1, -(2**31), 0, 1, 2])
def test_an_index_that_int32_cannot_hold_is_out_of_bounds(index: int) -> None:
    @kernel(((8,), jnp.float32))
    def f(x: tk.Ref, at: tk.Ref, out: tk.Ref) -> None:
        n = at[0]
        out[0] = x.load(n * 4, fill=-1.0)
        out[1] = x.load(tk.ds(n * 4, 1), fill=-1.0)[0]
        out[2:6] = x.load(tk.tile(10, 4, n), fill=-1.0)
        out[6:8] = x.load(jnp.arange(2) + n * 4, fill=-1.0)

    x = np.arange(10, dtype=np.float32)
    positions = 4 * index + np.array([0, 0, 0, 1, 2, 3, 0, 1])
    inside = (positions >= 0) & (positions < 10)
    expected = np.where(inside, positions, -1.0)
    for found in jax.tree.leaves(both(f, x, np.array([index], np.int32))):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("first", [-6, -1, 0, 3])
def test_positions_before_an_array_are_not_written(first: int) -> None:
    @kernel(((5,), jnp.float32))
    def f(x: tk.Ref, at: tk.Ref, out: tk.Ref) -> None:
        out[:] = jnp.zeros(5, jnp.float32)
        out.store(tk.ds(at[0], 4), x[:])

    x = np.arange(1, 5, dtype=np.float32)
    expected = np.zeros(5, np.float32)
    for n in range(4):
        if 0 <= first + n < 5:
            expected[first + n] = x[n]
    for found in jax.tree.leaves(both(f, x, np.array([first], np.int32))):
        np.testing.assert_array_equal(found, expected)
