"""Choices: their values, what gives them, and that derivatives, batches and files have the choice of the call."""

from __future__ import annotations

import inspect
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import like_first, numbers, refused
from tilekern import testing
from tilekern.errors import ArgumentError
from tilekern.kernel.signature import of_function

pytestmark = pytest.mark.sweep(1)  # all cases: none compiles a program

X = numbers(6)

type Direction = Literal["up", "down"]


def doubled() -> tk.Kernel:
    """A kernel of `x + x` or `x * 2`, as the choice `by` says, "sums" without a schedule."""

    @like_first
    def f(x, out, *, by: tk.Choice[Literal["sums", "products"]] = "sums", block: tk.Block = 4):
        i = tk.parallel(x.shape[0], block)
        out[i] = x[i] + x[i] if by == "sums" else x[i] * 2

    return f


def way(traced: Any) -> str:
    """The choice that a trace of `doubled` was made with."""
    return "products" if " mul " in str(traced) or "mul(" in str(traced) else "sums"


# --- what gives a choice ----------------------------------------------------------------------------------------------


def test_a_choice_is_neither_static_nor_a_block() -> None:
    signature = doubled().signature
    assert not signature.statics and list(signature.blocks) == ["block"]
    assert signature.choices["by"].values == ("sums", "products")
    assert signature.tunables == {"block": 4, "by": "sums"}


def test_the_call_decides_then_the_schedule_then_the_default() -> None:
    f = doubled()
    assert way(f.trace(X)) == "sums" and way(f.trace(X, by="products")) == "products"
    f.schedule("cpu")(lambda x: {"by": "products"})
    assert way(f.trace(X)) == "products" and way(f.trace(X, by="sums")) == "sums"
    assert way(f.trace(X, by=None)) == "products"
    assert way(f.trace(X, target="cuda:sm_90")) == "sums"
    for choice in ({}, {"by": "sums"}, {"by": "products"}):
        np.testing.assert_array_equal(f(X, **choice), 2 * X)


def test_values_of_an_alias_and_of_numpy() -> None:
    def f(x, out, *, to: tk.Choice[Direction], by: tk.Choice[Literal[1, 2]] = 1, safe: tk.Choice[bool] = False): ...

    signature = of_function(f)
    assert signature.choices["to"].values == ("up", "down")
    assert signature.choices["safe"].values == (False, True)
    given = {"to": np.str_("up"), "by": np.int64(2), "safe": np.bool_(True)}
    found = signature.check_blocks(given, "the call")
    assert found == {"to": "up", "by": 2, "safe": True}
    assert [type(value) for value in found.values()] == [str, int, bool]


def test_a_choice_beside_annotations_that_name_nothing() -> None:
    def f(x: Missing, out, *, by: tk.Choice[Literal["a", "b"]], c: Missing = 5): ...  # noqa: F821

    signature = of_function(f)
    assert signature.choices["by"].values == ("a", "b") and list(signature.statics) == ["c"]


def test_the_signature_of_calls_has_the_values() -> None:
    parameter = inspect.signature(doubled()).parameters["by"]
    assert parameter.default is None and parameter.annotation == "Literal['sums', 'products'] | None"


# --- all that a call becomes has its choice ---------------------------------------------------------------------------


def test_each_choice_has_a_program_of_its_own() -> None:
    @like_first
    def f(x, out, *, by: tk.Choice[Literal[1, 2]] = 1, tells: tk.Choice[bool] = False):
        # Against the contract, so that the program that ran can be told from its result.
        out[...] = x[...] * by + (100 if tells else 0)

    for _ in range(2):
        np.testing.assert_array_equal(f(X), X)
        np.testing.assert_array_equal(f(X, by=2), 2 * X)
        np.testing.assert_array_equal(f(X, by=2, tells=True), 2 * X + 100)
        np.testing.assert_array_equal(jax.vmap(lambda x: f(x, by=2))(X[None])[0], 2 * X)
        np.testing.assert_array_equal(jax.grad(lambda x: f(x, by=2).sum())(jnp.asarray(X)), np.full_like(X, 2))
        np.testing.assert_array_equal(jax.grad(lambda x: f(x).sum())(jnp.asarray(X)), np.ones_like(X))
    f.schedule("cpu")(lambda x: {"by": 2})
    np.testing.assert_array_equal(f(X + 1, tells=True), 2 * (X + 1) + 100)


def test_blocks_of_derivatives_may_have_another_choice() -> None:
    @like_first
    def f(x, out, *, by: tk.Choice[Literal[1, 2]] = 1):
        out[...] = x[...] * by

    f.gradient_schedule("cpu")(lambda x: {"by": 2})
    np.testing.assert_array_equal(f(X), X)
    np.testing.assert_array_equal(jax.grad(lambda x: f(x).sum())(jnp.asarray(X)), np.full_like(X, 2))


