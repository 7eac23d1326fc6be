"""Primitives that JAX composes of others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.lang.checks import check, kernel


@pytest.mark.parametrize("side", ["left", "right"])
def test_places_in_a_sorted_tile_are_those_of_jax(side: str) -> None:
    special = np.float32([-np.inf, -np.nan, -2, -0.0, 0.0, 1, 1.5, 7, 9, np.inf, np.nan])
    table = np.float32([-np.inf, -2, -0.0, 0.0, 1, 1, 7, np.nan])

    @kernel((special.shape, np.int32), (special.shape, np.int32))
    def f(x, table, places, integers):
        places[...] = jnp.searchsorted(table[...], x[...], side=side)
        integers[...] = jnp.searchsorted(jnp.array([-3, 0, 0, 5]), jnp.arange(-5, 6), side=side)

    integers = np.searchsorted([-3, 0, 0, 5], np.arange(-5, 6), side=side).astype(np.int32)
    check(f, special, table, oracle=(jnp.searchsorted(table, special, side=side), integers))


def test_polynomials_and_interpolation_are_those_of_jax() -> None:
    x = np.float32([-9, -2, -1, 0, 1, 2, 3, 11])  # all sums and products are exact

    def results(x):
        points, values = jnp.array([-2.0, 0, 2, 4]), jnp.array([1.0, 5, 3, 7])
        return jnp.polyval(jnp.array([1.0, -2, 3]), x), jnp.interp(x, points, values), jnp.digitize(x, points)

    @kernel(None, None, (x.shape, np.int32))
    def f(x, polynomial, interpolated, bins):
        polynomial[...], interpolated[...], bins[...] = results(x[...])

    check(f, x, oracle=(x * x - 2 * x + 3, *results(x)[1:]))

    def gradient(function):
        return jax.grad(lambda x: function(x)[0].sum() + function(x)[1].sum())(x)

    np.testing.assert_array_equal(gradient(f), gradient(results))
