"""The kernels of the benchmark of derived derivatives: what is compared computes the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from bench import derived
from tilekern.testing import assert_close


@pytest.mark.parametrize("name", derived.CASES)
def test_contestants_have_the_same_gradients(name: str) -> None:
    *functions, shapes = derived.CASES[name]
    shapes = [tuple(max(1, n // 16) for n in shape) for shape in shapes]
    arrays = [jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(shapes)]
    cotangent = jax.random.normal(jax.random.key(9), jax.eval_shape(functions[-1], *arrays).shape)
    ours, stated, xla = (jax.tree.leaves(derived.gradient(f, cotangent, *arrays)) for f in functions)
    with jax.enable_x64(True):
        wide = [x.astype(jnp.float64) for x in (cotangent, *arrays)]
        exact = jax.tree.leaves(derived.gradient(functions[-1], *wide))
    for kernels in (ours, stated):
        for got, naive, wanted in zip(kernels, xla, exact, strict=True):
            assert_close(got, wanted, naive, length=256)
