"""Axes and tiles: attributes and arithmetic of tiles, `parallel`, `serial` and `ds`."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilekern as tk
from tests.lang.checks import (
    BLOCKS,
    COMPILED,
    EXTENTS,
    WIDE,
    both,
    check,
    interpreted,
    kernel,
    like_first,
    numbers,
    refused,
)
from tilekern.errors import ArgumentError, TileScopeError, TraceError

X = numbers(8)


# --- arithmetic, against a tile that is its list of positions -------------------------------------------------------
#
# A move is ("+", n), ("-", n), ("+ traced", n), ("*", c) or ("// ", c).


def _moved(tile: Any, moves: tuple[tuple[str, int], ...], traced: Any) -> Any:
    for move, n in moves:
        match move:
            case "+":
                tile = n + tile
            case "-":
                tile = tile - n
            case "+ traced":
                tile = tile + (traced * n)
            case "*":
                tile = n * tile
            case _:
                tile = tile // n
    return tile


def _types(x: Any, traced: Any, *, block: int, size: int, **_: Any) -> Any:
    tiles = tk.cdiv(x.shape[0], block)
    return tuple(jax.ShapeDtypeStruct((tiles, n), t) for n, t in ((4, np.int32), (size, np.int32), (size, bool)))


@tk.kernel(out_type=_types)
def move(x, traced, scalars, indices, valid, *, block: int, size: int, moves: tuple[tuple[str, int], ...]):
    i = tk.parallel(x.shape[0], block)
    t = _moved(i, moves, traced[()])
    assert t.size == size
    scalars[i.index] = jnp.stack([t.start, t.stop, i.index, jnp.int32(t.extent)])
    indices[i.index] = t.indices
    valid[i.index] = t.valid


def _oracle(x: np.ndarray, traced: np.ndarray, *, block: int, size: int, moves: Any) -> Any:
    tiles = -(-len(x) // block)
    scalars, indices = np.zeros((tiles, 4), np.int32), np.zeros((tiles, size), np.int32)
    extent = len(x)
    for t in range(tiles):
        start, extent = t * block, len(x)
        for kind, n in moves:
            shift = {"+": n, "-": -n, "+ traced": n * int(traced)}.get(kind, 0)
            factor = n if kind == "*" else 1
            start, extent = (start + shift) * factor, extent * factor
            if kind == "//":
                start, extent = start // n, -(-extent // n)
        scalars[t] = start, start + size, t, extent
        indices[t] = np.arange(start, start + size)
    return scalars, indices, (indices >= 0) & (indices < extent)


@st.composite
def moves(draw: st.DrawFn) -> tuple[int, int, tuple[tuple[str, int], ...]]:
    """Draw a block, the size of the moved tile, and moves whose divisions have no remainder."""
    block = size = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    aligned = True  # every start is a multiple of the size
    found: list[tuple[str, int]] = []
    for _ in range(draw(st.integers(0, 4))):
        match draw(st.sampled_from(["+", "-", "+ traced", "*", "//"])):
            case "*":
                n = draw(st.integers(1, 4))
                found.append(("*", n))
                size *= n
            case "//" if aligned:
                down = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
                n = down if draw(st.booleans()) else size * draw(st.integers(1, 3))
                found.append(("//", n))
                size = max(1, size // n)
            case "//":
                found.append(("//", 1))
            case kind:
                n = draw(st.integers(-2, 9)) * (size if draw(st.booleans()) else 1)
                found.append((kind, n))
                aligned = aligned and (size == 1 if kind == "+ traced" else n % size == 0)
    return block, size, tuple(found)


@pytest.mark.parametrize("run", [pytest.param(both, id="compiled"), pytest.param(interpreted, id="wide")])
def test_tiles_move_and_scale(run) -> None:
    @(COMPILED if run is both else WIDE)
    @given(EXTENTS, moves(), st.integers(-3, 3))
    def property(extent: int, moves: Any, traced: int) -> None:
        block, size, moves = moves
        check(move, numbers(extent), np.int32(traced), oracle=_oracle, run=run, block=block, size=size, moves=moves)

    property()


@pytest.mark.smoke
@COMPILED
@given(EXTENTS, EXTENTS, BLOCKS, BLOCKS)
def test_two_grid_axes_cover_an_array(m: int, n: int, block_m: int, block_n: int) -> None:
    check(transpose, numbers(m, n), oracle=lambda x, **_: x.T, block_m=block_m, block_n=block_n)


@tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape[::-1], x.dtype))
def transpose(x, out, *, block_m: tk.Block = 4, block_n: tk.Block = 4):
    i, j = tk.parallel(x.shape[0], block_m), tk.parallel(x.shape[1], block_n)
    out[j, i] = x[i, j].T


def test_an_axis_without_block_is_an_index() -> None:
    @kernel(((3, 8), np.int32))
    def f(x, out):
        row = tk.parallel(3)
        out[row] = jnp.full(8, row * 10, jnp.int32)

    check(f, X, oracle=np.repeat([[0], [10], [20]], 8, axis=1).astype(np.int32))


def test_a_scaled_tile_reads_packed_data() -> None:
    """Four numbers of a row share a scale; tile // 4 is the scales' tile."""

    @kernel(((8,), np.float32))
    def f(x, scale, out):
        i = tk.parallel(8, 4)
        out[i] = x[i] * scale[i // 4]

    check(f, X, np.float32([10, 100]), oracle=X * np.repeat(np.float32([10, 100]), 4))


def test_ds_is_any_piece() -> None:
    @kernel(((5,), np.float32))
    def f(x, at, out):
        out[...] = x[tk.ds(at[0] - at[1], 5)]

    check(f, X, np.int32([1, 3]), oracle=np.float32([0, 0, 1, 2, 3]))


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "got"),
    [(0, "block = 0"), (-3, "block = -3"), (2.0, "block = 2.0 (float)"), (True, "block = True (bool)")],
)
def test_a_block_must_be_positive(block, got) -> None:
    @like_first
    def f(x, out):
        tk.parallel(8, block)  # <-

    wanted = "block must be a static integer of at least 1"
    with refused(ArgumentError, wanted, expected="a Python int >= 1", got=got, fix="known when the kernel is traced"):
        f.trace(X)


