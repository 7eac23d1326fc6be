"""Kernels and ops as Python objects: pickled and copied like functions, and their values of the outside."""

from __future__ import annotations

import copy
import functools
import multiprocessing
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import like_first, numbers, refused
from tilekern.errors import ArgumentError, UnsupportedError
from tilekern.kernel import entry
from tilekern.kernels.flash_attention.kernel import flash_attention_forward
from tilekern.kernels.matmul.kernel import matmul
from tilekern.kernels.softmax.kernel import softmax_forward

X = numbers(5)
S = jax.ShapeDtypeStruct((5,), np.float32)


@like_first
def double(x, out, *, block: tk.Block = 4):
    i = tk.parallel(x.shape[0], block)
    out[i] = x[i] * 2


@tk.op(out_type=lambda x: x)
def quadruple(x):
    return double(double(x))


def _function(x, out):
    out[...] = x[...] + 1


renamed = like_first(_function)


class Holder:
    @staticmethod
    @like_first
    def inside(x, out):
        out[...] = x[...]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "call", [double, quadruple, Holder.inside, softmax_forward, matmul, flash_attention_forward], ids=repr
)
def test_what_can_be_imported_is_pickled_by_reference(call: Any, protocol: int) -> None:
    text = pickle.dumps(call, protocol)
    assert pickle.loads(text) is call
    assert len(text) < 150


def test_calls_do_not_change_that() -> None:
    np.testing.assert_array_equal(jax.jit(double)(X), double(X, block=2))
    assert pickle.loads(pickle.dumps(double)) is double


def test_a_partial_of_a_kernel_is_pickled() -> None:
    partial = pickle.loads(pickle.dumps(jax.tree_util.Partial(double, jnp.asarray(X), block=2)))
    assert partial.func is double
    np.testing.assert_array_equal(partial(), X * 2)


def test_a_kernel_under_another_name_than_its_functions_is_refused() -> None:
    with pytest.raises(pickle.PicklingError, match=r"kernel _function>: it's not the same object as .*\._function"):
        pickle.dumps(renamed)


def test_a_local_kernel_is_refused_as_a_local_function_is() -> None:
    def function(x: Any, out: Any) -> None:
        out[...] = x[...]

    with pytest.raises((pickle.PicklingError, AttributeError)) as expected:
        pickle.dumps(function)
    message = r"local object '.*<locals>\.function'"
    assert expected.match(message)
    with pytest.raises(type(expected.value), match=message):
        pickle.dumps(like_first(function))


def test_a_copy_is_the_kernel_itself() -> None:
    local = like_first(lambda x, out: None)
    for call in (double, quadruple, local):
        assert copy.copy(call) is call
        assert copy.deepcopy({"a": [call]})["a"][0] is call


def test_a_process_that_is_spawned_gets_kernels() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        np.testing.assert_array_equal(pool.apply(quadruple, (X,)), X * 4)


def _reading(settings: dict[str, Any]) -> list[Any]:
    """Calls that read `settings`, which a user might change."""

    @like_first
    def kernel(x, out):
        i = tk.parallel(x.shape[0], 4)
        table = jnp.asarray(settings["table"])[: x.shape[0]]
        out[i] = x[i] * settings["factor"] + table[0] + settings["table"][1]

    @tk.op(out_type=lambda x: x)
    def op(x):
        return kernel(x) * settings["factor"]

    return [kernel, op, jax.jit(lambda x: x * settings["factor"] + settings["table"][0] + settings["table"][1])]


@pytest.mark.parametrize("size", [5, 5000])  # a constant of the kernel, and an operand
def test_what_a_body_reads_keeps_its_first_value_as_under_jit(size: int) -> None:
    settings = {"factor": 2.0, "table": np.arange(size, dtype=np.float32)}
    calls = _reading(settings)
    before = [call(X) for call in calls]
    settings["factor"] = 3.0
    settings["table"] += 100
    for call, expected in zip(calls, before, strict=True):
        np.testing.assert_array_equal(call(X), expected)
        np.testing.assert_array_equal(jax.jit(lambda x, call=call: call(x))(X), expected)
        np.testing.assert_array_equal(jax.vmap(call)(X[None])[0], expected)
    np.testing.assert_array_equal(tk.interpret(calls[0].trace(X))(X), before[0])
    # Other types are another trace, which sees what is there now.
    np.testing.assert_array_equal(calls[0](X[:3]), X[:3] * 3 + settings["table"][0] + settings["table"][1])


# --- what is no declaration -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("decorator", [tk.kernel, tk.op])
def test_a_decorator_without_arguments(decorator: Any) -> None:
    with refused(ArgumentError, "needs the types of the results", got="without arguments", fix="(out_type=lambda x"):

        @decorator  # <-
        def f(x, out): ...


@pytest.mark.parametrize(("decorator", "out_type"), [(tk.kernel, None), (tk.op, None), (tk.kernel, S)])
def test_a_decorator_without_out_type(decorator: Any, out_type: Any) -> None:
    with refused(ArgumentError, "needs the types of the results", expected="out_type", got="out_type = ", fix="@tk."):
        decorator(out_type=out_type)  # <-


@pytest.mark.parametrize("function", [functools.partial(_function, out=None), len, jax.jit(_function), double])
def test_a_kernel_of_an_object(function: Any) -> None:
    with refused(ArgumentError, "cannot be made a kernel", expected="a function of Python", got="of type", fix="a def"):
        tk.kernel(out_type=lambda x: x)(function)  # <-


def test_a_kernel_that_calls_itself() -> None:
    @like_first
    def f(x, out):
        out[...] = f(x[...])  # <-

    with refused(UnsupportedError, "f calls itself", expected="a loop", got="a call of f in a body", fix="tk.fold"):
        f(X)


def test_kernels_that_call_each_other() -> None:
    @like_first
    def f(x, out):
        out[...] = g(x[...])

    @like_first
    def g(x, out):
        out[...] = f(x[...])  # <-

    with refused(UnsupportedError, "f calls itself", expected="a loop", got="a call of f in a body", fix="tk.fold"):
        f(X)


def test_what_a_kernel_remembers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "_FUNCTIONS", 4)
    monkeypatch.setattr(entry, "_TYPES", 4)

    @tk.kernel(out_type=lambda x: x)
    def times(x, out, *, n: int):
        out[...] = x[...] * n

    for n in range(10):
        np.testing.assert_array_equal(times(jnp.ones(3), n=n), np.full(3, n))
        assert len(times._functions) <= 4 and len(times._by_types) <= 4