def test_rules_and_ops_get_the_choice() -> None:
    @tk.op(out_type=lambda x: x)
    def f(x, *, by: tk.Choice[Literal["sums", "products"]] = "sums"):
        return doubled()(x, by=by)

    seen: list[str] = []

    @f.defjvp
    def _(primals, tangents, *, by=None):
        seen.append(by)
        return f(*primals, by=by), f(*tangents, by=by)

    np.testing.assert_array_equal(f(X, by="products"), 2 * X)
    assert "by=" not in str(f.trace(X)) and way(f.trace(X, by="products")) == "products"
    jax.jvp(lambda x: f(x, by="products"), (jnp.asarray(X),), (jnp.asarray(X),))
    assert seen[:1] == ["products"]


def test_a_saved_kernel_has_the_choice_of_each_target(tmp_path) -> None:
    f = doubled()
    f.schedule("cuda")(lambda x: {"by": "products"})
    file = tmp_path / "f.tile"
    f.trace(X, target="cpu:xla").save(file, targets=["cpu:xla", "cuda:sm_90"])
    funcs = file.read_text().split("func @f(")[1:]
    assert [way(func) for func in funcs] == ["sums", "products"]
    loaded = tk.load(file)
    assert way(loaded.lower("cpu:xla").ir) == "sums"
    np.testing.assert_array_equal(loaded(X), 2 * X)


def test_random_calls_have_all_choices() -> None:
    @like_first
    def wrong(x, out, *, by: tk.Choice[Literal["sums", "products"]] = "sums"):
        i = tk.parallel(x.shape[0], 4)
        out[i] = x[i] + x[i] if by == "sums" else x[i] * 3

    with pytest.raises(AssertionError, match="by='products'"):
        testing.check(wrong, lambda x: x * 2, targets=["cpu:xla"], gradients=False, batches=False)
    testing.check(wrong, lambda x: x * 2, targets=["cpu:xla"], gradients=False, batches=False, by="sums")


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["columns", 1, True, ["sums"], np.arange(3), np.str_("no")], ids=str)
def test_a_call_with_a_value_that_is_none(value: Any) -> None:
    f = doubled()
    summary = "the call gives by a value that is none of its choices"
    with refused(ArgumentError, summary, expected="one of 'sums', 'products'", got="by = ", fix="leave it out"):
        f(X, by=value)  # <-


@pytest.mark.parametrize("value", [0, 1.0, True, np.bool_(True)])
def test_true_is_no_number(value: Any) -> None:
    @like_first
    def f(x, out, *, by: tk.Choice[Literal[1, 2]] = 1): ...

    with refused(ArgumentError, "the call gives by a value", expected="one of 1, 2", got="by = ", fix="leave it out"):
        f(X, by=value)  # <-


def test_a_schedule_with_a_value_that_is_none() -> None:
    f = doubled()

    @f.schedule("cpu")
    def wrong(x):
        return {"by": "columns"}

    summary = "the schedule wrong gives by a value that is none of its choices"
    with refused(ArgumentError, summary, expected="one of 'sums'", got="by = 'columns' (str)", fix="leave it out"):
        f(X)  # <-


def test_a_default_that_is_none_of_the_values() -> None:
    summary = "the default of f gives by a value that is none of its choices"
    with refused(ArgumentError, summary, expected="one of 'a', 'b'", got="by = 'c' (str)", fix="leave it out"):

        @like_first
        def f(x, out, *, by: tk.Choice[Literal["a", "b"]] = "c"):  # <-
            ...


def test_a_choice_that_nobody_makes() -> None:
    @like_first
    def f(x, out, *, by: tk.Choice[Literal["a", "b"]]): ...

    with refused(ArgumentError, "f needs the choice by", expected="by=...", got="no value", fix="f(..., by='a')"):
        f(X)  # <-


def _without_values() -> dict[str, Any]:
    def bare(x, out, *, by: tk.Choice = 1): ...
    def of_ints(x, out, *, by: tk.Choice[int] = 1): ...
    def equal(x, out, *, by: tk.Choice[Literal[1, True]] = 1): ...
    def of_none(x, out, *, by: tk.Choice[Literal["a", None]] = "a"): ...
    def unresolved(x, out, *, by: tk.Choice[Missing] = "a"): ...  # noqa: F821

    return {f.__name__: f for f in (bare, of_ints, equal, of_none, unresolved)}


@pytest.mark.parametrize("name", _without_values())
def test_an_annotation_without_values(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"the values of the choice by of {name} are not known") as raised:
        like_first(_without_values()[name])
    assert "Literal" in raised.value.expected and raised.value.got.startswith("by: ")
    assert raised.value.fix.startswith("write by: tk.Choice[Literal")
    assert raised.value.loc.function == name


def test_choices_may_not_have_the_names_of_options() -> None:
    with refused(ArgumentError, "the kernel f has a parameter named target", expected="other", got="target", fix="re"):

        @like_first
        def f(x, out, *, target: tk.Choice[bool] = False):  # <-
            ...
