"""Atomics: `ref.at[index].add(value)`, `max`, `min`, `and_`, `or_` and `xor`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilekern as tk
from tests.lang.checks import COMPILED, WIDE, both, check, interpreted, like_first, numbers, refused
from tilekern.errors import InterpreterError, OrderDependenceError, OutputError, WriteConflictError

BF16 = np.dtype(ml_dtypes.bfloat16)
INTEGERS = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"]
FLOATS = ["f2", "f4", "f8", BF16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
MEANING: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "and_": np.bitwise_and,
    "or_": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def update(view: tk.Ref, kind: str, value: Any, **options: Any) -> None:
    """Update a view atomically by the method `kind`. Float sums are exact here, so they need no order."""
    more = {"ordered": False} if kind == "add" else {}
    getattr(view, kind)(value, **options, **more)


def zeros_like_first(x: Any, *_: Any, **__: Any) -> tk.Zeros:
    return tk.Zeros(jax.ShapeDtypeStruct(x.shape, x.dtype))


# --- any updates, against an oracle that makes one after the other ---------------------------------------------------


@tk.kernel(out_type=lambda start, *_, **__: None, donate=("start",))
def scatter(start, where, value, mask, _, *, kind: str, block: tk.Block):
    """Programs along j update the same elements, and a vector may contain one element twice."""
    i = tk.parallel(where.shape[0], block)
    j = tk.parallel(2)
    update(start.at[where.load(i, fill=-1)], kind, value[i, j], mask=mask[i])


@pytest.mark.sweep(1)  # the interpreter computes wide dtypes in a way of its own
@pytest.mark.parametrize("run", [pytest.param(both, id="compiled"), pytest.param(interpreted, id="wide")])
def test_updates_of_any_elements_in_any_number(run: Any) -> None:
    @(COMPILED if run is both else WIDE)
    @given(st.data(), st.sampled_from(["i4", "u1", "f4", "?"]), st.integers(0, 7), st.integers(1, 5))
    def property(data: st.DataObject, dtype: str, count: int, block: int) -> None:
        kind = data.draw(st.sampled_from(["max", "min", *([] if dtype == "?" else ["add"])]))
        if dtype != "f4":
            kind = data.draw(st.sampled_from([kind, "and_", "or_", "xor"]))
        where = np.array(data.draw(st.lists(st.integers(-1, 4), min_size=count, max_size=count)), np.int32)
        random = np.random.default_rng(count)
        start, value = (random.integers(0, 90, shape).astype(dtype) for shape in (4, (count, 2)))
        mask, expected = random.random(count) < 0.8, start.copy()
        for lane, place in enumerate(where):
            if mask[lane] and 0 <= place < 4:
                for v in value[lane]:
                    expected[place] = MEANING[kind](expected[place], v)
        check(scatter, start, where, value, mask, oracle=(expected, None), run=run, kind=kind, block=block)

    property()


def test_a_mask_leaves_elements_as_they_are() -> None:
    start, where = np.array([5, 9, 12, 3], np.int32), np.arange(4, dtype=np.int32)
    value, mask = np.array([[8, 8], [6, 1], [3, 10], [2, 7]], np.int32), np.array([True, False, True, False])
    for kind, meaning in MEANING.items():
        updated = meaning(meaning(start, value[:, 0]), value[:, 1])
        expected = np.where(mask, updated, start)
        check(scatter, start, where, value, mask, oracle=(expected, None), run=interpreted, kind=kind, block=4)


@tk.kernel(out_type=zeros_like_first)
def windows(x, out, *, kind: str, block: tk.Block):
    """Programs along i update overlapping windows; the first window begins before the array."""
    i = tk.parallel(x.shape[0], block)
    update(out.at[tk.ds(i.start // 2 - 1, block)], kind, x[i])


@COMPILED
@given(st.sampled_from([0, 1, 8, 13]), st.sampled_from([1, 3, 4]), st.sampled_from(["add", "max", "min", "xor"]))
def test_overlapping_windows(extent: int, block: int, kind: str) -> None:
    x, expected = np.arange(extent, dtype=np.int32) * 37 % 23 - 9, np.zeros(extent, np.int32)
    for program in range(0, extent, block):
        # Lanes of the last tile past the extent read 0, and update, too.
        for n in range(block):
            place, value = program // 2 - 1 + n, x[program + n] if program + n < extent else 0
            if 0 <= place < extent:
                expected[place] = MEANING[kind](expected[place], value)
    check(windows, x, oracle=expected, kind=kind, block=block)


@tk.kernel(out_type=lambda x, **_: tk.Zeros(jax.ShapeDtypeStruct((2,), x.dtype)))
def by_parity(x, out, *, kind: str):
    i = tk.parallel(x.shape[0])
    update(out.at[i % 2], kind, x[i])


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, "?"], ids=str)
def test_every_kind_of_every_dtype(dtype: Any) -> None:
    with jax.enable_x64(True):
        x = np.array([3, 1, 2, 0, 1, 1, 1, 0, 2, 120]).astype(dtype)
        bitwise = np.dtype(dtype).kind in "iub"
        kinds = ["max", "min", *(["and_", "or_", "xor"] if bitwise else []), *([] if dtype == "?" else ["add"])]
        for kind in kinds:
            expected = np.zeros(2, dtype)
            for n, value in enumerate(x):
                expected[n % 2] = MEANING[kind](expected[n % 2], value)
            check(by_parity, x, oracle=expected, kind=kind)


@pytest.mark.parametrize("kind", ["max", "min"])
def test_nan_wins(kind: str) -> None:
    check(by_parity, np.array([1, -1, np.nan, -2, np.inf], np.float32), kind=kind, oracle=lambda x, kind: np.array(
        [np.nan, 0 if kind == "max" else -2], np.float32
    ))  # fmt: skip


def test_integer_sums_wrap_around() -> None:
    check(by_parity, np.array([100, -100, 100, -100], np.int8), kind="add", oracle=np.array([-56, 56], np.int8))


def test_updates_in_loops_and_branches() -> None:
    @tk.kernel(out_type=zeros_like_first)
    def histogram(x, out):
        i = tk.parallel(x.shape[0], 4)

        def step(n):
            @tk.when(x[n] >= 0)
            def _():
                out.at[x[n]].add(1)

        tk.foreach(tk.serial(x.shape[0], start=i.start, stop=jnp.minimum(i.stop, x.shape[0])), step)

    x = np.array([3, 0, -1, 3, 3, 9, 1, -7, 0, 5], np.int32)
    check(histogram, x, oracle=np.bincount(x[x >= 0], minlength=10).astype(np.int32))


# --- bad input -------------------------------------------------------------------------------------------------------

X = numbers(6)


def test_a_float_atomic_that_does_not_say_it_is_unordered() -> None:
    @tk.kernel(out_type=zeros_like_first)
    def f(x, out):
        i = tk.parallel(6, 2)
        out.at[i].add(x[i])  # <-

    with refused(
        OutputError,
        "a float atomic rounds differently from run to run",
        expected="ordered=False",
        got="out: ref<f32[6], zeros> with ordered=True",
        fix="tk.Sum",
    ):
        f.trace(X)


@pytest.mark.parametrize("kind", list(MEANING))
def test_an_atomic_on_a_plain_output(kind: str) -> None:
    @like_first
    def f(x, out):
        getattr(out.at[0], kind)(1)  # <-

    with refused(
        OutputError,
        f"out does not take an atomic {kind.strip('_')}",
        expected="a tk.Zeros output or a donated input",
        got="out: ref<i32[6], out>",
        fix="tk.Zeros(...) or tk.Sum(...)",
    ):
        f.trace(X.astype(np.int32))


def test_an_atomic_on_an_input() -> None:
    @like_first
    def f(x, out):
        x.at[0].add(1.0)  # <-

    with refused(OutputError, "x does not take an atomic add", expected="a donated input", got="in>", fix="out_type"):
        f.trace(X)


@pytest.mark.parametrize("kind", ["max", "min"])
def test_a_sum_takes_sums_only(kind: str) -> None:
    @tk.kernel(out_type=tk.Sum)
    def f(x, out):
        getattr(out.at[0], kind)(1)  # <-

    with refused(OutputError, f"out does not take an atomic {kind}", expected="a tk.Sum output for add", got="sum>"):
        f.trace(X)


@pytest.mark.parametrize(
    ("dtype", "kind"), [("f4", "and_"), ("f4", "or_"), ("f4", "xor"), (BF16, "xor"), ("?", "add")], ids=str
)
def test_updates_that_a_dtype_does_not_have(dtype: Any, kind: str) -> None:
    @tk.kernel(out_type=zeros_like_first)
    def f(x, out):
        getattr(out.at[...], kind)(x[...])  # <-

    with refused(
        OutputError,
        f"an atomic {kind.strip('_')} of",
        expected="one of " + ("max, min, and, or, xor" if dtype == "?" else "add, max, min"),
        got="zeros>",
        fix="bit operations on integers or bools",
    ):
        f.trace(X.astype(dtype))


def test_a_value_of_another_dtype() -> None:
    @tk.kernel(out_type=zeros_like_first)
    def f(x, out):
        out.at[...].max(x[...].astype(int))  # <-

    with refused(OutputError, "a i32 tile is stored to a f32 output", got="value = int32[6]", fix=".astype("):
        f.trace(X)


def test_a_value_of_another_shape() -> None:
    @tk.kernel(out_type=zeros_like_first)
    def f(x, out):
        out.at[:4].max(x[...])  # <-

    with refused(OutputError, "the value does not fit the tile of out", expected="broadcasts to (4,)", got="[6]"):
        f.trace(X)


# --- what the interpreter sees ---------------------------------------------------------------------------------------


def found(kind: type[InterpreterError], summary: str, function: tk.Kernel, *arrays: Any) -> None:
    """Expect the interpreter to raise `kind` with this text, at the kernel's line marked `# <-`."""
    with pytest.raises(kind) as caught:
        interpreted(function, *arrays)
    assert summary in caught.value.summary
    assert "# <-" in caught.value.loc.snippet()


