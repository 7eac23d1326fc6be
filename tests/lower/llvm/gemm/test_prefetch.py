"""Prefetches of dots in a fold, for the next iteration."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lower.llvm.fake_xla import FakeXla
from tests.lower.llvm.tasks import handler
from tilekern.lower.llvm.ir_builder import Code
from tilekern.lower.llvm.ir_values import F32, Reg
from tilekern.lower.llvm.lowering import LlvmLowering

pytest.importorskip("llvmlite", reason="needs llvmlite")

BLOCK = 32


@tk.kernel(out_type=lambda x, w, turned: jax.ShapeDtypeStruct((x.shape[0], w.shape[1 - turned]), x.dtype))
def first_tile(x: tk.Ref, w: tk.Ref, out: tk.Ref, *, turned: bool) -> None:
    """The products with the first tile only, so that what comes next is still in the array."""

    def step(k: tk.Tile, acc: jax.Array) -> jax.Array:
        return tk.dot(x[:, k], w[:, k].T if turned else w[k], acc)

    out[...] = tk.fold(tk.serial(x.shape[1], BLOCK, stop=BLOCK), step, jnp.zeros(out.shape, out.dtype))


# Several panels, a rest of one, one that is narrower than a register; rows that leave a rest, and many lines for each.
@pytest.mark.parametrize(("rows", "columns"), [(24, 256), (25, 80), (20, 5), (18, 300)])
@pytest.mark.parametrize("turned", [False, True])
def test_every_line_of_the_next_tile(monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, turned: bool) -> None:
    def mark(code: Code, address: Reg) -> None:
        code.store(code.binary("fadd", code.load(F32, address), 1.0), address)

    monkeypatch.setattr(Code, "prefetch", mark)
    x = np.ones((rows, 2 * BLOCK), np.float32)
    w = np.zeros((columns, 2 * BLOCK) if turned else (2 * BLOCK, columns), np.float32)
    spare = np.zeros(1 << 14, np.float32)  # behind w: what is fetched need not be in the array
    memory = np.concatenate([w.ravel(), spare])
    out = np.zeros((rows, columns), np.float32)
    address = handler(LlvmLowering(first_tile.trace(x, w, turned=turned).ir).program)
    FakeXla().call(address, [x, memory], [out])
    fetched = memory[: w.size].reshape(w.shape)
    tile = fetched[:, BLOCK:] if turned else fetched[BLOCK:]
    assert (tile[:, ::16] > 0).all()
    assert np.count_nonzero(tile) == tile[:, ::16].size
    assert (fetched[:, :BLOCK] == 0).all() if turned else (fetched[:BLOCK] == 0).all()


@tk.kernel(out_type=lambda x, pages, table, turned: jax.ShapeDtypeStruct((x.shape[0], x.shape[1]), x.dtype))
def of_pages(x: tk.Ref, pages: tk.Ref, table: tk.Ref, out: tk.Ref, *, turned: bool) -> None:
    """The products of a few rows with the first page of a table."""

    def step(n: tk.Tile, acc: jax.Array) -> jax.Array:
        page = pages[table[n.index]]
        return tk.dot(x[...], page.T if turned else page, acc)

    out[...] = tk.fold(tk.serial(table.shape[0], 1, stop=1), step, jnp.zeros(out.shape, out.dtype))


@pytest.mark.parametrize(("table", "following"), [([1, 3, 0], 3), ([2], 2)])
@pytest.mark.parametrize("turned", [False, True])
def test_every_line_of_the_next_page_of_a_table(
    monkeypatch: pytest.MonkeyPatch, table: list[int], following: int, turned: bool
) -> None:
    """The number of the page is read from the table, but not beyond its end: there the last page counts."""

    def mark(code: Code, address: Reg) -> None:
        code.store(code.binary("fadd", code.load(F32, address), 1.0), address)

    monkeypatch.setattr(Code, "prefetch", mark)
    x, pages, numbers = np.ones((4, 32), np.float32), np.zeros((4, 32, 32), np.float32), np.array(table, np.int32)
    out = np.zeros((4, 32), np.float32)
    address = handler(LlvmLowering(of_pages.trace(x, pages, numbers, turned=turned).ir).program)
    FakeXla().call(address, [x, pages, numbers], [out])
    lines = pages.reshape(4, -1)[:, ::16]
    assert (lines[following] > 0).all()
    assert np.count_nonzero(pages) == lines[following].size


@tk.kernel(out_type=lambda x, pages, table, first: jax.ShapeDtypeStruct((2, x.shape[0], 32), x.dtype))
def of_halves(x: tk.Ref, pages: tk.Ref, table: tk.Ref, first: tk.Ref, out: tk.Ref) -> None:
    """The products with one half of a page, for two heads that lie in turn; pages are 32 keys of 4 × 32 numbers."""

    def step(n: tk.Tile, acc: jax.Array) -> jax.Array:
        half = pages[table[n.index // 2], tk.ds(n.index % 2 * 16, 16)]
        heads = jnp.swapaxes(half, 0, 1).reshape(2, 2, 16, 32)[:, 1]
        rows = jnp.broadcast_to(x[...], (2, *x.shape))
        return acc + jax.lax.dot_general(rows, heads, (((2,), (1,)), ((0,), (0,))))

    axis = tk.serial(2 * table.shape[0], 1, start=first[0], stop=first[0] + 1)
    out[...] = tk.fold(axis, step, jnp.zeros(out.shape, out.dtype))


@pytest.mark.parametrize(("first", "page", "half"), [(0, 1, 1), (1, 3, 0), (3, 3, 1)])
def test_every_line_of_the_next_part_of_a_page(
    monkeypatch: pytest.MonkeyPatch, first: int, page: int, half: int
) -> None:
    """The place of the part is a digit of the fold's index; only the heads that are multiplied are fetched."""

    def mark(code: Code, address: Reg) -> None:
        code.store(code.binary("fadd", code.load(F32, address), 1.0), address)

    monkeypatch.setattr(Code, "prefetch", mark)
    x, pages, numbers = np.ones((4, 16), np.float32), np.zeros((4, 32, 4, 32), np.float32), np.array([1, 3], np.int32)
    out = np.zeros((2, 4, 32), np.float32)
    arrays = [x, pages, numbers, np.array([first], np.int32)]
    FakeXla().call(handler(LlvmLowering(of_halves.trace(*arrays).ir).program), arrays, [out])
    part = pages.reshape(4, 2, 16, 4, 32)[page, half, :, 1::2]
    if first < 3:
        assert (part[..., ::16] > 0).all()
        assert np.count_nonzero(pages) == part[..., ::16].size


