"""Casts to narrow floats are left out only where they change no number."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk

pytest.importorskip("llvmlite", reason="needs llvmlite")


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("powers", [(), (0.5,), (16.0,), (16.0, 16.0, 16.0), (2.0**-20,), (3.0,)])
def test_products_of_cast_numbers_are_those_of_the_interpreter(powers: tuple[float, ...], dtype: Any) -> None:
    @tk.kernel(out_type=lambda x, w: jax.ShapeDtypeStruct((1, 32), jnp.float32))
    def multiplies(x, w, out):
        matrix = w[:, :].astype(jnp.float32)
        for power in powers:
            matrix = matrix * power
        out[:, :] = tk.dot(x[:, :].astype(dtype), matrix.astype(dtype))

    x = np.eye(1, 16, dtype=np.float32)
    w = np.arange(-128, 384, 1, np.int16).astype(np.int8).reshape(16, 32)
    expected = multiplies.trace(x, w).interpret(x, w)
    np.testing.assert_array_equal(multiplies(x, w, target="cpu:llvm"), expected)