def test_updates_of_two_kinds() -> None:
    @tk.kernel(out_type=zeros_like_first)
    def f(x, out):
        i = tk.parallel(6)
        out.at[0].max(x[i])
        out.at[0].min(x[i])  # <-

    found(OrderDependenceError, "out[0] is updated atomically, and loaded or updated in another way", f, X)


def test_updates_of_two_kinds_of_different_elements() -> None:
    @tk.kernel(out_type=zeros_like_first)
    def f(x, out):
        i = tk.parallel(6)
        out.at[0].max(x[i])
        out.at[1].min(-x[i])

    check(f, X, oracle=np.array([6, -6, 0, 0, 0, 0], np.float32))


def test_a_store_to_what_is_updated() -> None:
    @tk.kernel(out_type=zeros_like_first)
    def f(x, out):
        i = tk.parallel(6)
        out.at[0].max(x[i])
        out[i] = x[i]  # <-

    found(WriteConflictError, "out[0] is stored and updated atomically", f, X)


def test_an_update_of_what_is_stored() -> None:
    @tk.kernel(out_type=zeros_like_first)
    def f(x, out):
        i = tk.parallel(6)
        out[i] = x[i]
        out.at[i].max(x[i])  # <-

    found(WriteConflictError, "out[0] is stored and updated atomically", f, X)


