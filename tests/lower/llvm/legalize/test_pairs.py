"""Products of few rows by numbers of 4 bits: the same numbers, without a tile of unpacked ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lang.test_four_bits import codes
from tests.lower.llvm.machines import here
from tilekern.lower.llvm.lowering import LlvmLowering

pytest.importorskip("llvmlite", reason="needs llvmlite")

DTYPES = (jnp.int4, jnp.uint4, jnp.float4_e2m1fn)


def product(rows: int, transposed: bool, cast: Any, size: tuple[int, int] = (8, 48)) -> tk.Kernel:
    """x[rows, K] @ w[K, N], or @ w[N, K].T, in tiles."""

    @tk.kernel(out_type=lambda x, w: jax.ShapeDtypeStruct((rows, w.shape[0 if transposed else 1]), jnp.float32))
    def multiplies(x, w, out):
        j = tk.parallel(out.shape[1], size[1])

        def step(k, total):
            matrix = w[j, k].T if transposed else w[k, j]
            return tk.dot(x[:, k].astype(cast), matrix.astype(cast), total)

        out[:, j] = tk.fold(tk.serial(x.shape[1], size[0]), step, tk.zeros((rows, j), jnp.float32))

    return multiplies


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "cast"), [(1, jnp.bfloat16), (1, jnp.float32), (2, jnp.float16), (4, jnp.bfloat16)])
def test_sums_are_exact(rows: int, cast: Any, dtype: Any, transposed: bool) -> None:
    """Of numbers whose sums are exact in any order, also where tiles end within the arrays."""
    inner, columns = 22, 118
    x = np.random.default_rng(0).integers(-4, 5, (rows, inner)).astype(np.float32)
    w = codes((columns, inner) if transposed else (inner, columns), dtype)
    wide = w.astype(np.float32)
    expected = x @ (wide.T if transposed else wide)
    made = product(rows, transposed, cast)
    np.testing.assert_array_equal(made(x, w, target="cpu:llvm"), expected)
    func = made.trace(x, w).lower("cpu:xla").ir
    for machine in here():
        program = LlvmLowering(func, machine)
        assert "i8[" not in program.plan and "u8[" not in program.plan
        packed = (w.view(np.uint8)[:, ::2] & 15) | (w.view(np.uint8)[:, 1::2] << 4)
        np.testing.assert_array_equal(program.interpret(x, packed)[0], expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3])
def test_columns_that_are_looked_up_by_fours(rows: int, dtype: Any) -> None:
    """Four vectors of 16 bytes at once, then two vectors and an end, in a tile that ends within the array."""
    x = np.random.default_rng(0).integers(-4, 5, (rows, 22)).astype(np.float32)
    w = codes((22, 590), dtype)
    got = product(rows, False, jnp.bfloat16, (8, 214))(x, w, target="cpu:llvm")
    np.testing.assert_array_equal(got, x @ w.astype(np.float32))


def test_many_rows_keep_the_tile() -> None:
    """The tile is packed into panels, element by element."""
    x, w = jax.ShapeDtypeStruct((64, 32), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.int4)
    assert "i8[" in product(64, False, jnp.float32, (32, 64)).trace(x, w).lower("cpu:llvm").plan


@pytest.mark.parametrize("dtype", DTYPES)
def test_casts_of_unpacked_numbers_are_left_out(dtype: Any) -> None:
    """Rounding to bfloat16 would change no number, and shifts each word."""

    def shifts(cast: Any) -> int:
        x, w = jax.ShapeDtypeStruct((1, 32), cast), jax.ShapeDtypeStruct((32, 64), dtype)
        return product(1, False, cast, (32, 64)).trace(x, w).lower("cpu:llvm").text.count("lshr")

    assert shifts(jnp.bfloat16) == shifts(jnp.float32)
