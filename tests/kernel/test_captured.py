"""Arrays that a kernel's body closes over: caching, and other arrays with other blocks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import numbers, refused
from tilekern import _jax
from tilekern.errors import TraceError
from tilekern.lower.target import TARGETS

X = numbers(16)


def like(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def test_one_traced_capture_does_not_end_caching() -> None:
    """Known values are traced once again after it, also between calls that close over traced ones."""
    traces: list[str] = []
    factor: Any = None

    @tk.kernel(out_type=like)
    def scaled(x, out):
        traces.append("traced" if isinstance(factor, _jax.Tracer) else "known")
        out[...] = x[...] * factor

    def call(x: Any, s: Any) -> Any:
        nonlocal factor
        factor = s
        return scaled(x, target="cpu:xla")

    for s in (2.0, 3.0):
        np.testing.assert_array_equal(jax.jit(lambda x, s: call(x, s))(X, s), X * s)
    assert traces == ["traced"] * 2
    for _ in range(3):
        np.testing.assert_array_equal(call(X, 4.0), X * 4)
    assert traces == [*["traced"] * 2, "known"]
    for s in (5.0, 6.0):
        np.testing.assert_array_equal(jax.jit(lambda x, s: call(x, s))(X, s), X * s)
        np.testing.assert_array_equal(call(X, 4.0), X * 4)
    assert traces.count("known") == 1
    with jax.disable_jit():
        np.testing.assert_array_equal(call(X[:4], 7.0), X[:4] * 7)


def test_known_values_of_many_calls_under_a_trace_share_one_computation() -> None:
    factor: Any = None

    @tk.kernel(out_type=like)
    def scaled(x, out):
        out[...] = x[...] * factor

    @jax.jit
    def closes_over_a_tracer(x: Any) -> Any:
        nonlocal factor
        factor = x[0]
        return scaled(x, target="cpu:xla")

    closes_over_a_tracer(X)
    factor = 3.0

    def text(calls: int) -> str:
        def run(x: Any) -> Any:
            return [scaled(x + n, target="cpu:xla") for n in range(calls)]

        return jax.jit(run).lower(X).as_text()

    assert text(3).count("func.func") == text(1).count("func.func")


def family_of(function: Any, *args: Any) -> Any:
    """The family of the only call in a function, whose trace has ended."""
    found: list[Any] = []

    def search(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "tilekern_call":
                found.append(eqn.params["callee"])
            elif "jaxpr" in eqn.params:
                search(eqn.params["jaxpr"])

    search(jax.make_jaxpr(function)(*args))
    (family,) = found
    return family


@pytest.mark.parametrize("target", [None, "cuda:sm_90"])
def test_a_body_with_traced_values_has_the_blocks_of_each_platform(target: str | None) -> None:
    """It is traced for all of them while the values live."""

    def run(x: Any) -> Any:
        @tk.kernel(out_type=like)
        def scaled(x, out, *, block: tk.Block = 4):
            i = tk.parallel(x.shape[0], block)
            out[i] = x[i] * factor

        factor = x[0]
        for prefix, size in {"cpu": 8, "cpu:llvm": 2, "cuda": 16, "tpu": 1}.items():
            scaled.schedule(prefix)(lambda x, size=size: {"block": size})
        return scaled(x, target=target)

    family = family_of(run, X)
    names = ("cuda:sm_90",) if target else ("cpu:xla", "cpu:llvm", "cuda:sm_80", "tpu:v5e")
    blocks = [family.func(TARGETS[name]).axes[0].block for name in names]
    assert blocks == ([16] if target else [8, 2, 16, 1])
    if target is None:
        np.testing.assert_array_equal(jax.jit(run)(X), X * X[0])


def test_a_schedule_that_fails_for_another_platform() -> None:
    def run(x: Any) -> Any:
        @tk.kernel(out_type=like)
        def scaled(x, out, *, block: tk.Block = 4):
            i = tk.parallel(x.shape[0], block)
            out[i] = x[i] * factor

        factor = x[0]
        scaled.schedule("tpu")(lambda x: {"block": x.shape[7]})
        return scaled(x)

    np.testing.assert_array_equal(jax.jit(run)(X), X * X[0])


def test_a_traced_value_with_some_blocks_only() -> None:
    def run(s: Any) -> Any:
        @tk.kernel(out_type=like)
        def scaled(x, out, *, block: tk.Block = 4):  # <-
            i = tk.parallel(x.shape[0], block)
            out[i] = x[i] * s if block == 8 else x[i]

        scaled.schedule("cuda")(lambda x: {"block": 8})
        return scaled.trace(X).lower("cuda:sm_90").text

    summary = "with some blocks only scaled closes over a traced value"
    with refused(TraceError, summary, expected="with all blocks", got="float32[] with block = 8", fix="an argument"):
        jax.eval_shape(run, np.float32(1))


LARGE = {4: np.arange(2000, dtype=np.float32), 8: np.arange(4000, dtype=np.float32) * 2}


@pytest.mark.parametrize("known", [True, False], ids=["jax", "numpy"])
@pytest.mark.parametrize("default", [4, 16])
def test_a_body_that_closes_over_other_arrays_with_other_blocks(default: int, known: bool) -> None:
    """With the blocks of "cpu:llvm" it reads a table that is no operand of the call."""
    tables = {block: jnp.asarray(table) if known else table for block, table in LARGE.items()}

    @tk.kernel(out_type=like)
    def picked(x, out, *, block: tk.Block = default):
        i = tk.parallel(x.shape[0], block)
        table = tables.get(block)
        out[i] = x[i] if table is None else x[i] * jnp.asarray(table)[5]

    picked.schedule("cpu:llvm")(lambda x: {"block": 8})
    factor = {4: 5, 16: 1}[default]
    np.testing.assert_array_equal(picked(X, target="cpu:xla"), X * factor)
    np.testing.assert_array_equal(picked.trace(X).interpret(X), X * factor)
    pytest.importorskip("llvmlite")
    np.testing.assert_array_equal(picked(X), X * 10)
    np.testing.assert_array_equal(jax.vmap(picked)(X.reshape(4, 4)), X.reshape(4, 4) * 10)
    lowered = picked.trace(X).lower("cpu:llvm")
    np.testing.assert_array_equal(lowered.interpret(X), X * 10)
    np.testing.assert_array_equal(lowered.compile()(X), X * 10)
