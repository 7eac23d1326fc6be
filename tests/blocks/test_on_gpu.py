"""The model of GPUs: registers of tiles, what spills, and warps that compute while others load."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tilekern as tk
from tilekern.blocks import model_of, tiling
from tilekern.lower.target import resolve

S = jax.ShapeDtypeStruct
TARGETS = ("cuda:sm_80", "cuda:sm_90")


@tk.kernel(out_type=lambda x: x)
def softmax(x, out, *, rows: tk.Block):
    i = tk.parallel(x.shape[0], rows)
    out[i, :] = jax.nn.softmax(x[i, :].astype(jnp.float32), axis=1).astype(out.dtype)


@tk.kernel(out_type=lambda x: S(x.shape[:1], jnp.float32))
def sums(x, out, *, columns: tk.Block):
    i, tiles = tk.parallel(x.shape[0], x.shape[0]), tk.serial(x.shape[1], columns)
    out[i] = tk.fold(tiles, lambda j, total: total + x[i, j].sum(axis=1), tk.zeros(i, jnp.float32))


def seconds(kernel: Any, x: Any, target: str, **blocks: int) -> float:
    model = model_of(resolve(target))
    assert model is not None
    return float(model(tiling(kernel.trace(x, **blocks).ir)))


@pytest.mark.parametrize("target", TARGETS)
def test_a_tile_that_cannot_be_loaded_as_a_whole_spills_all_results(target: str) -> None:
    # 64 rows of 1024 are 256 lanes for each of 256 threads: 256 registers in float32, 128 in bfloat16.
    ratios = {
        dtype: seconds(softmax, S((2048, 1024), dtype), target, rows=64)
        / seconds(softmax, S((2048, 1024), dtype), target, rows=32)
        for dtype in (jnp.float32, jnp.bfloat16)
    }
    assert ratios[jnp.float32] > 1.5 * ratios[jnp.bfloat16]


@pytest.mark.parametrize("target", TARGETS)
def test_a_lane_waits_for_the_lanes_that_it_is_combined_with(target: str) -> None:
    @tk.kernel(out_type=lambda x: S((x.shape[0], 32), jnp.float32))
    def added(x, out, *, columns: tk.Block):
        i, tiles = tk.parallel(x.shape[0], x.shape[0]), tk.serial(x.shape[1], columns)
        out[i, :] = tk.fold(tiles, lambda j, total: total + x[i, j], tk.zeros((i, columns), jnp.float32))

    x = S((1, 4096), jnp.float32)
    # Five shuffles of 27 cycles in each of 128 iterations.
    waits = seconds(sums, x, target, columns=32) - seconds(added, x, target, columns=32)
    assert waits > 0.9 * 128 * 5 * 27 / 1.8e9


@pytest.mark.parametrize("target", TARGETS)
def test_warps_with_rows_of_their_own_compute_while_others_load(target: str) -> None:
    # A warp holds 128 elements of a row. Both programs load and add as many elements.
    own = seconds(sums, S((128, 65536), jnp.float32), target, columns=128)
    shared = seconds(sums, S((64, 131072), jnp.float32), target, columns=256)
    assert own < 0.9 * shared


@tk.kernel(out_type=lambda x, y: S((x.shape[0], y.shape[1]), x.dtype))
def product(x, y, out, *, inner: tk.Block):
    """out[M, N] = x[M, K] @ y[K, N]."""
    i, j = tk.parallel(x.shape[0], 128), tk.parallel(y.shape[1], 128)
    tiles = tk.serial(x.shape[1], inner)
    total = tk.fold(tiles, lambda k, acc: acc + tk.dot(x[i, k], y[k, j]), tk.zeros((i, j), jnp.float32))
    out[i, j] = total.astype(out.dtype)


@pytest.mark.parametrize("target", TARGETS)
def test_operands_that_cannot_be_loaded_an_iteration_ahead_are_waited_for(target: str) -> None:
    x = S((4096, 4096), jnp.bfloat16)

    def by_model(inner: int) -> float:
        model = model_of(resolve(target))
        assert model is not None
        return float(model(tiling(product.trace(x, x, inner=inner).ir)))

    # Tiles of 256 take 256 KiB twice.
    assert by_model(256) > 1.3 * by_model(128)