@tk.kernel(out_type=lambda x, w: (jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), jnp.float32),) * 2)
def of_one_load(x: tk.Ref, w: tk.Ref, low: tk.Ref, high: tk.Ref) -> None:
    """The products of a few rows with the first words, and with twice these words."""

    def step(k: tk.Tile, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        factors = w[k], w[k] * 2
        return tuple(tk.dot(x[:, k], right, acc) for right, acc in zip(factors, sums, strict=True))

    zeros = (jnp.zeros(low.shape, jnp.float32),) * 2
    low[...], high[...] = tk.fold(tk.serial(x.shape[1], BLOCK, stop=BLOCK), step, zeros)


@pytest.mark.parametrize("columns", [128, 320])
def test_products_that_read_one_load_take_turns_with_its_lines(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Every line of the next tile is fetched once, not once for each product."""

    def mark(code: Code, address: Reg) -> None:
        code.store(code.binary("fadd", code.load(F32, address), 1.0), address)

    monkeypatch.setattr(Code, "prefetch", mark)
    x, memory = np.ones((2, 2 * BLOCK), np.float32), np.zeros((2 * BLOCK + 8) * columns, np.float32)
    w = memory[: 2 * BLOCK * columns].reshape(2 * BLOCK, columns)
    sums = [np.zeros((2, columns), np.float32) for _ in range(2)]
    FakeXla().call(handler(LlvmLowering(of_one_load.trace(x, w).ir).program), [x, memory], sums)
    assert (w[BLOCK:, ::16] == 1).all()
    assert np.count_nonzero(memory) == w[BLOCK:, ::16].size
