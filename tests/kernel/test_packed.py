"""Arrays of 4-bit numbers reach native code without a copy, however XLA made them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lang.test_four_bits import codes
from tilekern.kernel.packed import packed

DTYPES = (jnp.int4, jnp.uint4, jnp.float4_e2m1fn)


@tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32))
def doubled(x, out):
    i = tk.parallel(x.shape[0], 4)
    out[i] = 2 * x[i].astype(jnp.float32)


def on_llvm(x: jax.Array) -> jax.Array:
    return doubled(x, target="cpu:llvm")


def test_arrays_that_stay() -> None:
    even, odd = jnp.zeros((3, 4), jnp.int4), jnp.zeros((4, 3), jnp.int4)
    shapes = [(x.dtype, x.shape) for x in packed([even, odd, even], in_place=(0, 1))]
    assert shapes == [(jnp.int4, (3, 4)), (jnp.uint8, (4, 2)), (jnp.uint8, (3, 2))]


WAYS: dict[str, Callable[[Any], Any]] = {
    "eager": on_llvm,
    "jit": jax.jit(on_llvm),
    "constant": lambda x: jax.jit(lambda: on_llvm(x))(),
    "computed": lambda x: jax.jit(lambda y: on_llvm(y.astype(x.dtype)))(x.astype(jnp.float32)),
    "slice": lambda x: jax.jit(lambda y: on_llvm(y[1:]))(jnp.concatenate([x[:1], x])),
    "odd slice": lambda x: jax.jit(lambda y: on_llvm(y[:, 1:]))(jnp.concatenate([x[:, :1], x], 1)),
    "scan": lambda x: jax.lax.scan(lambda c, y: (c, on_llvm(y)), 0, x.reshape(3, 5, -1))[1].reshape(x.shape),
    "vmap": lambda x: jax.vmap(on_llvm)(x.reshape(3, 5, -1)).reshape(x.shape),
    "vmap of columns": lambda x: jax.vmap(on_llvm, in_axes=2, out_axes=2)(x.reshape(3, 5, -1)).reshape(x.shape),
    "transposed": lambda x: jax.jit(lambda y: on_llvm(y.T))(x.T),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [14, 13])
def test_the_same_numbers(columns: int, dtype: Any, way: str) -> None:
    pytest.importorskip("llvmlite", reason="needs llvmlite")
    x = codes((15, columns), dtype)
    np.testing.assert_array_equal(WAYS[way](jnp.asarray(x)), 2 * x.astype(np.float32))


def test_no_copy() -> None:
    """XLA's program is the call alone."""
    pytest.importorskip("llvmlite", reason="needs llvmlite")
    compiled = jax.jit(on_llvm).lower(jnp.zeros((64, 64), jnp.int4)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes == 0
    assert "fusion" not in compiled.as_text()