@pytest.mark.parametrize("early", [True, False])
def test_a_load_of_what_is_updated(early: bool) -> None:
    @tk.kernel(out_type=lambda x: (tk.Zeros(x), x))
    def before(x, total, out):
        i = tk.parallel(6)
        out[i] = total[0] + x[i]
        total.at[0].add(x[i], ordered=False)  # <-

    @tk.kernel(out_type=lambda x: (tk.Zeros(x), x))
    def after(x, total, out):
        i = tk.parallel(6)
        total.at[0].add(x[i], ordered=False)
        out[i] = total[0] + x[i]  # <-

    summary = "total[0] is updated atomically, and loaded or updated in another way"
    found(OrderDependenceError, summary, before if early else after, X)


def test_a_donated_input_that_another_program_overwrites() -> None:
    @tk.kernel(out_type=lambda x: (), donate=("x",))
    def f(x):
        i = tk.parallel(6)
        x[i] = x[tk.ds(i + 1, 1)][0]  # <-

    found(OrderDependenceError, "which another program stores", f, X)


def test_two_programs_store_an_element_that_starts_at_zero() -> None:
    @tk.kernel(out_type=zeros_like_first)
    def f(x, places, out):
        i = tk.parallel(6)
        out[places[i]] = x[i]  # <-

    found(WriteConflictError, "two programs store out[0]", f, X, np.arange(6, dtype=np.int32) // 2)
