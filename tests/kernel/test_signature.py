"""Signatures of kernels, and their static arguments."""

from __future__ import annotations

import inspect
import pydoc
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import like_first, numbers, refused
from tilekern.errors import ArgumentError
from tilekern.kernel.signature import of_function

pytestmark = pytest.mark.sweep(1)  # all cases: none compiles a program

X = numbers(6)


@like_first
def scale(x, out, *, factor: float, twice: bool = False, mode: Literal["up", "down"] = "up", block: tk.Block = 4):
    i = tk.parallel(x.shape[0], block)
    by = factor * (2 if twice else 1)
    out[i] = x[i] * by if mode == "up" else x[i] / by


def test_what_is_static_and_what_is_a_block() -> None:
    signature = scale.signature
    assert signature.arrays == ("x", "out")
    assert list(signature.statics) == ["factor", "twice", "mode"]
    assert dict(signature.blocks) == {"block": 4}


def test_blocks_are_known_by_their_annotation() -> None:
    def f(x: Missing, out, *, a: tk.Block, b: tk.Block = 3, c: int = 4, d: Missing = 5): ...  # noqa: F821

    assert list(of_function(f).blocks) == ["a", "b"]
    assert list(of_function(f).statics) == ["c", "d"]


def test_inputs_may_be_given_by_keyword() -> None:
    @tk.kernel(out_type=lambda x, y: x)
    def add(x, y, out, *, minus: bool = False):
        out[...] = x[...] - y[...] if minus else x[...] + y[...]

    np.testing.assert_array_equal(add(X, y=X), 2 * X)
    np.testing.assert_array_equal(add(y=X, x=X, minus=True), 0 * X)
    np.testing.assert_array_equal(jax.jit(lambda a: add(x=a, y=jnp.asarray(X)))(X), 2 * X)


# --- static arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "got"),
    [
        ({"factor": "x"}, "factor = 'x' (str)"),
        ({"factor": True}, "factor = True (bool)"),
        ({"factor": 1.0, "twice": 1}, "twice = 1 (int)"),
        ({"factor": 1.0, "mode": "left"}, "mode = 'left' (str)"),
    ],
)
def test_a_static_argument_of_the_wrong_type(given, got) -> None:
    name = got.partition(" ")[0]
    with refused(ArgumentError, f"argument {name} of scale has the wrong type", expected=f"{name}: ", got=got):
        scale(X, **given)  # <-


@pytest.mark.parametrize("factor", [2, 2.0, np.float32(2), np.int64(2)])
def test_any_number_is_a_float(factor) -> None:
    np.testing.assert_array_equal(scale(X, factor=factor), X * 2)


@pytest.mark.parametrize("value", [[1.0], {"a": 1}, np.zeros(3)])
def test_a_static_argument_that_is_not_hashable(value) -> None:
    with refused(
        ArgumentError,
        "the keyword argument factor of scale is static and must be hashable",
        expected="a hashable Python value",
        got="factor = ",
        fix="lists as tuples",
    ):
        scale(X, factor=value)  # <-


def test_a_traced_static_argument() -> None:
    def call(x, factor):
        return scale(x, factor=factor)  # the line of the error

    with pytest.raises(ArgumentError, match="static and must be hashable") as raised:
        jax.jit(call)(X, 2.0)
    assert raised.value.got == "factor = float32[]"
    assert raised.value.loc.function == "call"


def test_a_static_argument_that_is_missing() -> None:
    with refused(ArgumentError, "scale needs the keyword argument factor", expected="factor=", got="no", fix="default"):
        scale(X)  # <-


def test_a_keyword_that_does_not_exist() -> None:
    with refused(
        ArgumentError,
        "scale has no keyword argument 'facto'",
        expected="one of block, factor, mode, num_ctas, num_stages, num_warps, target, twice",
        got="facto = 2.0 (float)",
        fix="order",
    ):
        scale(X, facto=2.0)  # <-


@pytest.mark.parametrize(
    ("block", "got"), [(0, "0"), (-1, "-1"), (2.5, "2.5 (float)"), ("4", "'4' (str)"), (True, "True (bool)")]
)
def test_a_block_of_a_call_must_be_positive(block, got) -> None:
    summary = "block must be a static integer of at least 1"
    with refused(ArgumentError, summary, expected="a Python int >= 1", got=f"block = {got}"):
        scale(X, factor=2.0, block=block)  # <-


def test_a_block_of_none_is_the_default() -> None:
    np.testing.assert_array_equal(scale(X, factor=2.0, block=None), X * 2)


# --- signatures that are none ---------------------------------------------------------------------------------------


def _signatures() -> dict[str, Any]:
    def arguments(x, *out): ...
    def keywords(x, out, **rest): ...
    def nothing(): ...
    def only_statics(*, n: int): ...

    return {f.__name__: f for f in (arguments, keywords, nothing, only_statics)}


@pytest.mark.parametrize("name", _signatures())
def test_a_signature_that_is_none_of_a_kernel(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"the signature of the kernel {name} is not one of a kernel") as raised:
        like_first(_signatures()[name])
    assert "at least one output" in raised.value.expected
    assert raised.value.got.startswith(f"{name}(")
    assert raised.value.loc.function == name


def test_an_error_of_a_signature_points_at_the_definition() -> None:
    with refused(
        ArgumentError, "the signature of the kernel f is not", expected="positional", got="f(*x)", fix="tuple"
    ):

        @like_first
        def f(*x):  # <-
            ...


def test_target_is_reserved() -> None:
    with refused(
        ArgumentError, "the kernel f has a parameter named target", expected="other", got="target", fix="rename"
    ):

        @like_first
        def f(x, out, *, target: str):  # <-
            ...


def test_launch_options_are_reserved() -> None:
    with refused(
        ArgumentError, "the kernel f has a parameter named num_warps", expected="other", got="num_warps", fix="launch"
    ):

        @like_first
        def f(x, out, *, num_warps: tk.Block = 4):  # <-
            ...

    with pytest.raises(ArgumentError, match="the kernel g has a parameter named num_stages"):

        @like_first
        def g(x, out, *, num_stages: int): ...


# --- for help and editors -------------------------------------------------------------------------------------------


def test_the_signature_of_calls() -> None:
    @tk.kernel(out_type=lambda x, y, n: (x, y))
    def f(x, y, first, second, *, n: int, flag: bool = True, block: tk.Block = 4):
        """What users read."""

    @like_first
    def one_output(x, y, out): ...

    @tk.op(out_type=lambda x: x)
    def op(x, *, splits: tk.Block):
        return x

    launch = "num_warps: 'int | None' = None, num_stages: 'int | None' = None, num_ctas: 'int | None' = None"
    options = f"target: 'str | None' = None, {launch})"
    blocks = "block: 'int | None' = None"
    assert str(inspect.signature(f)) == f"(x: 'Any', y: 'Any', *, n: int, flag: bool = True, {blocks}, {options}"
    assert list(inspect.signature(one_output).parameters)[:2] == ["x", "y"]
    assert "out" not in inspect.signature(one_output).parameters
    assert list(inspect.signature(op).parameters)[:2] == ["x", "splits"]
    text = pydoc.render_doc(f, renderer=pydoc.plaintext)
    assert "f(x: 'Any', y: 'Any', *, n: int" in text and "What users read." in text


def test_a_kernel_is_no_method_of_the_class_that_has_it() -> None:
    class Holder:
        @like_first
        def copy(x, out):
            out[...] = x[...]

    assert Holder().copy is Holder.copy
    np.testing.assert_array_equal(Holder().copy(np.ones(3)), np.ones(3))