@pytest.mark.parametrize(("extent", "got"), [(-1, "extent = -1"), (8.0, "extent = 8.0 (float)"), (None, "None")])
def test_an_extent_must_not_be_negative(extent, got) -> None:
    @like_first
    def f(x, out):
        tk.serial(extent, 4)  # <-

    with refused(ArgumentError, "extent must be a static integer of at least 0", expected=">= 0", got=got):
        f.trace(X)


def test_an_extent_must_be_static() -> None:
    @like_first
    def f(x, out):
        tk.parallel(x[0].astype(jnp.int32), 4)  # <-

    with refused(ArgumentError, "extent must be a static integer", got="extent = int32[]", fix="x.shape"):
        f.trace(X)


@pytest.mark.parametrize(
    ("size", "got"), [(-1, "the size of tk.ds = -1"), (1.0, "the size of tk.ds = 1.0 (float)"), ("n", "'n' (str)")]
)
def test_the_size_of_ds_is_static(size, got) -> None:
    @like_first
    def f(x, out):
        x[tk.ds(0, size)]  # <-

    with refused(ArgumentError, "the size of tk.ds must be a static integer of at least 0", got=got):
        f.trace(X)


@pytest.mark.parametrize(
    ("start", "got"), [(0.5, "the start of tk.ds = 0.5 (float)"), (None, "None (NoneType)"), (X, "float32[8]")]
)
def test_the_start_of_ds_is_an_integer(start, got) -> None:
    @like_first
    def f(x, out):
        x[tk.ds(start, 1)]  # <-

    with refused(ArgumentError, "the start of tk.ds must be an integer", expected="traced integer scalar", got=got):
        f.trace(X)


@pytest.mark.parametrize("bound", ["start", "stop"])
def test_the_bounds_of_serial_are_integers(bound) -> None:
    @like_first
    def f(x, out):
        tk.serial(8, 4, **{bound: x[0]})  # <-

    with refused(ArgumentError, f"{bound} must be an integer", got=f"{bound} = float32[]", fix="not rounded silently"):
        f.trace(X)


def test_reverse_is_a_bool() -> None:
    @like_first
    def f(x, out):
        tk.serial(8, 4, reverse=1)  # <-

    with refused(ArgumentError, "reverse must be a bool", expected="True or False", got="reverse = 1 (int)"):
        f.trace(X)


@pytest.mark.parametrize("offset", [1.5, np.float32(1)])
def test_a_tile_is_moved_by_integers(offset) -> None:
    @like_first
    def f(x, out):
        tk.parallel(8, 4) + offset  # <-

    with refused(ArgumentError, "the offset of a tile must be an integer", got="the offset of a tile = "):
        f.trace(X)


