"""Loads and stores: every kind of index, masks and fills."""

from __future__ import annotations

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilekern as tk
from tests.lang.checks import COMPILED, WIDE, both, check, interpreted, kernel, like_first, numbers, refused
from tilekern.errors import ArgumentError, IndexingError, OutputError, TraceError

X = numbers(6, 5)


# --- any index of any array, against an oracle that looks at one lane at a time -------------------------------------
#
# An entry is a tuple: ("tile", axis, offset), ("ds", size, start), ("traced", size, slot), ("vector", size, slot),
# ("scalar", slot), ("int", n), ("slice", start, stop), ("rest", dims) for `...`. Slots point into an int32 operand.

GRID = (("a", 7, 3), ("b", 4, 4))  # name, extent, block


def _index(entries: tuple[Any, ...], tiles: tuple[tk.Tile, ...], numbers: tk.Ref) -> tuple[Any, ...]:
    def entry(kind: str, *data: Any) -> Any:
        match kind:
            case "tile":
                return tiles[data[0]] + data[1]
            case "ds":
                return tk.ds(data[1], data[0])
            case "traced":
                return tk.ds(numbers[data[1]], data[0])
            case "vector":
                return numbers[data[1] : data[1] + data[0]]
            case "scalar":
                return numbers[data[0]]
            case "slice":
                return slice(*data)
            case "rest":
                return ...
            case _:
                return data[0]

    return tuple(entry(*e) for e in entries)


def _lanes(entry: tuple[Any, ...], dim: int, at: tuple[int, ...], numbers: np.ndarray) -> Any:
    """Positions of an entry: a list, or an int if the entry drops the dim."""
    kind, *data = entry
    match kind:
        case "tile":
            _, _, block = GRID[data[0]]
            return [at[data[0]] * block + data[1] + n for n in range(block)]
        case "ds":
            return [data[1] + n for n in range(data[0])]
        case "traced":
            return [int(numbers[data[1]]) + n for n in range(data[0])]
        case "vector":
            return [int(n) for n in numbers[data[1] : data[1] + data[0]]]
        case "scalar":
            return int(numbers[data[0]])
        case "slice":
            return list(range(dim)[slice(*data)])
        case _:
            return data[0] % dim


def _positions(entries: tuple[Any, ...], shape: tuple[int, ...], at: tuple[int, ...], numbers: np.ndarray) -> Any:
    """Shape of the tile, and the array's index for each lane; None for a lane out of bounds."""
    whole = [("slice", None, None)]
    rest = next((n for n, e in enumerate(entries) if e[0] == "rest"), None)
    missing = whole * (len(shape) - len(entries) + (rest is not None))
    entries = (*entries, *missing) if rest is None else (*entries[:rest], *missing, *entries[rest + 1 :])
    found = [_lanes(e, n, at, numbers) for e, n in zip(entries, shape, strict=True)]
    tile = tuple(len(f) for f in found if isinstance(f, list))
    every = product(*([f] if isinstance(f, int) else f for f in found))
    return tile, [i if all(0 <= k < n for k, n in zip(i, shape, strict=True)) else None for i in every]


