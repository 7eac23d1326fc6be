"""Distances between two uses of the same bytes, and the choices of blocks that follow from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tilekern as tk
from bench.plain_kernels import CASES, Case
from tilekern.blocks import by_speed, model_of
from tilekern.blocks.choose import Model, tilings
from tilekern.blocks.reuse import traffic
from tilekern.blocks.tiling import Tiling
from tilekern.lower.target import resolve

S = jax.ShapeDtypeStruct
ROWS, COLUMNS = 4096, 4096


def tiling_of(kernel: Any, *types: Any, **blocks: int) -> Tiling:
    (of_kernel,) = tilings([kernel.trace(*types, **blocks).ir])
    return of_kernel


def model() -> Model:
    cpu = model_of(resolve("cpu:llvm"))
    assert cpu is not None
    return cpu


def fastest(kernel: Any, *types: Any) -> Mapping[str, int]:
    start = dict.fromkeys(kernel.signature.blocks, 128)
    return next(by_speed(lambda blocks: [kernel.trace(*types, **blocks).ir], start, list(start), model()))


@tk.kernel(out_type=lambda x: x)
def normalize(x, out, *, rows: tk.Block, columns: tk.Block):
    """Rows over their sum; rows that fit a block are read once."""
    i, width = tk.parallel(x.shape[0], rows), x.shape[1]
    if width <= columns:
        whole = x[i, :]
        out[i, :] = whole / whole.sum(axis=1)[:, None]
        return
    tiles = tk.serial(width, columns)
    total = tk.fold(tiles, lambda j, total: total + x[i, j].sum(axis=1), tk.zeros(i, jnp.float32))

    def store(j: tk.Tile) -> None:
        out[i, j] = x[i, j] / total[:, None]

    tk.foreach(tiles, store)


@tk.kernel(out_type=lambda x, y: S((x.shape[0], y.shape[1]), x.dtype))
def product(x, y, out, *, rows: tk.Block, columns: tk.Block, inner: tk.Block):
    """out[M, N] = x[M, K] @ y[K, N]."""
    i, j = tk.parallel(x.shape[0], rows), tk.parallel(y.shape[1], columns)
    tiles = tk.serial(x.shape[1], inner)
    out[i, j] = tk.fold(tiles, lambda k, acc: acc + tk.dot(x[i, k], y[k, j]), tk.zeros((i, j), jnp.float32))


@pytest.mark.parametrize("rows", [4, 128])
def test_rows_that_are_read_again_come_from_as_far_as_the_rows_of_a_program(rows: int) -> None:
    of_kernel = tiling_of(normalize, S((ROWS, COLUMNS), jnp.float32), rows=rows, columns=512)
    first, again, stored = traffic(of_kernel)
    nbytes = ROWS * COLUMNS * 4
    assert [float(part.bytes) for part in (first, again, stored)] == [nbytes] * 3
    assert first.distance is None and stored.distance is None
    assert again.distance == 2 * rows * COLUMNS * 4  # the rows of x and of the result


def test_operands_of_a_product_are_read_again_after_the_programs_between() -> None:
    of_kernel = tiling_of(product, *[S((1024, 1024), jnp.float32)] * 2, rows=256, columns=128, inner=64)
    x, y, out = (n for n in range(3))
    parts = list(traffic(of_kernel))
    by_array = {n: [(part.bytes, part.distance) for part in parts if part.access.array == n] for n in (x, y)}
    kib, mib = 1 << 10, 1 << 20
    # x again for each program of a row of tiles, after its rows of x, columns of y, and tile of the result.
    assert by_array[x] == [(7 * 4 * mib, (1024 + 512 + 128) * kib), (4 * mib, None)]
    # y again for each row of tiles, after that row of x, all of y, and the row of the result.
    assert by_array[y] == [(3 * 4 * mib, (1024 + 4096 + 1024) * kib), (4 * mib, None)]
    assert [part.distance for part in traffic(of_kernel) if part.access.array == out] == [None]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_traffic_of_an_access_is_at_most_what_its_tiles_hold(case: Case) -> None:
    of_kernel = tiling_of(case.kernel, *case.arguments, **dict.fromkeys(case.kernel.signature.blocks, 64))
    for access in of_kernel.accesses:
        moved = sum(float(part.bytes) for part in traffic(of_kernel) if part.access is access)
        readings = access.rows_of_use + access.passes - 1
        assert 0 < moved <= float(access.times * access.tile.bytes * readings) * (1 + 1e-9)


def test_rows_are_read_again_from_a_cache() -> None:
    x = S((ROWS, COLUMNS), jnp.float32)
    few, many = (float(model()(tiling_of(normalize, x, rows=rows, columns=512))) for rows in (16, 1024))
    assert many > 1.2 * few


def test_a_block_that_holds_an_axis_is_tried_where_the_body_then_reads_once() -> None:
    chosen = fastest(normalize, S((ROWS, COLUMNS), jnp.float32))
    assert chosen["columns"] >= COLUMNS


def test_blocks_of_equal_size_hide_no_choice() -> None:
    @tk.kernel(out_type=lambda x: x)
    def f(x, out, *, rows: tk.Block, columns: tk.Block):
        i, tiles = tk.parallel(x.shape[0], rows), tk.serial(x.shape[1], columns)

        def add(j, carry):
            high, low = carry
            # With equal blocks both constants have one shape, and are one value.
            return high + jnp.full((rows,), 0.5) + x[i, j].sum(axis=1), low + jnp.full((columns,), 0.5).sum()

        high, low = tk.fold(tiles, add, (tk.zeros(i, jnp.float32), jnp.float32(0)))

        def store(j: tk.Tile) -> None:
            out[i, j] = x[i, j] + high[:, None] + low

        tk.foreach(tiles, store)

    x, start = S((ROWS, COLUMNS), jnp.float32), {"rows": 128, "columns": 128}
    choices = list(by_speed(lambda blocks: [f.trace(x, **blocks).ir], start, list(start), model()))
    assert {choice["rows"] for choice in choices} > {1, 16, 1024}
    assert {choice["columns"] for choice in choices} > {1, 16, 1024}


def test_steps_of_one_short_run_wait_for_it() -> None:
    @tk.kernel(out_type=lambda x: x)
    def total(x, out, *, tokens: tk.Block, channels: tk.Block):
        j = tk.parallel(x.shape[1], channels)

        def add(t, state):
            sums = jnp.cumsum(x[t, j], axis=0) + state
            out[t, j] = sums
            return sums[-1]

        tk.fold(tk.serial(x.shape[0], tokens), add, tk.zeros(j, jnp.float32))

    x = S((4096, 4096), jnp.float32)
    one, sixteen = (float(model()(tiling_of(total, x, tokens=tokens, channels=32))) for tokens in (1, 16))
    assert one > 2 * sixteen


def test_only_what_takes_long_to_compute_again_has_a_buffer() -> None:
    @tk.kernel(out_type=lambda x: x)
    def scale(x, out, *, rows: tk.Block, function: bool):
        i = tk.parallel(x.shape[0], rows)
        tile = jnp.exp(x[i, :]) if function else 2 * x[i, :]
        out[i, :] = tile / tile.sum(axis=1)[:, None]

    for function in (False, True):
        (of_kernel,) = tilings([scale.trace(S((64, 1000), jnp.float32), rows=8, function=function).ir])
        tile, sums = 8 * 1000 * 4, 8 * 4
        assert of_kernel.held.bytes >= tile  # on machines that hold what they loaded
        assert of_kernel.held.bytes_of_buffers == (tile + sums if function else sums)


def test_the_sum_of_a_product_has_one_buffer() -> None:
    of_kernel = tiling_of(product, *[S((1024, 1024), jnp.float32)] * 2, rows=256, columns=128, inner=64)
    assert of_kernel.held.bytes_of_buffers == math.prod((256, 128, 4))


def test_the_cpu_loads_ahead_while_short_runs_arrive() -> None:
    """A run of 2 KiB that nothing announced is waited for; of shorter ones several arrive at once."""

    @tk.kernel(out_type=lambda x: x)
    def doubled(x, out, *, columns: tk.Block):
        i, j = tk.parallel(x.shape[0], 64), tk.parallel(x.shape[1], columns)
        out[i, j] = x[i, j] * 2

    x = S((8192, 8192), jnp.float32)
    short, long = (float(model()(tiling_of(doubled, x, columns=columns))) for columns in (64, 512))
    assert short < 1.5 * long  # 1.07; with as long a wait for each of 8 times as many runs 2.5


@tk.kernel(out_type=lambda x: x)
def swapped_halves(x, out, *, rows: tk.Block):
    """The two halves of each row, swapped: loads and stores have a half each."""
    i, half = tk.parallel(x.shape[0], rows), x.shape[1] // 2
    low, high = x[i, :half], x[i, half:]
    out[i, :half] = high
    out[i, half:] = low


def test_halves_of_rows_are_other_bytes_and_make_whole_rows() -> None:
    halves = tiling_of(swapped_halves, S((1024, 256), jnp.float32), rows=8)
    first = [part for part in traffic(halves) if part.distance is None]
    assert sum(float(part.bytes) for part in first) == 2 * 1024 * 256 * 4
    assert all(access.shares_rows for access in halves.accesses)
    quarter = tiling_of(swapped_quarter, S((1024, 256), jnp.float32), rows=8)
    assert not any(access.shares_rows for access in quarter.accesses if not access.stores)


@tk.kernel(out_type=lambda x: S((x.shape[0], x.shape[1] // 2), x.dtype))
def swapped_quarter(x, out, *, rows: tk.Block):
    """The sum of the first and the last quarter: the middle is not read."""
    i, quarter = tk.parallel(x.shape[0], rows), x.shape[1] // 4
    total = x[i, :quarter] + x[i, 3 * quarter :]
    out[i, :quarter] = total
    out[i, quarter:] = -total


def test_stores_of_half_rows_leave_gaps_unless_a_program_has_one_row() -> None:
    """The loads are the same; with one row a program, the stores follow each other."""
    rows, width = 1 << 15, 256
    seconds = {n: float(model()(tiling_of(swapped_halves, S((rows, width), jnp.float32), rows=n))) for n in (1, 8, 64)}
    whole = {n: float(model()(tiling_of(copied, S((rows, width), jnp.float32), rows=n))) for n in seconds}
    slower = {n: seconds[n] / whole[n] for n in seconds}
    assert slower[1] < 1.1 and min(slower[8], slower[64]) > 1.2


def test_short_gaps_between_few_halves_are_prefetched() -> None:
    """Gaps of 256 bytes, in tiles of 2 KiB: longer gaps and larger tiles are slower."""
    x = S((1 << 15, 128), jnp.float32)
    halves, whole = ({n: float(model()(tiling_of(k, x, rows=n))) for n in (4, 16)} for k in (swapped_halves, copied))
    assert halves[4] < 1.15 * whole[4] and halves[16] > 1.2 * whole[16]


@tk.kernel(out_type=lambda x: x)
def copied(x, out, *, rows: tk.Block):
    i = tk.parallel(x.shape[0], rows)
    out[i, :] = -x[i, :]


@tk.kernel(out_type=lambda x, w: x)
def two_taps(x, w, out, *, rows: tk.Block, columns: tk.Block):
    """out[t, c] = w[0, c] x[t, c] + w[1, c] x[t - 1, c]."""
    t, c = tk.parallel(x.shape[0], rows), tk.parallel(x.shape[1], columns)
    before = x[tk.ds(t.start - 1, rows), c]
    out[t, c] = w[0, c][None, :] * x[t, c] + w[1, c][None, :] * before


@pytest.mark.parametrize("rows", [1, 4])
def test_a_tap_reads_rows_that_the_tile_above_had(rows: int) -> None:
    """Of each tile one row is another one than those of the first tap: a step of t touched it before."""
    x, w = S((64, 512), jnp.float32), S((2, 512), jnp.float32)
    taps = tiling_of(two_taps, x, w, rows=rows, columns=128)
    (second,) = [a for a in taps.accesses if a.shift is not None and a.shift.dim == 0 and a.array == 0]
    parts = [part for part in traffic(taps) if part.access is second and part.bytes]
    far = [part for part in parts if part.distance is not None and part.distance > 4 * 128 * rows * 4 + 1024]
    assert sum(float(part.bytes) for part in far) == 64 * 512 * 4 / rows
    weights = [a for a in taps.accesses if a.array == 1]
    assert [float(a.rows_of_use) for a in weights] == [rows, rows]


@tk.kernel(out_type=lambda x, w: x)
def normalize_with_weight(x, w, out, *, rows: tk.Block, columns: tk.Block):
    """Rows over the root of their sum of squares, times a weight; rows that fit a block are loaded once."""
    i, width = tk.parallel(x.shape[0], rows), x.shape[1]
    if width <= columns:
        whole = x[i, :]
        out[i, :] = whole * jax.lax.rsqrt((whole * whole).sum(axis=1))[:, None] * w[:][None, :]
        return
    tiles = tk.serial(width, columns)

    def add(j: tk.Tile, total: jax.Array) -> jax.Array:
        tile = x[i, j]
        return total + (tile * tile).sum(axis=1)

    total = tk.fold(tiles, add, tk.zeros(i, jnp.float32))

    def store(j: tk.Tile) -> None:
        out[i, j] = x[i, j] * jax.lax.rsqrt(total)[:, None] * w[j][None, :]

    tk.foreach(tiles, store)


def test_a_tile_is_read_by_each_step_and_a_weight_for_each_row() -> None:
    x, w = S((1024, 512), jnp.float32), S((512,), jnp.float32)
    whole, parts = (tiling_of(normalize_with_weight, x, w, rows=8, columns=columns) for columns in (512, 64))
    assert [(a.passes, float(a.rows_of_use)) for a in whole.accesses] == [(2, 1), (1, 8), (1, 1)]
    assert [(a.passes, float(a.rows_of_use)) for a in parts.accesses] == [(1, 1), (1, 1), (1, 8), (1, 1)]
    again = sum(float(part.bytes) for part in traffic(whole) if part.access.array == 1 and part.distance is not None)
    assert again == 1023 * 512 * 4


@pytest.mark.parametrize(("width", "side_by_side_is_faster"), [(4096, True), (768, False)])
def test_long_rows_are_normalized_side_by_side(width: int, side_by_side_is_faster: bool) -> None:
    """Eight rows side by side read a weight from the first cache; short ones end before the CPU prefetches them."""
    x, w = S(((64 << 20) // 4 // width, width), jnp.float32), S((width,), jnp.float32)
    side, whole = (
        float(model()(tiling_of(normalize_with_weight, x, w, rows=rows, columns=columns)))
        for rows, columns in ((8, 64), (16, width))
    )
    assert (side < whole) == side_by_side_is_faster


def test_a_broadcast_stores_what_takes_long_and_nothing_of_the_rows() -> None:
    @tk.kernel(out_type=lambda x: x)
    def centered(x, out, *, rows: tk.Block):
        i = tk.parallel(x.shape[0], rows)
        away = x[i, :] - x[i, :].mean(axis=1, keepdims=True)
        out[i, :] = away / (away * away).sum(axis=1)[:, None]

    of_kernel = tiling_of(centered, S((64, 1000), jnp.float32), rows=8)
    assert of_kernel.held.bytes_of_buffers < 1000 * 4  # vectors of 8 rows
