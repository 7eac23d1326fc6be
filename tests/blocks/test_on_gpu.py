"""The model of GPUs: registers of tiles, what spills, and warps that compute while others load."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tilekern as tk
from tilekern.blocks import model_of, tiling
from tilekern.lower.target import device_of, resolve

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
    @tk.kernel(out_type=lambda x: S((x.shape[0], 64), jnp.float32))
    def added(x, out, *, columns: tk.Block):
        i, tiles = tk.parallel(x.shape[0], x.shape[0]), tk.serial(x.shape[1], columns)
        out[i, :] = tk.fold(tiles, lambda j, total: total + x[i, j], tk.zeros((i, columns), jnp.float32))

    x = S((32, 4096), jnp.float32)
    # Sixteen lanes for each thread are too many to unroll: four shuffles of 27 cycles in each of 64 iterations.
    # An iteration of `added` has 32 × 64 lanes to add to others, which takes as long as one of these shuffles at most.
    waits = seconds(sums, x, target, columns=64) - seconds(added, x, target, columns=64)
    assert waits > 64 * 3 * 27 / 1.8e9


@pytest.mark.parametrize("target", TARGETS)
def test_loads_of_an_unrolled_loop_are_in_flight_together(target: str) -> None:
    @tk.kernel(out_type=lambda x: S(x.shape, jnp.float32))
    def doubled(x, out, *, columns: tk.Block):
        i = tk.parallel(x.shape[0], x.shape[0])

        def store(j: tk.Tile) -> None:
            out[i, j] = 2 * x[i, j]

        tk.foreach(tk.serial(x.shape[1], columns), store)

    x = S((1, 1024), jnp.float32)
    # 32 iterations of one lane a thread are put one behind another; a store keeps the load behind it from moving up.
    assert seconds(sums, x, target, columns=32) < 0.5 * 32 * 400 / 1.8e9 < seconds(doubled, x, target, columns=32)


@pytest.mark.parametrize("target", TARGETS)
def test_warps_behind_the_end_of_an_array_move_nothing(target: str) -> None:
    @tk.kernel(out_type=lambda x: x)
    def double(x, out, *, rows: tk.Block, columns: tk.Block):
        i, j = tk.parallel(x.shape[0], rows), tk.parallel(x.shape[1], columns)
        out[i, j] = 2 * x[i, j]

    # 2048 bfloat16 are 8 warps of a row, of which 4 are behind the end; 256 are one, of which 64 are in the array.
    wide, narrow = (S((65536, n), jnp.bfloat16) for n in (1024, 64))
    halves, full = (seconds(double, wide, target, rows=4, columns=n) for n in (2048, 1024))
    parts, whole = (seconds(double, narrow, target, rows=64, columns=n) for n in (256, 64))
    assert halves < 1.1 * full
    # All multiprocessors together load and store 36 bytes a cycle each.
    whole_warps = 2 * narrow.shape[0] * 256 * narrow.dtype.itemsize
    assert parts >= whole_warps / (36 * device_of(resolve(target)).cores * 1.8e9) > whole


@tk.kernel(out_type=lambda x, y: S((x.shape[0], y.shape[1]), x.dtype))
def product(x, y, out, *, m: tk.Block, n: tk.Block, k: tk.Block):
    i, j = tk.parallel(x.shape[0], m), tk.parallel(y.shape[1], n)
    tiles = tk.serial(x.shape[1], k)
    acc = tk.fold(tiles, lambda k, acc: acc + tk.dot(x[i, k], y[k, j]), tk.zeros((i, j), jnp.float32))
    out[i, j] = acc.astype(out.dtype)


def seconds_of_product(size: int, target: str, **blocks: int) -> float:
    model, x = model_of(resolve(target)), S((size, size), jnp.bfloat16)
    assert model is not None
    return float(model(tiling(product.trace(x, x, **blocks).ir)))


def test_the_padding_of_an_operand_is_copied_too() -> None:
    # Matrix units take a depth of 16 at least.
    assert seconds_of_product(2048, "cuda:sm_90", m=64, n=1024, k=8) > 1.8 * seconds_of_product(
        2048, "cuda:sm_90", m=64, n=1024, k=16
    )


def test_large_products_hide_the_wait_for_their_operands() -> None:
    # Alone, a multiprocessor takes 32 times 1024 cycles for the product, and the start.
    cycles = seconds_of_product(2048, "cuda:sm_90", m=128, n=256, k=64) * 1.8e9
    assert 32 * 1024 < cycles < 1.6 * 32 * 1024


@pytest.mark.parametrize("target", TARGETS)
def test_warps_with_rows_of_their_own_compute_while_others_load(target: str) -> None:
    # A warp holds 128 elements of a row. Both programs load and add as many elements.
    own = seconds(sums, S((128, 65536), jnp.float32), target, columns=128)
    shared = seconds(sums, S((64, 131072), jnp.float32), target, columns=256)
    assert own < 0.9 * shared


@pytest.mark.parametrize("target", TARGETS)
def test_operands_that_cannot_be_loaded_an_iteration_ahead_are_waited_for(target: str) -> None:
    short, long = (seconds_of_product(4096, target, m=128, n=128, k=k) for k in (128, 256))
    # Tiles of 256 take 256 KiB twice.
    assert long > 1.3 * short


@pytest.mark.parametrize("target", TARGETS)
def test_arrays_without_elements_take_the_time_of_a_launch(target: str) -> None:
    assert 1e-6 <= seconds(softmax, S((64, 0), jnp.float32), target, rows=32) < 1e-5