@st.composite
def accesses(draw: st.DrawFn, unique: bool = False) -> tuple[tuple[int, ...], tuple[Any, ...], np.ndarray]:
    """Draw a shape, the entries of an index of it, and the operand to which the entries' slots point."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 4, 5, 7, 8]), min_size=1, max_size=3)))
    slots: list[int] = []
    position = st.integers(-5, 12)

    def entry(dim: int) -> tuple[Any, ...]:
        kind = draw(st.sampled_from(["tile", "tile", "ds", "traced", "vector", "scalar", "int", "slice"]))
        size = draw(st.integers(0, 4))
        match kind:
            case "tile":
                return kind, draw(st.integers(0, 1)), draw(st.sampled_from([0, 0, 1, -2, 6]))
            case "ds":
                return kind, size, draw(position)
            case "traced" | "scalar":
                slots.append(draw(position))
                return (kind, size, len(slots) - 1) if kind == "traced" else (kind, len(slots) - 1)
            case "vector":
                found = draw(st.lists(position, min_size=size, max_size=size, unique=unique))
                slots.extend(found)
                return kind, size, len(slots) - size
            case "slice":
                bounds = st.none() | st.integers(-dim, dim)
                return kind, draw(bounds), draw(bounds)
            case _:
                return kind, draw(st.integers(-dim, dim - 1))

    entries = [entry(dim) for dim in shape]
    match draw(st.sampled_from(["all", "trailing", "dots"])):
        case "trailing":
            entries = entries[: draw(st.integers(0, len(entries)))]
        case "dots":
            low, high = sorted((draw(st.integers(0, len(entries))), draw(st.integers(0, len(entries)))))
            entries[low:high] = [("rest",)]
    return shape, tuple(entries), np.array([*slots, 0], np.int32)


def _loaded(x: Any, numbers: Any, mask: Any, *, entries: Any, lanes: Any, fill: Any) -> Any:
    return jax.ShapeDtypeStruct((3, 1, *lanes), x.dtype)


@tk.kernel(out_type=_loaded)
def load_any(x, numbers, mask, out, *, entries: tuple[Any, ...], lanes: tuple[int, ...], fill: float | None):
    tiles = [tk.parallel(extent, block) for _, extent, block in GRID]
    index = _index(entries, tiles, numbers)
    out[tiles[0].index, tiles[1].index] = x.load(index, mask=mask if mask is None else mask[...], fill=fill)


@pytest.mark.parametrize("run", [pytest.param(both, id="compiled"), pytest.param(interpreted, id="wide")])
def test_loads_read_what_is_in_bounds_and_fill_the_rest(run) -> None:
    @(COMPILED if run is both else WIDE)
    @given(accesses(), st.sampled_from([None, -1.0]), st.booleans())
    def property(access: Any, fill: float | None, masked: bool) -> None:
        shape, entries, slots = access
        lanes, _ = _positions(entries, shape, (0, 0), slots)
        x, mask = numbers(*shape), np.arange(int(np.prod(lanes))).reshape(lanes) % 3 != 1 if masked else None
        expected = np.full((3, 1, *lanes), fill or 0, np.float32)
        for program in range(3):
            found = _positions(entries, shape, (program, 0), slots)[1]
            for lane, where in zip(np.ndindex(*lanes), found, strict=True):
                if where is not None and (mask is None or mask[lane]):
                    expected[(program, 0, *lane)] = x[where]
        check(load_any, x, slots, mask, oracle=expected, run=run, entries=entries, lanes=lanes, fill=fill)

    property()


@tk.kernel(out_type=lambda x, value, numbers, mask, **_: jax.ShapeDtypeStruct((3, 1, *x.shape), x.dtype))
def store_any(x, value, numbers, mask, out, *, entries: tuple[Any, ...]):
    tiles = [tk.parallel(extent, block) for _, extent, block in GRID]
    mine = tiles[0].index, tiles[1].index
    out[mine] = x[...]
    stored = value[...] + tiles[0].index.astype(jnp.float32) * 1000
    out.store((*mine, *_index(entries, tiles, numbers)), stored, mask=mask if mask is None else mask[...])


@pytest.mark.parametrize("run", [pytest.param(both, id="compiled"), pytest.param(interpreted, id="wide")])
def test_stores_write_what_is_in_bounds_and_drop_the_rest(run) -> None:
    @(COMPILED if run is both else WIDE)
    @given(accesses(unique=True), st.booleans())
    def property(access: Any, masked: bool) -> None:
        shape, entries, slots = access
        lanes, _ = _positions(entries, shape, (0, 0), slots)
        x, value = -numbers(*shape), numbers(*lanes)
        mask = np.arange(value.size).reshape(lanes) % 3 != 1 if masked else None
        expected = np.broadcast_to(x, (3, 1, *shape)).copy()
        for program in range(3):
            found = _positions(entries, shape, (program, 0), slots)[1]
            for lane, where in zip(np.ndindex(*lanes), found, strict=True):
                if where is not None and (mask is None or mask[lane]):
                    expected[(program, 0, *where)] = value[lane] + program * 1000
        check(store_any, x, value, slots, mask, oracle=expected, run=run, entries=entries)

    property()


# --- particular loads and stores ------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_the_last_tile_reaches_past_the_end() -> None:
    @like_first
    def f(x, out):
        i = tk.parallel(x.shape[0], 4)
        out[i] = x[i] + jnp.where(i.valid, 0, jnp.nan)[:, None]

    check(f, X, oracle=X)


def test_a_mask_and_a_value_are_broadcast() -> None:
    @like_first
    def f(x, out):
        out[...] = 7
        out.store((slice(None), slice(1, 3)), jnp.float32(1), mask=jnp.arange(2) == 1)
        out.store((0, slice(None)), x[1], mask=jnp.asarray([True, False, False, False, True]))

    expected = np.full((6, 5), 7, np.float32)
    expected[:, 2] = 1
    expected[0, [0, 4]] = X[1, [0, 4]]
    check(f, X, oracle=expected)


def test_a_traced_fill() -> None:
    @kernel(((4,), np.float32))
    def f(x, out):
        out[...] = x.load((tk.ds(4, 4), 0), fill=x[0, 0] * -3)

    check(f, X, oracle=np.array([X[4, 0], X[5, 0], -3, -3], np.float32))


@pytest.mark.parametrize("dtype", ["f4", "i4", "i1", "f2", ml_dtypes.bfloat16, "?"])
def test_a_fill_of_any_dtype(dtype) -> None:
    @kernel(((3,), dtype))
    def f(x, out):
        out[...] = x.load(tk.ds(1, 3), fill=1)

    check(f, np.zeros(3, dtype), oracle=np.array([0, 0, 1], dtype))


def test_an_own_store_is_visible() -> None:
    """A running sum reads the element that it has just stored."""

    @like_first
    def f(x, out):
        j = tk.parallel(x.shape[1], 2)
        out[0, j] = x[0, j]

        def step(i):
            out[i + 1, j] = out[i, j] + x[i + 1, j]

        tk.foreach(tk.serial(x.shape[0] - 1), step)

    check(f, X, oracle=np.cumsum(X, axis=0))


def test_several_index_vectors_are_orthogonal() -> None:
    @kernel(((2, 3), np.float32))
    def f(x, out):
        out[...] = x[jnp.array([4, 1]), jnp.array([0, 3, 2])]

    check(f, X, oracle=X[np.ix_([4, 1], [0, 3, 2])])


def test_scalars_go_in_and_out() -> None:
    @kernel(((), np.float32), ((), np.int32))
    def f(x, total, size):
        total[...] = x[()] * 2
        size[...] = 3

    check(f, np.float32(1.5), oracle=(np.float32(3), np.int32(3)))
    assert f(1.5)[0] == 3


def test_what_a_ref_says_of_itself() -> None:
    seen: list[Any] = []

    @like_first
    def f(x, out):
        seen.extend([x.shape, x.dtype, x.ndim, x.size, x.name, repr(x)])
        out[...] = x[...]

    f.trace(X)
    assert seen == [(6, 5), np.float32, 2, 30, "x", "Ref(x: ref<f32[6, 5], in>)"]


# --- indices of the wrong kind --------------------------------------------------------------------------------------

KINDS = "a Tile, an integer, `:`, tk.ds(start, size), a vector of integers or tk.points(...)"


@pytest.mark.parametrize(
    ("entry", "got"),
    [
        (2.5, "index 1 = 2.5 (float)"),
        (True, "index 1 = True (bool)"),
        ("a", "index 1 = 'a' (str)"),
        (None, "index 1 = None (NoneType)"),
        (np.float32(1), "index 1 = float32[]"),
        (np.array([True, False]), "index 1 = bool[2]"),
        (np.zeros(3), "index 1 = float64[3]"),
        (np.zeros((2, 2)), "index 1 = float64[2, 2]"),
    ],
)
def test_an_index_of_the_wrong_kind(entry, got) -> None:
    @like_first
    def f(x, out):
        out[...] = x[0, entry]  # <-

    with refused(IndexingError, "index 1 of x is of the wrong kind", expected=KINDS, got=got, fix="mask="):
        f.trace(X)


def test_a_traced_float_as_an_index() -> None:
    @like_first
    def f(x, out):
        out[...] = x[0, x[0, 0]]  # <-

    with refused(IndexingError, "index 1 of x is of the wrong kind", expected=KINDS, got="index 1 = float32[]"):
        f.trace(X)


@pytest.mark.parametrize(
    ("index", "count"), [((0, 0, 0), "3 entries"), ((..., ...), "2 entries"), ((..., 0, 0, 0), "4 entries")]
)
def test_too_many_entries(index, count) -> None:
    @like_first
    def f(x, out):
        out[...] = x[index]  # <-

    wanted = "at most 2 entries, with at most one `...`"
    with refused(IndexingError, f"x has 2 dims and is indexed with {count}", expected=wanted, got="of shape [6, 5]"):
        f.trace(X)


@pytest.mark.parametrize("index", [6, -7])
def test_a_static_index_out_of_range(index) -> None:
    @like_first
    def f(x, out):
        out[...] = x[index]  # <-

    with refused(IndexingError, "static index 0 of x is out", expected="indices in [-6, 6)", got=f"index 0 = {index}"):
        f.trace(X)


@pytest.mark.parametrize(("bounds", "got"), [((0, 7), "0:7"), ((-8, None), "-8:None")])
def test_a_static_slice_out_of_range(bounds, got) -> None:
    @like_first
    def f(x, out):
        out[...] = x[slice(*bounds)]  # <-

    with refused(IndexingError, "static index 0 of x is out", expected="bounds in [-6, 6]", got=f"index 0 = {got}"):
        f.trace(X)


def test_a_slice_with_a_traced_bound() -> None:
    @like_first
    def f(x, out):
        i = tk.parallel(6)
        out[...] = x[0:i]  # <-

    with refused(
        IndexingError, "index 0 of x is a slice with a traced bound", got="slice(0, a traced scalar)", fix="tk.ds"
    ):
        f.trace(X)


def test_a_slice_bounded_by_a_tile() -> None:
    @like_first
    def f(x, out):
        i = tk.parallel(6, 2)
        out[...] = x[i:]  # <-

    with refused(IndexingError, "index 0 of x is a slice with a traced bound", got="slice(Tile, None)", fix="tk.ds"):
        f.trace(X)


def test_a_slice_with_a_step() -> None:
    @like_first
    def f(x, out):
        out[...] = x[::2]  # <-

    with refused(IndexingError, "index 0 of x is a slice with a step", got="step = 2", fix="step * jnp.arange(n)"):
        f.trace(X)


def test_a_slice_with_a_float_bound() -> None:
    @like_first
    def f(x, out):
        out[...] = x[1.5:]  # <-

    with refused(ArgumentError, "a slice bound of index 0 of x must be an integer", got="1.5 (float)"):
        f.trace(X)


# --- refs as what they are not --------------------------------------------------------------------------------------


def test_a_ref_is_no_array() -> None:
    @like_first
    def f(x, out):
        out[...] = jnp.exp(x)  # <-

    with refused(IndexingError, "a ref is used where a tile is needed", got="the ref x itself", fix="x[...]"):
        f.trace(X)


def test_a_ref_does_not_add() -> None:
    @like_first
    def f(x, out):
        out[...] = jnp.float32(1) + x  # <-

    with refused(IndexingError, "a ref is used where a tile is needed", got="the ref x itself", fix="x[...]"):
        f.trace(X)


def test_a_ref_is_no_iterable() -> None:
    @like_first
    def f(x, out):
        for row in x:  # <-
            out[0] = row

    with refused(IndexingError, "a ref cannot be iterated over", got="a loop over x", fix="tk.fold"):
        f.trace(X)


# --- values, masks and fills of the wrong kind ----------------------------------------------------------------------


def test_a_store_to_an_input() -> None:
    @like_first
    def f(x, out):
        x[0] = 1.0  # <-

    with refused(OutputError, "x is an input and cannot be stored to", got="x: ref<f32[6, 5], in>", fix="out_type"):
        f.trace(X)


def test_a_store_of_another_dtype() -> None:
    @kernel(((6, 5), np.float16))
    def f(x, out):
        out[...] = x[...]  # <-

    with refused(
        OutputError, "a f32 tile is stored to a f16 output", expected="f16", got="value = float32[6, 5]", fix=".astype("
    ):
        f.trace(X)


def test_a_store_of_another_shape() -> None:
    @like_first
    def f(x, out):
        out[...] = x[:5]  # <-

    with refused(
        OutputError, "the value does not fit the tile of out", expected="broadcasts to (6, 5)", got="float32[5, 5]"
    ):
        f.trace(X)


def test_a_mask_of_another_shape() -> None:
    @like_first
    def f(x, out):
        out[...] = x.load(..., mask=jnp.ones(6, bool))  # <-

    with refused(OutputError, "the mask does not fit the tile of x", expected="(6, 5)", got="mask = bool[6]"):
        f.trace(X)


def test_a_mask_that_is_not_bool() -> None:
    @like_first
    def f(x, out):
        out.store(..., x[...], mask=x[...])  # <-

    with refused(IndexingError, "a mask must be bool", expected="bool", got="mask = float32[6, 5]", fix="mask != 0"):
        f.trace(X)


@pytest.mark.parametrize(("fill", "got"), [(np.int32(1), "int32[]"), (np.zeros(5, np.float32), "float32[5]")])
def test_a_fill_of_the_wrong_type(fill, got) -> None:
    @like_first
    def f(x, out):
        out[...] = x.load(..., fill=fill)  # <-

    with refused(IndexingError, "the fill of x must be a scalar of its dtype", expected="a f32 scalar", got=got):
        f.trace(X)


def test_a_value_that_is_no_array() -> None:
    @like_first
    def f(x, out):
        out[...] = "text"  # <-

    with refused(OutputError, "a value that is no tile is stored to out", expected="f32", got="'text' (str)"):
        f.trace(X)


def test_a_ref_outside_of_its_kernel() -> None:
    kept: list[tk.Ref] = []

    @like_first
    def f(x, out):
        kept.append(x)
        out[...] = x[...]

    f.trace(X)
    with refused(TraceError, "a load from x is used outside a kernel", got="no kernel being traced"):
        kept[0][0]  # <-
    with pytest.raises(TraceError, match="a store to x is used outside a kernel"):
        kept[0][0] = 1.0