@pytest.mark.parametrize("operation", [lambda t: t * 0, lambda t: t * 1.5, lambda t: t // 0, lambda t: t // -2])
def test_a_tile_is_scaled_by_positive_integers(operation) -> None:
    @like_first
    def f(x, out):
        t = tk.parallel(8, 4)
        t * 2
        operation(t)  # the line of the lambda

    with pytest.raises(ArgumentError, match="of a tile must be a static integer of at least 1"):
        f.trace(X)


@pytest.mark.parametrize(
    "operation", [lambda t, n: t // 3, lambda t, n: (t + 1) // 4, lambda t, n: (t + n) // 4, lambda t, n: (t * 3) // 8]
)
def test_a_division_that_does_not_line_up(operation) -> None:
    @like_first
    def f(x, out):
        t, n = tk.parallel(8, 4), tk.parallel(2)
        operation(t, n)

    with pytest.raises(TraceError, match="a tile is divided by a number that does not line up with its block"):
        f.trace(X)


def test_a_division_says_what_would_do() -> None:
    @like_first
    def f(x, out):
        tk.parallel(8, 4) // 3  # <-

    with refused(TraceError, "does not line up", expected="multiple of the block, 4", got="tile // 3", fix="multiple"):
        f.trace(X)


ELEMENTWISE = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.pow,
]
UNARY = [operator.neg, operator.pos, operator.invert, abs, float, len, list, np.exp, lambda t: f"{t:3}"]


@pytest.mark.parametrize("operation", ELEMENTWISE)
@pytest.mark.parametrize("swapped", [False, True])
def test_a_tile_in_arithmetic_with_arrays(operation, swapped) -> None:
    @like_first
    def f(x, out):
        i = tk.parallel(8, 4)
        operation(i, x[i]) if swapped else operation(x[i], i)  # <-

    with refused(TraceError, "a Tile is used where a number is needed", got="tile ", fix="tile.indices"):
        f.trace(X)


@pytest.mark.parametrize("operation", UNARY)
def test_a_tile_has_no_value(operation) -> None:
    @like_first
    def f(x, out):
        operation(tk.parallel(8, 4))

    with pytest.raises(TraceError, match="a Tile is used where a number is needed") as raised:
        f.trace(X)
    assert raised.value.loc.file == __file__


def test_numpy_scalars_move_and_scale_a_tile() -> None:
    @like_first
    def f(x, out):
        i = tk.parallel(8, 4)
        out[i] = x[np.int32(1) + i] + x[np.int32(1) * i]

    check(f, X, oracle=X + np.append(X[1:], np.float32(0)))


def test_a_tile_is_printed_in_words() -> None:
    @like_first
    def f(x, out):
        i = tk.parallel(8, 4)
        shown.append((f"{i}", repr(tk.tile(8, 4, 1))))
        out[i] = x[i]

    shown: list[tuple[str, str]] = []
    f.trace(X)
    found = "Tile(number traced: 4 positions, of an axis of 8)", "Tile(number 1: 4 positions, of an axis of 8)"
    assert shown[0] == found


def test_a_tile_is_no_number() -> None:
    @like_first
    def f(x, out):
        range(tk.parallel(8, 4))  # <-

    with refused(TraceError, "a Tile is used where a number is needed", got="the Tile itself", fix="tile.start"):
        f.trace(X)


@pytest.mark.parametrize(
    "use",
    [lambda t: t.start, lambda t: t.stop, lambda t: t.indices, lambda t: t.valid, lambda t: t + 1, lambda t: t * 2],
)
def test_every_use_of_a_tile_outside_its_fold(use) -> None:
    @like_first
    def f(x, out):
        kept: list[tk.Tile] = []
        tk.foreach(tk.serial(8, 4), kept.append)
        use(kept[0])

    with pytest.raises(TileScopeError, match=r"a tile of the fold over .* is used after the fold"):
        f.trace(X)


def test_an_index_by_a_tile_outside_its_fold() -> None:
    @like_first
    def f(x, out):
        kept: list[tk.Tile] = []

        def step(j):
            kept.append(j)

        tk.foreach(tk.serial(8, 4), step)
        x[kept[0]]  # <-

    summary = "a tile of the fold over j is used after the fold over j has ended"
    with refused(TileScopeError, summary, expected="inside the fold over j only", got="kept", fix="carry it out"):
        f.trace(X)


def test_a_tile_outside_its_kernel() -> None:
    kept: list[tk.Tile] = []

    @like_first
    def f(x, out):
        kept.append(tk.parallel(8, 4))
        out[kept[0]] = x[kept[0]]

    f.trace(X)
    with refused(TileScopeError, "a tile of the kernel is used after the kernel has ended", got="kept in a variable"):
        _ = kept[0].start  # <-


@pytest.mark.parametrize("place", ["fold", "fori_loop", "cond", "jit", "vmap"])
def test_axes_are_declared_at_the_top(place) -> None:
    @like_first
    def f(x, out):
        def inner(*_: Any) -> Any:
            tk.parallel(8, 4)  # <-
            return 0

        match place:
            case "fold":
                tk.fold(tk.serial(2), inner, 0)
            case "fori_loop":
                jax.lax.fori_loop(0, 2, inner, 0)
            case "cond":
                jax.lax.cond(x[0] > 0, inner, lambda: 0)
            case "vmap":
                jax.vmap(inner)(x[...])
            case _:
                jax.jit(inner)()

    with refused(
        TraceError, "tk.parallel is called inside a", expected="top", got="tk.parallel(8, 4)", fix="tk.serial"
    ):
        f.trace(X)


def test_parallel_outside_a_kernel() -> None:
    with refused(TraceError, "tk.parallel is used outside a kernel", expected="@tilekern.kernel", fix="its body"):
        tk.parallel(8, 4)  # <-
