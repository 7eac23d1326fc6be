"""Kernels for given argument types: outputs, blocks, pytrees of arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import both, check, like_first, numbers, refused
from tilekern.blocks import choose
from tilekern.errors import ArgumentError, OutputError, UnwrittenError

X = numbers(6)


def S(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


# --- arguments and outputs ------------------------------------------------------------------------------------------


class Weights(NamedTuple):
    scale: Any
    shift: Any


@tk.kernel(out_type=lambda x, weights, extra: {"sum": x, "parts": [x, S(2)]})
def affine(x, weights, extra, out):
    """Pytrees of all kinds in and out, with None in them."""
    y = x[...] * weights.scale[0] + weights.shift["a"][...]
    if isinstance(extra, tuple):
        y += extra[0][...]
    elif extra is not None:
        y += extra.func(x[...], *[a[...] for a in extra.args])
    out["sum"][...] = y
    out["parts"][0][...] = -y
    out["parts"][1][...] = y[:2]


EXTRAS = {
    "none": (None, 0 * X),
    "tuple": ((X, None), X),
    "partial": (jax.tree_util.Partial(lambda x, y, z: x * y + z, X, X * 2), X * X + 2 * X),
}


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("shift", [{"a": X, "b": None}, {"a": X}])
def test_pytrees_in_and_out(shift: Any, extra: str) -> None:
    given, added = EXTRAS[extra]
    y = X * 2 + X + added
    expected = {"sum": y, "parts": [-y, y[:2]]}
    weights = Weights(numbers(3, start=2), shift)
    assert jax.tree.structure(affine(X, weights, given)) == jax.tree.structure(expected)
    check(affine, X, weights, given, oracle=expected)


def test_a_partial_is_a_part_of_the_type() -> None:
    """The function of a Partial decides what is traced; its arrays are operands."""

    @tk.kernel(out_type=lambda x, f: x)
    def apply(x, f, out):
        out[...] = f.func(x[...], *[a[...] for a in f.args])

    def double(x, y):
        return 2 * x + y

    def triple(x, y):
        return 3 * x + y

    for factor, function in ((2, double), (3, triple), (2, double)):
        for shift in (X, X + 1):
            got = apply(X, jax.tree_util.Partial(function, jnp.asarray(shift)))
            np.testing.assert_array_equal(got, factor * X + shift)


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_an_output_that_is_not_wanted(wanted: tuple[bool, bool]) -> None:
    @tk.kernel(out_type=lambda x, first, second: (x if first else None, S(2) if second else None))
    def f(x, a, b, *, first: bool, second: bool):
        if a is not None:
            a[...] = x[...]
        if b is not None:
            b[...] = x[:2]

    first, second = f(X, first=wanted[0], second=wanted[1])
    assert (first is not None, second is not None) == wanted
    expected = [a for a, w in zip((X, X[:2]), wanted, strict=True) if w]
    check(f, X, oracle=lambda *_, **__: expected, first=wanted[0], second=wanted[1])


def test_a_tuple_of_one_output_stays_a_tuple() -> None:
    @tk.kernel(out_type=lambda x: (x,))
    def f(x, out):
        out[...] = x[...]

    (out,) = f(X)
    np.testing.assert_array_equal(out, X)


def test_no_input() -> None:
    @tk.kernel(out_type=lambda: S(3, dtype=np.int32))
    def f(out):
        out[...] = jnp.arange(3)

    check(f, oracle=np.arange(3, dtype=np.int32))


def test_out_type_sees_static_arguments_and_no_blocks() -> None:
    seen: list[dict[str, Any]] = []

    def out_type(x: Any, **statics: Any) -> Any:
        seen.append(statics)
        return S(statics["n"])

    @tk.kernel(out_type=out_type)
    def f(x, out, *, n: int, flag: bool = True, block: tk.Block = 4):
        out[...] = x[:n]

    check(f, X, oracle=lambda x, n, **_: x[:n], n=3, block=2)
    assert seen[0] == {"n": 3, "flag": True}


@pytest.mark.parametrize("argument", [2.5, 3, True, np.float32(1), np.arange(3), jnp.int8(3)])
def test_arguments_of_all_kinds(argument: Any) -> None:
    @like_first
    def f(x, out):
        out[...] = x[...]

    expected = np.asarray(jnp.asarray(argument))
    (got,) = both(f, argument)
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", ["f8", "i8", "u8", "f4", "u2", ml_dtypes.bfloat16, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("x64", [False, True])
def test_dtypes_are_those_of_jax(dtype: Any, x64: bool) -> None:
    """64-bit types only where JAX has them."""

    @like_first
    def f(x, out):
        assert x.dtype == out.dtype == expected
        out[...] = x[...]

    with jax.enable_x64(x64):
        expected = jax.dtypes.canonicalize_dtype(dtype)
        assert f(np.zeros(3, dtype)).dtype == expected


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_a_body_under_a_mesh(kind: Any) -> None:
    """JAX reshards what is loaded where it meets constants and values that are closed over, which are of the mesh."""

    @jax.jit
    def call(x: Any, bound: Any) -> Any:
        least = bound * 2

        @like_first
        def clipped(x, out):
            out[...] = jnp.where(x[...] < 0, 0, jnp.where(x[...] < least, least, x[...]))

        return clipped(x)

    with jax.set_mesh(jax.make_mesh((1,), ("devices",), axis_types=(kind,))):
        found = call(X, np.float32(0.25))
    np.testing.assert_array_equal(found, np.where(X < 0, 0, np.maximum(X, 0.5)))


# --- what disagrees with out_type -----------------------------------------------------------------------------------


def test_a_store_that_disagrees_with_out_type() -> None:
    @tk.kernel(out_type=lambda x: S(7))
    def f(x, out):
        out[...] = x[...]  # <-

    with refused(OutputError, "the value does not fit the tile of out", expected="(7,)", got="value = float32[6]"):
        f(X)


def test_an_element_that_is_never_stored() -> None:
    """The interpreter finds it; a compiled kernel has no way to."""

    @tk.kernel(out_type=lambda x: S(6))
    def f(x, out):
        i = tk.parallel(6, 4)
        out.store(i, x[i], mask=x[i] != 3)

    with pytest.raises(UnwrittenError, match=r"out\[2\] is never stored") as raised:
        tk.interpret(f.trace(X))(X)
    assert raised.value.loc.function == "f"


@pytest.mark.parametrize(("count", "got"), [(0, "inputs: 0"), (1, "inputs: 1, outputs of"), (3, "inputs: 3")])
def test_the_wrong_number_of_arrays(count, got) -> None:
    @tk.kernel(out_type=lambda *args: S(6))
    def f(x, y, out):
        out[...] = x[...]

    summary = "f is called with the wrong number of arrays"
    with refused(ArgumentError, summary, expected="x, y, out", got=got, fix="one argument"):
        f(*[X] * count)  # <-


def test_a_block_that_is_given_by_position() -> None:
    @tk.kernel(out_type=lambda *args: S(6))
    def f(x, out, *, block: tk.Block = 2):
        i = tk.parallel(x.shape[0], block)
        out[i] = x[i]

    summary = "f is called with the wrong number of arrays"
    with refused(ArgumentError, summary, expected="x, out", got="inputs: 2", fix="give block by keyword"):
        f(X, 4)  # <-


def test_more_arrays_than_parameters() -> None:
    @tk.kernel(out_type=lambda *args: S(6))
    def f(x, out):
        out[...] = x[...]

    with refused(ArgumentError, "f takes fewer arrays", expected="x, out", got="3 positional", fix="by keyword"):
        f(X, X, X)  # <-


def test_an_out_type_that_fails_on_the_rank() -> None:
    @tk.kernel(out_type=lambda x: S(x.shape[1]))
    def f(x, out):
        out[...] = x[0]

    with refused(
        ArgumentError,
        "out_type of f fails on these arguments",
        expected="ranks and shapes",
        got="IndexError: tuple index out of range; arguments: float32[6]",
        fix="shapes of the arguments",
    ):
        f(X)  # <-


def test_an_out_type_may_refuse_in_its_own_words() -> None:
    def out_type(x: Any) -> Any:
        raise ArgumentError("f takes a matrix", expected="x[M, N]", got="x[6]", fix="reshape")

    @tk.kernel(out_type=out_type)
    def f(x, out):
        out[...] = x[0]

    with refused(ArgumentError, "f takes a matrix", expected="x[M, N]", got="x[6]", fix="reshape"):
        f(X)  # <-


@pytest.mark.parametrize("result", [3, "f32", np.float32, [S(2), 4], S(2, dtype=np.complex64)])
def test_an_out_type_that_returns_something_else(result: Any) -> None:
    @tk.kernel(out_type=lambda x: result)
    def f(x, out):  # <-
        out[...] = x[...]

    summary = "out_type of f returned something that is no array type"
    with refused(ArgumentError, summary, expected="ShapeDtypeStruct", fix="ShapeDtypeStruct"):
        f(X)


@pytest.mark.parametrize(
    ("argument", "got", "fix"),
    [
        (np.zeros(2, np.complex64), "x['a'] = complex64[2]", "two real arrays"),
        (np.zeros(2, ml_dtypes.int2), "x['a'] = int2[2]", "tk.unpack"),
        (np.zeros(2, ml_dtypes.float8_e4m3b11fnuz), "x['a'] = float8_e4m3b11fnuz[2]", "raw bits"),
        (np.array(["text"]), "x['a'] = <U4[1]", "cast with .astype"),
        ("text", "x['a'] = <U4[]", "cast with .astype"),
        (object(), "x['a'] = object[]", "cast with .astype"),
    ],
)
def test_an_argument_that_is_no_array_of_the_language(argument: Any, got: str, fix: str) -> None:
    @tk.kernel(out_type=lambda x: S(2))
    def f(x, out):
        out[...] = x["a"][...]

    summary = "f cannot take an array of this dtype"
    with refused(ArgumentError, summary, expected="a float, integer or bool array", got=got, fix=fix):
        f.trace({"a": argument})  # <-


def test_a_key_as_an_argument() -> None:
    @like_first
    def f(x, out):
        out[...] = x[...]

    summary = "f cannot take an array of this dtype"
    with refused(ArgumentError, summary, expected="integer", got="key<fry>", fix="jax.random.key_data(key)"):
        f(jax.random.key(0))  # <-


# --- blocks ---------------------------------------------------------------------------------------------------------


def scheduled(**schedules: int) -> tk.Kernel:
    """A kernel with a block of 4 and these blocks for targets (`_` for `:`)."""

    @like_first
    def copy(x, out, *, block: tk.Block = 4, other: tk.Block = 5):
        i, j = tk.parallel(x.shape[0], block), tk.parallel(1, other)
        out[i + j.index] = x[i + j.index]

    for target, block in schedules.items():
        copy.schedule(target.replace("_", ":"))(lambda x, block=block: {"block": block})
    return copy


def blocks(function: tk.Kernel, **keywords: Any) -> list[int]:
    return [axis.block for axis in function.trace(X, **keywords).ir.axes]


@pytest.mark.parametrize(
    ("schedules", "expected"),
    [
        ({}, 4),
        ({"cpu": 2}, 2),
        ({"cpu": 2, "cpu_xla": 3}, 3),
        ({"cpu_xla": 3, "cpu": 2, "c": 1}, 3),
        ({"c": 1}, 1),
        ({"": 6}, 6),
        ({"cuda": 7, "tpu_v5e": 8, "cpu_llvm": 9}, 4),
    ],
)
def test_the_longest_prefix_wins_and_the_call_over_it(schedules: dict[str, int], expected: int) -> None:
    function = scheduled(**schedules)
    assert blocks(function) == [expected, 5]
    assert blocks(function, target="cpu:xla") == [expected, 5]
    assert blocks(function, block=11) == [11, 5]
    assert blocks(function, other=11, block=None) == [expected, 11]
    assert function.trace(X).lower("cpu:xla").ir.axes[0].block == expected
    np.testing.assert_array_equal(function(X), X)


def test_a_schedule_sees_types_statics_and_the_target() -> None:
    seen: list[Any] = []

    @like_first
    def f(x, out, *, n: int, block: tk.Block = 4):
        i = tk.parallel(x.shape[0], block)
        out[i] = x[i]

    @f.schedule("cpu")
    def by_n(x, *, n, target):
        seen.append((x, n, target))
        return {"block": n}

    assert f.trace(X, n=3).ir.axes[0].block == 3
    assert seen[0] == (S(6), 3, "cpu:xla")


def test_a_schedule_with_a_block_that_does_not_exist() -> None:
    function = scheduled()

    @function.schedule("cpu")
    def wrong(x):
        return {"blok": 3}

    with refused(
        ArgumentError,
        "the schedule wrong names a block that copy does not have",
        expected="one of block, other",
        got="blok = 3 (int)",
        fix="tk.Block",
    ):
        function(X)  # <-


def test_a_schedule_with_a_block_of_zero() -> None:
    function = scheduled(cpu=0)
    with refused(ArgumentError, "block must be a static integer of at least 1", got="block = 0", expected=">= 1"):
        function(X)  # <-


def test_a_block_without_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    @like_first
    def f(x, out, *, block: tk.Block):
        i = tk.parallel(x.shape[0], block)
        out[i] = x[i]

    np.testing.assert_array_equal(f(X), X)  # by the model of CPUs
    check(f, X, oracle=lambda x, block: x, block=4)
    monkeypatch.delitem(choose._MODELS, "GPU")
    with refused(
        ArgumentError, "f needs the block block", expected="a schedule for cuda:sm_90", got="no", fix="block=128"
    ):
        f.trace(X).lower("cuda:sm_90")  # <-


@pytest.mark.parametrize("shape", [(-1,), (3, -2), (np.int64(-1),), (6.0,), (np.float32(6),), ("6",)])
def test_an_output_of_a_size_that_is_none(shape: Any) -> None:
    @tk.kernel(out_type=lambda x: S(*shape))
    def f(x, out):  # <-
        out[...] = x[...]

    with refused(
        ArgumentError, "a size that is none", expected="at least 0", got="shape = (", fix="the inputs' shapes"
    ):
        f(X)


def test_an_output_of_keys() -> None:
    @tk.kernel(out_type=lambda x: jax.eval_shape(lambda: jax.random.key(0)))
    def f(x, out):  # <-
        out[...] = x[...]

    with refused(ArgumentError, "no array type", expected="ShapeDtypeStruct", got="key<fry>[]", fix="ShapeDtypeStruct"):
        f(X)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_ref_of_jax(transform: Any) -> None:
    @tk.kernel(out_type=lambda x: x)
    def f(x, out):
        out[...] = x[...]

    with pytest.raises(ArgumentError, match=r"(?s)^f .*Ref.*Ref\{float32\[6\]\}.*\[\.\.\.\]"):
        transform(f)(jax.new_ref(jnp.asarray(X)))


@pytest.mark.parametrize("argument", ["abc", {1.0}, np.array([object()]), np.ones(3, np.longdouble), memoryview(b"a")])
def test_an_error_names_the_kernel_and_no_function_of_ours(argument: Any) -> None:
    @tk.kernel(out_type=lambda x: x)
    def copied(x, out):
        out[...] = x[...]

    with pytest.raises(ArgumentError, match="copied") as raised:
        copied(argument)
    assert "<locals>" not in str(raised.value) and not raised.value.fix.endswith(": ")
