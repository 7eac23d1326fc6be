"""The model of TPUs: copies of XLA around a call, pipelines of loops, and steps that nothing overlaps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tilekern as tk
from tilekern.blocks import model_of, tiling
from tilekern.lower.target import device_of, resolve

S = jax.ShapeDtypeStruct
TARGETS = ("tpu:v5e", "tpu:v6e")


@tk.kernel(out_type=lambda x: x)
def double(x, out, *, rows: tk.Block, columns: tk.Block):
    i, j = tk.parallel(x.shape[0], rows), tk.parallel(x.shape[1], columns)
    out[i, j] = 2 * x[i, j]


@tk.kernel(out_type=lambda x: x)
def centred(x, out, *, rows: tk.Block, columns: tk.Block):
    """Rows less their sum: two loops over the tiles of each row."""
    i, tiles = tk.parallel(x.shape[0], rows), tk.serial(x.shape[1], columns)
    total = tk.fold(tiles, lambda j, total: total + x[i, j].sum(axis=1), tk.zeros(i, jnp.float32))

    def store(j: tk.Tile) -> None:
        out[i, j] = x[i, j] - total[:, None]

    tk.foreach(tiles, store)


@tk.kernel(out_type=lambda x: S(x.shape[:1], jnp.float32))
def sums(x, out, *, rows: tk.Block, columns: tk.Block):
    i, tiles = tk.parallel(x.shape[0], rows), tk.serial(x.shape[1], columns)
    out[i] = tk.fold(tiles, lambda j, total: total + x[i, j].sum(axis=1), tk.zeros(i, jnp.float32))


def seconds(kernel: Any, x: Any, target: str, **blocks: int) -> float:
    model = model_of(resolve(target))
    assert model is not None
    return float(model(tiling(kernel.trace(x, **blocks).ir)))


def fetch(x: Any, target: str) -> float:
    """Seconds to read an array once."""
    return x.size * x.dtype.itemsize / device_of(resolve(target)).bandwidth


@pytest.mark.parametrize("target", TARGETS)
def test_xla_copies_arrays_whose_tiles_are_no_whole_tiles_of_memory(target: str) -> None:
    x = S((4096, 4096), jnp.float32)
    whole = seconds(double, x, target, rows=512, columns=512)
    # In and out: each is copied in its layout, and split, with rows of 64 elements in registers of 128.
    lanes = seconds(double, x, target, rows=512, columns=64)
    assert lanes >= whole + 2 * (3 + 2) * fetch(x, target)
    sublanes = seconds(double, x, target, rows=4, columns=4096)
    assert sublanes >= whole + 2 * 2 * fetch(x, target)


@pytest.mark.parametrize("target", TARGETS)
def test_a_block_that_is_the_whole_dim_is_not_copied(target: str) -> None:
    x = S((4096, 1000), jnp.float32)
    whole = seconds(double, x, target, rows=512, columns=1000)
    assert whole < 1.2 * seconds(double, x, target, rows=512, columns=1024) < 3 * fetch(x, target)


@pytest.mark.parametrize("target", TARGETS)
def test_each_loop_that_does_not_fit_fetches_its_own_tiles(target: str) -> None:
    x = S((8192, 16384), jnp.float32)
    # Two loops read x, one stores: three times its bytes.
    assert seconds(centred, x, target, rows=8192, columns=128) >= 3 * fetch(x, target)


@pytest.mark.parametrize("target", TARGETS)
def test_a_single_program_computes_after_it_has_fetched(target: str) -> None:
    x = S((2048, 2048), jnp.float32)
    alone, pipelined = (seconds(centred, x, target, rows=rows, columns=1024) for rows in (2048, 256))
    # Both fetch and store all rows once.
    assert pipelined < alone < 3 * fetch(x, target)


@pytest.mark.parametrize("target", TARGETS)
def test_the_only_loop_of_a_single_program_is_pipelined_if_its_arrays_take_long_to_fetch(target: str) -> None:
    x = S((2048, 4096), jnp.float32)
    assert seconds(sums, x, target, rows=2048, columns=512) <= 1.3 * fetch(x, target)
