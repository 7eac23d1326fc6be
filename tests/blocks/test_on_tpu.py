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
    x = S((4096, 1024), jnp.float32)
    assert seconds(double, x, target, rows=512, columns=1024) < 3 * fetch(x, target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("columns", [1000, 1024])
def test_an_array_that_xla_stores_the_other_way_is_copied(target: str, columns: int) -> None:
    # Rows of 1000 would leave 24 lanes empty, columns of 4096 leave none: in and out are read and stored once more.
    x = S((4096, 1000), jnp.float32)
    copied = seconds(double, x, target, rows=512, columns=columns)
    assert 5 * fetch(x, target) < copied < 7 * fetch(x, target)


@pytest.mark.parametrize("target", TARGETS)
def test_lanes_behind_the_end_of_the_only_tile_take_no_time(target: str) -> None:
    @tk.kernel(out_type=lambda x: x)
    def powers(x, out, *, rows: tk.Block, columns: tk.Block):
        i, j = tk.parallel(x.shape[0], rows), tk.parallel(x.shape[1], columns)
        s = x[i, j]
        for _ in range(64):
            s = s * s + 1.0
        out[i, j] = s

    x = S((4096, 1024), jnp.float32)
    one, two = (seconds(powers, x, target, rows=256, columns=n) for n in (1024, 2048))
    assert one > 3 * fetch(x, target)
    assert two < 1.05 * one


@pytest.mark.parametrize("target", TARGETS)
def test_one_element_of_a_dim_is_no_row_of_a_register(target: str) -> None:
    @tk.kernel(out_type=lambda x: x)
    def heads(x, out, *, rows: tk.Block):
        i, h = tk.parallel(x.shape[0], rows), tk.parallel(x.shape[1])
        out[i, h, :] = 2 * x[i, h, :]

    # XLA moves the heads to the front, and back; a program fetches tiles of rows and columns.
    x = S((4096, 8, 128), jnp.float32)
    assert seconds(heads, x, target, rows=512) < 8 * fetch(x, target)


@pytest.mark.parametrize("target", TARGETS)
def test_keys_that_are_in_memory_are_fetched_once_however_far_a_program_reads(target: str) -> None:
    @tk.kernel(out_type=lambda q, k: S((q.shape[0], k.shape[1]), jnp.float32))
    def causal(q, k, out, *, rows: tk.Block, keys: tk.Block):
        i = tk.parallel(q.shape[0], rows)
        j = tk.serial(k.shape[0], keys, stop=(i.index + 1) * rows)
        out[i, :] = tk.fold(j, lambda j, acc: acc + k[j, :].sum(axis=0), q[i, :].astype(jnp.float32))

    def seconds_of(rows: int) -> float:
        model, x = model_of(resolve(target)), S((8192, 128), jnp.bfloat16)
        assert model is not None
        return float(model(tiling(causal.trace(x, x, rows=rows, keys=512).ir)))

    # Sixteen programs, of which each would fetch the 2 MiB of the keys.
    assert seconds_of(512) < 16 * fetch(S((8192, 128), jnp.bfloat16), target)


@pytest.mark.parametrize("target", TARGETS)
def test_an_iteration_waits_for_the_rows_of_the_matrix_unit(target: str) -> None:
    @tk.kernel(out_type=lambda x, y: S((x.shape[0], y.shape[1]), jnp.float32))
    def product(x, y, out, *, k: tk.Block):
        i, j = tk.parallel(x.shape[0], x.shape[0]), tk.parallel(y.shape[1], y.shape[1])
        tiles = tk.serial(x.shape[1], k)
        out[i, j] = tk.fold(tiles, lambda k, acc: acc + tk.dot(x[i, k], y[k, j]), tk.zeros((i, j), jnp.float32))

    def seconds_of(k: int) -> float:
        model = model_of(resolve(target))
        assert model is not None
        return float(model(tiling(product.trace(S((8, 8192), jnp.bfloat16), S((8192, 128), jnp.bfloat16), k=k).ir)))

    unit = device_of(resolve(target)).matrix_size
    assert seconds_of(unit) > (8192 / unit - 1) * unit / 1.6e9


@pytest.mark.parametrize("target", TARGETS)
def test_two_tiles_of_a_row_that_they_do_not_fill_wait_together(target: str) -> None:
    @tk.kernel(out_type=lambda x: S(x.shape[:1], jnp.float32))
    def centred_sums(x, out, *, columns: tk.Block):
        i, tiles = tk.parallel(x.shape[0], 8), tk.serial(x.shape[1], columns)

        def add(j: tk.Tile, total: Any) -> Any:
            s = x[i, j]
            for _ in range(7):
                s = s - s.sum(axis=1)[:, None]
            return total + s.sum(axis=1)

        out[i] = tk.fold(tiles, add, tk.zeros(i, jnp.float32))

    # A row of 1024 takes two iterations in turn; a row of 1000 takes a tile, and another one behind it. XLA reads and
    # stores the array of 1000 once more.
    filled, ragged = (seconds(centred_sums, S((4096, n), jnp.float32), target, columns=512) for n in (1024, 1000))
    copy = 2.1 * fetch(S((4096, 1024), jnp.float32), target)
    assert filled - (ragged - copy) > 4096 // 8 * 7 * 140 / 1.6e9


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


@pytest.mark.parametrize("column", [lambda w: w, lambda w: w + 1, lambda w: 2.0 * (w - 3.0)])
def test_what_is_computed_from_a_vector_becomes_rows_too(column: Any) -> None:
    @tk.kernel(out_type=lambda x, w: x)
    def scaled(x, w, out):
        i = tk.parallel(x.shape[0], 8)
        out[i, :] = x[i, :] * column(w[i])[:, None]

    of_kernel = tiling(scaled.trace(S((64, 256), jnp.float32), S((64,), jnp.float32)).ir)
    assert sum(op.turns for op in of_kernel.ops) == 1
