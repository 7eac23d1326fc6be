"""Positions of any integer dtype, and axes longer than int32 can index: exact, out of bounds, or refused."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tilekern as tk
from tests.lang.checks import both, interpreted, like_first
from tilekern.errors import ArgumentError, IndexingError, TilekernError

N, SIZE = 10, 4
DTYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64")
# Positions that would wrap around to a place in an array of ten elements, and positions that would not.
NUMBERS = [0, 3, -2, 2**31 - 1, 2**31, -(2**31), 2**32 - 2, 2**32, 2**32 + 3, 2**40, -(2**32), 2**63 - 1, 2**64 - 2]


def of_tile(x: Any, at: Any, out: Any) -> None:
    i = tk.tile(N, SIZE, 0)
    out[tk.ds(0, SIZE)] = x.load(i + at[()], fill=-1)


def of_slice(x: Any, at: Any, out: Any) -> None:
    out[tk.ds(0, SIZE)] = x.load(tk.ds(at[()], SIZE), fill=-1)


def of_scalar(x: Any, at: Any, out: Any) -> None:
    out[0] = x.load(at[()], fill=-1)


def of_vector(x: Any, at: Any, out: Any) -> None:
    out[tk.ds(0, 1)] = x.load(at[()].reshape(1), fill=-1)


def of_view(x: Any, at: Any, out: Any) -> None:
    out[tk.ds(0, SIZE)] = x.at[0:N].load(tk.ds(at[()], SIZE), fill=-1)


LANES: dict[Callable[..., None], int] = {of_tile: SIZE, of_slice: SIZE, of_scalar: 1, of_vector: 1, of_view: SIZE}


def test_wide_numbers_are_never_wrapped() -> None:
    """For each kind of index and each dtype, a position outside of the array reads the fill value."""
    x = np.arange(N, dtype=np.int32)
    with jax.enable_x64(True):
        for body, lanes in LANES.items():
            function = tk.kernel(out_type=lambda x, at, lanes=lanes: jax.ShapeDtypeStruct((lanes,), x.dtype))(body)
            for dtype in DTYPES:
                limits = np.iinfo(dtype)
                run = tk.interpret(function.trace(x, np.zeros((), dtype)))
                for number in (n for n in NUMBERS if limits.min <= n <= limits.max):
                    wanted = [n if 0 <= (n := number + lane) < N else -1 for lane in range(lanes)]
                    np.testing.assert_array_equal(run(x, np.array(number, dtype)), wanted, str((body, dtype, number)))


BACKENDS = [(t, d) for t in ("cpu:xla", "cpu:llvm", "cuda:sm_90") for d in ("uint32", "int64")] + [
    ("tpu:v5e", "uint32")
]


@pytest.mark.parametrize(("target", "dtype"), BACKENDS)
def test_wide_numbers_on_a_backend(target: str, dtype: str) -> None:
    if not target.startswith(("cpu:xla", "tpu")):
        pytest.importorskip("triton" if target.startswith("cuda") else "llvmlite", reason="needs the backend")

    @tk.kernel(out_type=lambda x, at: x)
    def moved(x: Any, at: Any, out: Any) -> None:
        i = tk.parallel(N, SIZE)
        out[i] = x.load(i + at[()], fill=-1) + 100 * x.load(i - at[()], fill=-1)

    x = np.arange(N, dtype=np.int32)
    with jax.enable_x64(True):
        lowered = moved.trace(x, np.zeros((), dtype)).lower(target)
        run = lowered.compile() if target.startswith("cpu") else lowered.interpret
        for number in (3, 2**31, 2**32 - 2):
            ahead, back = ([p if 0 <= (p := i + n) < N else -1 for i in range(N)] for n in (number, -number))
            wanted = np.array(ahead) + 100 * np.array(back)
            np.testing.assert_array_equal(run(x, np.array(number, dtype)), wanted)


def test_numpy_vectors_of_64_bits_are_not_cut_off() -> None:
    """Without 64-bit types, JAX would cut 2³² + 3 to 3."""

    @like_first
    def picked(x: Any, out: Any) -> None:
        out[:] = x.load(np.array([2**32 + 3, 1, -(2**32)]), fill=-1)

    for run in (both, interpreted):
        np.testing.assert_array_equal(run(picked, np.arange(3, dtype=np.int32))[0], [-1, 1, -1])


@settings(max_examples=40, deadline=None)
@given(
    start=st.sampled_from(NUMBERS), stop=st.sampled_from(NUMBERS), dtype=st.sampled_from(DTYPES), static=st.booleans()
)
@example(3, 2**32 - 2, "uint32", False)
@example(2**32 - 2, 2**32 - 1, "uint32", False)
@example(-(2**40), 2**40, "int64", True)
def test_bounds_of_loops_do_not_wrap(start: int, stop: int, dtype: str, static: bool) -> None:
    limits = np.iinfo(dtype)
    start, stop = (min(max(n, int(limits.min)), int(limits.max)) for n in (start, stop))

    @tk.kernel(out_type=lambda x, bounds: jax.ShapeDtypeStruct((N,), x.dtype))
    def counted(x: Any, bounds: Any, out: Any) -> None:
        first, last = (start, stop) if static else (bounds[0], bounds[1])
        axis = tk.serial(N, SIZE, start=first, stop=last)
        out[:] = tk.fold(axis, lambda t, seen: seen + _hits(t), x[:])

    def _hits(t: tk.Tile) -> Any:
        return ((jnp.arange(N)[:, None] == t.indices[None, :]) & t.valid[None, :]).sum(axis=1, dtype=jnp.int32)

    with jax.enable_x64(True):
        arrays = np.zeros(N, np.int32), np.array([start, stop], dtype)
        (found,) = interpreted(counted, *arrays)
    np.testing.assert_array_equal(found, [int(start <= n < stop) for n in range(N)])


# --- axes and strides that are too long ------------------------------------------------------------------------------


def long_start(x: Any, out: Any) -> None:
    i = tk.parallel(2**32, 4096)
    out[i] = x[tk.ds(i.start, 4096)]  # here


def long_indices(x: Any, out: Any) -> None:
    i = tk.parallel(2**32, 4096)
    out[i] = x[i.indices]  # here


def long_valid(x: Any, out: Any) -> None:
    i = tk.parallel(2**32, 4096)
    out[i] = jnp.where(i.valid, x[i], 0)  # here


def long_tile(x: Any, out: Any) -> None:
    i = tk.parallel(2**20)
    out[i] = x[tk.tile(2**40, 4096, i).start]  # here


def too_many_tiles(x: Any, out: Any) -> None:
    i = tk.parallel(2**31)  # here
    out[i] = x[i]


def too_many_programs(x: Any, out: Any) -> None:
    a, b, c, d = tk.grid(2**31 - 1, 2**31 - 1, 2**31 - 1, 2**31 - 1)  # here
    out[a] = x[a] + b + c + d


def long_loop(x: Any, out: Any) -> None:
    tk.foreach(tk.serial(2**31, 8), lambda t: out.store(t, x[t]))  # here


def ragged_loop(x: Any, out: Any) -> None:
    tk.foreach(tk.serial(2**31 - 1, 4096), lambda t: out.store(t, x[t]))  # here


def rounded_loop(x: Any, out: Any) -> None:
    """The last tile ends at 2³¹ - 2, but the sum of the extent and a block does not fit."""
    tk.foreach(tk.serial(2**31 - 2, 3), lambda t: out.store(t, x[t]))  # here


def wide_offset(x: Any, out: Any) -> None:
    i = tk.parallel(2**32, 4096)
    out[i] = x[i + x[0].astype(jnp.uint32)]  # here


def wide_slice(x: Any, out: Any) -> None:
    i = tk.parallel(2**32, 4096)
    out[i] = x[tk.ds(x[0].astype(jnp.uint32), 4096)]  # here


def wide_scalar(x: Any, out: Any) -> None:
    i = tk.parallel(2**32, 4096)
    out[i] = x[x[0].astype(jnp.uint32)] + tk.zeros(i, x.dtype)  # here


def wide_vector(x: Any, out: Any) -> None:
    i = tk.parallel(2**32, 4096)
    out[i] = x[x[tk.ds(0, 4096)].astype(jnp.uint32)]  # here


def huge_sum(x: Any, out: Any) -> None:
    i = tk.parallel(8)
    out[i] = x[tk.ds(2**63, 1)][0]  # here


TOO_LONG: dict[Callable[..., None], str] = {
    long_start: "an axis of 4294967296 elements in tiles of 4096",
    long_indices: "an axis of 4294967296 elements in tiles of 4096",
    long_valid: "an axis of 4294967296 elements in tiles of 4096",
    long_tile: "an axis of 1099511627776 elements in tiles of 4096",
    too_many_tiles: "2147483648 tiles",
    too_many_programs: "2147483647 × 2147483647 × 2147483647 programs",
    long_loop: "an axis of 2147483648 elements in tiles of 8",
    ragged_loop: "an axis of 2147483647 elements in tiles of 4096",
    rounded_loop: "an axis of 2147483646 elements in tiles of 3",
    wide_offset: "the offset of a tile = uint32[]",
    wide_slice: "the start of tk.ds = uint32[]",
    wide_scalar: "index 0 of x = uint32[]",
    wide_vector: "index 0 of x = uint32[4096]",
    huge_sum: "constant 9223372036854775808",
}


@pytest.mark.parametrize("body", TOO_LONG)
def test_what_int32_does_not_count(body: Callable[..., None]) -> None:
    function = tk.kernel(out_type=lambda x: x)(body)
    with pytest.raises(TilekernError) as caught:
        function.trace(jax.ShapeDtypeStruct((2**32,), np.int8))
    error = caught.value
    assert isinstance(error, (ArgumentError, IndexingError))
    assert TOO_LONG[body] in error.got and error.expected and error.fix
    assert "# here" in error.loc.snippet()


def test_a_long_axis_indexes_arrays() -> None:
    @like_first
    def copy(x: Any, out: Any) -> None:
        i = tk.parallel(x.shape[0], 4096)
        out[i] = x[i]

    assert "4096" in str(copy.trace(jax.ShapeDtypeStruct((2**32 + 5,), np.int8)).ir)


@pytest.mark.parametrize("factors", [(2**10, 2**10), (2**15, 2**16), (2**20, 2**20), (2**30, 2**30, 2**30)], ids=str)
def test_large_factors_are_exact_or_refused(factors: tuple[int, ...]) -> None:
    """All positions but the first are far outside; in 64 bits they would wrap around to element 0."""

    @tk.kernel(out_type=lambda x, at: jax.ShapeDtypeStruct((1,), x.dtype))
    def far(x: Any, at: Any, out: Any) -> None:
        place = at[()]
        for factor in factors:
            place = place * factor
        out[0] = x.load(place, fill=-1)  # here

    x = np.arange(N, dtype=np.int32) + 1
    for number in (0, 1, 2**31 - 1, -(2**31), 2**30):
        if math.prod(factors) <= 2**31:
            np.testing.assert_array_equal(both(far, x, np.array(number, np.int32))[0], [-1 if number else 1])
            continue
        with pytest.raises(IndexingError, match="64 bits") as caught:
            interpreted(far, x, np.array(number, np.int32))
        assert str(math.prod(factors)) in caught.value.got and "# here" in caught.value.loc.snippet()
