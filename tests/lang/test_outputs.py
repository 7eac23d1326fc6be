"""`tk.Sum`, `tk.Zeros` and donated inputs: outputs that programs share, or leave as they are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilekern as tk
from tests.ir.funcs import assert_same
from tests.lang.checks import COMPILED, check, interpreted, kernel, numbers, refused
from tilekern.errors import ArgumentError, OutputError, UnwrittenError

BF16 = np.dtype(ml_dtypes.bfloat16)
X = numbers(6)


def zeros_like_first(x: Any, *_: Any, **__: Any) -> tk.Zeros:
    return tk.Zeros(jax.ShapeDtypeStruct(x.shape, x.dtype))


# --- sums over programs ----------------------------------------------------------------------------------------------


@tk.kernel(out_type=lambda x, **_: tk.Sum(jax.ShapeDtypeStruct(x.shape[1:], x.dtype)))
def column_sums(x, out, *, block: tk.Block = 16):
    """out[n] = Σ x[m, n], a program for each block of rows."""
    i = tk.parallel(x.shape[0], block)
    out.at[...].add(x[i].sum(axis=0, dtype=x.dtype))


@COMPILED
@given(st.sampled_from([0, 1, 7, 33]), st.sampled_from([1, 4, 8]), st.sampled_from(["f4", "i4", "i1", BF16]))
def test_a_sum_over_programs(rows: int, block: int, dtype: Any) -> None:
    x = (np.arange(rows * 3).reshape(rows, 3) % 7 - 3).astype(dtype)
    check(column_sums, x, oracle=x.sum(axis=0, dtype=np.int64).astype(dtype), block=block)


@pytest.mark.smoke
def test_a_float_sum_is_the_same_from_run_to_run() -> None:
    x = np.random.default_rng(0).standard_normal((1000, 5), np.float32) * np.float32(1e6) ** np.arange(5)
    x = x.astype(np.float32)
    first = np.asarray(column_sums(x))
    fresh = jax.jit(lambda x: column_sums(x))
    for again in (column_sums(x), fresh(x), column_sums.trace(x).lower().compile()(x)):
        assert first.tobytes() == np.asarray(again).tobytes()
    exact = x.astype(np.float64).sum(axis=0)
    np.testing.assert_array_less(np.abs(first - exact), 1000 * np.finfo(np.float32).eps * np.abs(x).sum(axis=0))


def test_the_interpreter_adds_in_program_order_in_whichever_order_programs_run() -> None:
    x = np.random.default_rng(0).standard_normal((40, 1))
    with jax.enable_x64(True):
        (found,) = interpreted(column_sums, x, block=1)
    assert found[0] == np.add.accumulate(x[:, 0])[-1] != np.add.accumulate(x[::-1, 0])[-1]


@pytest.mark.parametrize("dtype", ["f2", BF16, ml_dtypes.float8_e5m2], ids=str)
def test_narrow_sums_accumulate_wide(dtype: Any) -> None:
    """If ones were added in bfloat16, the sum would stay at 256."""
    x = np.ones((2048, 1), dtype)
    check(column_sums, x, oracle=np.array([2048], dtype), block=1)


def test_a_sum_of_several_parts_of_which_one_is_left_out() -> None:
    @tk.kernel(out_type=lambda x: (tk.Sum(jax.ShapeDtypeStruct((4,), x.dtype)), {"all": tk.Sum(x)}))
    def f(x, parts, whole):
        i = tk.parallel(x.shape[0], 2)
        tile = jnp.where(i.valid, x[i], 0)
        parts.at[1].add(tile.sum())
        parts.at[2:].add(tile, mask=tile > 2)
        whole["all"].at[i].add(x[i])
        whole["all"].at[i + 1].add(1)

    x = numbers(5)
    even, odd = x[::2], x[1::2]
    expected = [0, x.sum(), even[even > 2].sum(), odd[odd > 2].sum()]
    check(f, x, oracle=(np.array(expected, np.float32), {"all": x + np.array([0, 1, 1, 1, 1], np.float32)}))


# --- outputs that start at 0, and donated inputs ---------------------------------------------------------------------


def test_what_no_program_stores_is_zero() -> None:
    @tk.kernel(out_type=zeros_like_first)
    def f(x, out):
        i = tk.parallel(x.shape[0])

        @tk.when(i % 2 == 1)
        def _():
            out.store((i, tk.ds(1, 9)), x[i, :][0], mask=jnp.arange(9) != 1)

        out[i, 0] = out[i, 1]

    x = numbers(5, 4)
    expected = np.zeros_like(x)
    expected[1::2] = x[1::2, :1] * np.array([1, 1, 0, 1])
    check(f, x, oracle=expected)


@tk.kernel(out_type=lambda cache, *_: jax.ShapeDtypeStruct((), cache.dtype), donate=("cache",))
def append(cache, row, at, largest):
    """Write a row of a cache in place, and return the cache's largest element."""
    cache[at[()]] = row[...]
    largest[()] = cache[...].max()


