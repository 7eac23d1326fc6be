"""Tracing of a body: its outputs, and the Python code that it may not contain."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tilekern as tk
from tests.lang.checks import check, kernel, like_first, numbers, refused
from tilekern.errors import CarryError, ConcreteValueError, IndexingError, OutputError, TilekernError, TraceError

pytestmark = pytest.mark.sweep(1)  # all cases: they take little time

X = numbers(10)


@pytest.mark.smoke
def test_the_ir_of_a_kernel() -> None:
    """Complete text of the IR, from which every backend starts."""

    @like_first
    def scale(x, out, *, factor: float, block: tk.Block = 4):
        i = tk.parallel(x.shape[0], block)
        tile = x[i]
        out[i] = tile * factor

    assert str(scale.trace(X, factor=2.0)) == (
        "func @scale(%x: ref<f32[10], in>, %out: ref<f32[10], out>) {\n"
        "  grid %i in i[10 by 4]\n"
        "  %0 = load %x[4*%i +: 4] : f32[4]\n"
        "  %1 = constant 2.0 : f32[4]\n"
        "  %2 = mul(%0, %1) : f32[4]\n"
        "  store %2 to %out[4*%i +: 4]\n"
        "}\n"
    )


def test_tracing_does_not_depend_on_the_settings_of_the_caller() -> None:
    def traced() -> str:
        @kernel(((10, 10), np.float32))
        def f(x, out):
            out[...] = tk.dot(x[...][:, None], x[...][None]) @ jnp.eye(10)

        return str(f.trace(X))

    alone = traced()
    with jax.default_matmul_precision("bfloat16"), jax.disable_jit():
        assert traced() == alone


def test_an_output_of_no_elements_needs_no_store() -> None:
    @kernel(None, ((0, 3), np.float32))
    def f(x, out, nothing):
        out[...] = x[...]

    check(f, X, oracle=(X, np.zeros((0, 3), np.float32)))


# --- outputs --------------------------------------------------------------------------------------------------------


def test_an_output_that_is_never_stored() -> None:
    @kernel(None, ((3,), np.int32))
    def f(x, out, rest):  # <-
        out[...] = x[...]

    with refused(
        OutputError,
        "the output rest is never stored to",
        expected="a store to every element of rest: ref<i32[3], out>",
        got="no store",
        fix="leave it out of out_type",
    ):
        f.trace(X)


def test_one_output_of_a_tree_that_is_never_stored() -> None:
    @tk.kernel(out_type=lambda x: {"a": x, "b": x})
    def f(x, out):  # <-
        out["a"][...] = x[...]

    with refused(OutputError, "the output out['b'] is never stored to", got="no store"):
        f.trace(X)


def test_a_body_that_returns() -> None:
    @like_first
    def f(x, out):  # <-
        return x[...] * 2

    with refused(
        OutputError, "the body of f returned a value", expected="None", got="returned ", fix="out[...] = value"
    ):
        f.trace(X)


# --- concrete values ------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_a_python_if_on_a_traced_value() -> None:
    @like_first
    def f(x, out):
        tile = x[...]
        if tile.sum() > 0:  # <-
            out[...] = tile

    with refused(
        ConcreteValueError,
        "the body of f asks for the concrete value of a traced one",
        expected="static values only",
        got="TracerBoolConversionError: Attempted boolean conversion of traced array with shape bool[]",
        fix="use jnp.where, lax.cond",
    ):
        f.trace(X)


@pytest.mark.parametrize(
    ("use", "got"),
    [
        (lambda v: bool(v[0] > 1), "TracerBoolConversionError"),
        (lambda v: int(v[0]), "ConcretizationTypeError"),
        (lambda v: float(v[0]), "ConcretizationTypeError"),
        (lambda v: range(v[0].astype(int)), "TracerIntegerConversionError"),
        (lambda v: np.asarray(v), "TracerArrayConversionError"),
        (lambda v: np.sin(v), "TracerArrayConversionError"),
        (lambda v: jnp.zeros(v[0].astype(int)), ""),
        (lambda v: v[v > 0], "NonConcreteBooleanIndexError"),
        (lambda v: [0, 1, 2][v[0].astype(int)], "TracerIntegerConversionError"),
    ],
)
def test_every_way_to_ask_for_a_concrete_value(use, got) -> None:
    @like_first
    def f(x, out):
        out[...] = x[...]
        use(x[...])

    with pytest.raises(ConcreteValueError) as raised:
        f.trace(X)
    assert got in raised.value.got
    assert raised.value.loc.file == __file__


def test_a_concrete_value_inside_a_fold() -> None:
    @like_first
    def f(x, out):
        def step(t, carry):
            return carry + (1 if t.index else 0)  # <-

        out[...] = x[...] + tk.fold(tk.serial(10, 4), step, 0)

    with refused(ConcreteValueError, "the body of f asks", got="TracerBoolConversionError"):
        f.trace(X)


# --- loops and branches of JAX --------------------------------------------------------------------------------------


def _mismatches() -> dict[str, Any]:
    return {
        "fori_loop": lambda v: lax.fori_loop(0, 3, lambda n, c: c.astype(int), v),
        "fori_loop structure": lambda v: lax.fori_loop(0, 3, lambda n, c: (c, c), v),
        "fori_loop traced": lambda v: lax.fori_loop(0, v[0].astype(int), lambda n, c: c[:2], v),
        "while_loop": lambda v: lax.while_loop(lambda c: c[0] > 3, lambda c: c.astype(int), v),
        "while_loop structure": lambda v: lax.while_loop(lambda c: c[0] > 3, lambda c: [c], v),
        "while_loop condition": lambda v: lax.while_loop(lambda c: c > 3, lambda c: c, v),
        "while_loop condition dtype": lambda v: lax.while_loop(lambda c: c.sum(), lambda c: c, v),
        "scan": lambda v: lax.scan(lambda c, _: (c[:2], None), v, None, length=2),
        "cond": lambda v: lax.cond(v[0] > 3, lambda c: c, lambda c: c.astype(int), v),
        "cond structure": lambda v: lax.cond(v[0] > 3, lambda c: c, lambda c: (c, c), v),
        "cond predicate": lambda v: lax.cond(v > 3, lambda c: c, lambda c: c, v),
        "switch": lambda v: lax.switch(v[0].astype(int), [lambda c: c, lambda c: c[:2]], v),
    }


@pytest.mark.parametrize("name", _mismatches())
def test_types_that_do_not_fit(name: str) -> None:
    @like_first
    def f(x, out):
        out[...] = x[...]
        _mismatches()[name](x[...])

    with pytest.raises(CarryError, match=r"a loop or a branch of jax\.lax returns values of other types") as raised:
        f.trace(X)
    assert raised.value.loc.file == __file__
    assert "Revise" not in raised.value.got
    assert "\n" not in raised.value.got


def test_a_carry_that_does_not_fit() -> None:
    @like_first
    def f(x, out):
        tile = x[...]
        out[...] = lax.fori_loop(0, 3, lambda n, c: c.astype(int), tile)  # <-

    with refused(
        CarryError,
        "a loop or a branch of jax.lax",
        expected="the types of the initial ones",
        got="has type float32[10] but the corresponding output carry component has type int32[10]",
        fix=".astype",
    ):
        f.trace(X)


def test_other_errors_stay_what_they_are() -> None:
    @like_first
    def f(x, out):
        out[...] = x[...] + jnp.zeros(3)

    with pytest.raises(TypeError, match="add got incompatible shapes"):
        f.trace(X)

    @like_first
    def g(x, out):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        g.trace(X)


def test_an_error_leaves_no_trace_behind() -> None:
    @like_first
    def f(x, out):
        tk.parallel(10, 4)
        raise KeyError("mine")

    with pytest.raises(KeyError):
        f.trace(X)
    with pytest.raises(TraceError, match="outside a kernel"):
        tk.parallel(10, 4)


# --- values of the wrong kind ---------------------------------------------------------------------------------------

TABLE = jnp.arange(6.0)
MISPLACED: list[tuple[Any, type[TilekernError], str, str]] = [
    (lambda x, i: np.exp(x[i]), ConcreteValueError, "gives a tile to NumPy", "write jnp"),
    (lambda x, i: f"{x[0]:.2f}", ConcreteValueError, "formats a traced value", "tk.debug_print"),
    (lambda x, i: x[i] * 2**100, TraceError, "a Python integer does not fit the dtype", "2.0**100"),
    (lambda x, i: TABLE[i], IndexingError, "an array that is no ref is indexed", "as an argument of the kernel"),
    (lambda x, i: np.arange(6.0)[i], IndexingError, "an array that is no ref is indexed", "as an argument"),
    (lambda x, i: x[i][i], IndexingError, "an array that is no ref is indexed", "as an argument"),
    (lambda x, i: jnp.exp(i), TraceError, "a Tile or a ref is used where an array is needed", "tile.indices"),
    (lambda x, i: jnp.where(x[i] > 0, x[i], i), TraceError, "a Tile or a ref is used where an array", "tile.indices"),
]


@pytest.mark.parametrize(("use", "kind", "summary", "fix"), MISPLACED)
def test_a_value_in_a_place_of_another_kind(use: Any, kind: type[TilekernError], summary: str, fix: str) -> None:
    @like_first
    def f(x, out):
        i = tk.parallel(6, 3)
        use(x, i)
        out[i] = x[i]

    with pytest.raises(kind, match=summary) as raised:
        f.trace(numbers(6))
    error = raised.value
    assert type(error) is kind and error.expected and error.got and fix in error.fix
    assert (error.loc.file, error.loc.function) == (__file__, "<lambda>")


def test_a_static_argument_that_no_dtype_holds() -> None:
    @kernel(None)
    def f(x, out, *, factor):
        out[...] = x[...] * factor  # <-

    with refused(TraceError, "a Python integer does not fit", expected="floats", got="OverflowError", fix="2.0**100"):
        f.trace(numbers(6), factor=2**100)


@pytest.mark.parametrize("error", [OverflowError("math range error"), IndexError("list index out of range")])
def test_errors_of_python_stay_what_they_are(error: Exception) -> None:
    @like_first
    def f(x, out):
        raise error

    with pytest.raises(type(error)) as raised:
        f.trace(numbers(6))
    assert raised.value is error