def test_a_donated_input_comes_back_first_and_the_callers_array_is_as_it_was() -> None:
    cache, row = numbers(4, 3), np.array([50, 60, 70], np.float32)
    for call in (append, jax.jit(append), jax.jit(append, donate_argnums=0)):
        given, twice = jnp.asarray(cache), jnp.asarray(cache)
        grown, largest = call(twice if call is append else jnp.asarray(cache), row, np.int32(2))
        expected = cache.copy()
        expected[2] = row
        assert_same(np.asarray(grown), expected)
        assert float(largest) == 70
        assert_same(np.asarray(given), cache)
        assert_same(np.asarray(twice), cache)
    check(append, cache, row, np.int32(-1), oracle=(cache, cache.max()))


def test_a_donated_input_that_is_used_again_is_copied() -> None:
    @jax.jit
    def f(cache, row):
        grown, _ = append(cache, row, jnp.int32(1))
        again, _ = append(grown, row, jnp.int32(3))
        return cache, grown, again

    cache, row = numbers(4, 3), np.array([50, 60, 70], np.float32)
    kept, grown, again = map(np.asarray, f(cache, row))
    assert_same(kept, cache)
    np.testing.assert_array_equal((grown != cache).any(axis=1), [False, True, False, False])
    np.testing.assert_array_equal((again != cache).any(axis=1), [False, True, False, True])


def test_a_donated_pytree_and_no_other_output() -> None:
    @tk.kernel(out_type=lambda state: (), donate=("state",))
    def f(state):
        i = tk.parallel(state["a"].shape[0], 2)
        state["a"][i], state["b"][i] = state["b"][i], state["a"][i]

    found = f({"a": numbers(3), "b": numbers(3, start=7)})
    assert_same(np.asarray(found["a"]), numbers(3, start=7))
    assert_same(np.asarray(found["b"]), numbers(3))


# --- bad input -------------------------------------------------------------------------------------------------------


def test_a_sum_that_is_also_loaded() -> None:
    @tk.kernel(out_type=tk.Sum)
    def f(x, out):
        out.at[...].add(x[...])
        out.at[...].add(out[...])  # <-

    with refused(
        OutputError,
        "out is a tk.Sum and cannot be loaded",
        expected="out.at[...].add(value) only",
        got="a load of out: ref<f32[6], sum>",
        fix="a tile or a carry",
    ):
        f.trace(X)


def test_a_sum_that_is_also_stored() -> None:
    @tk.kernel(out_type=tk.Sum)
    def f(x, out):
        out.at[0][...] = 0.0  # <-

    with refused(
        OutputError,
        "out is a tk.Sum and cannot be stored to",
        expected="out.at[...].add(value)",
        got="a store to out: ref<f32[6], sum>",
        fix="without tk.Sum",
    ):
        f.trace(X)


@pytest.mark.parametrize("names", [("out",), ("x", "out")])
def test_an_output_that_is_donated(names: tuple[str, ...]) -> None:
    @tk.kernel(out_type=zeros_like_first, donate=names)
    def f(x, out):  # <-
        out[...] = x[...]

    with pytest.raises(ArgumentError, match="f donates an output") as caught:
        f(X)
    error = caught.value
    assert (error.expected, error.got) == ("names among the inputs, x", f"donate = {names!r}")
    assert error.loc.line == f._definition.loc.line


def test_a_donated_name_that_is_no_parameter() -> None:
    with pytest.raises(ArgumentError, match="f donates something that is no parameter") as caught:

        @tk.kernel(out_type=zeros_like_first, donate=("y",))
        def f(x, out):
            out[...] = x[...]

    assert (caught.value.expected, caught.value.got) == ("names among x, out", "donate = ('y',)")
    assert caught.value.loc.snippet().endswith("def f(x, out):")


def test_only_plain_outputs_must_be_stored() -> None:
    @tk.kernel(out_type=lambda x: (tk.Zeros(x), tk.Sum(x), x))
    def f(x, zeros, sums, out):
        out.store(..., x[...], mask=jnp.arange(x.shape[0]) > 0)

    with pytest.raises(UnwrittenError, match=r"out\[0\] is never stored"):
        interpreted(f, X)


def test_a_number_that_the_dtype_does_not_hold() -> None:
    @kernel(((4,), np.uint8))
    def f(x, out):
        out[...] = -1  # <-

    with refused(OutputError, "a number that the dtype does not hold is stored to out", expected="u8", got="-1 (int)"):
        f.trace(X)
