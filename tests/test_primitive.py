"""Kernels as primitives of JAX, in every kind of program and under every transformation."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tilekern as tk
from tests.lang.checks import like_first, numbers, refused
from tilekern.errors import NotDifferentiableError

X = numbers(10)


@like_first
def step(x, out, *, factor: float = 2.0, block: tk.Block = 4):
    """A fold, so that the lowered program has a loop to count."""
    i = tk.parallel(x.shape[0], block)
    out[i] = tk.fold(tk.serial(3), lambda n, acc: acc * factor - n, x[i])


def oracle(x: Any, factor: float = 2.0) -> Any:
    for n in range(3):
        x = x * factor - n
    return x


# --- programs -------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_eager_and_jitted_calls_agree() -> None:
    np.testing.assert_array_equal(step(X), oracle(X))
    np.testing.assert_array_equal(jax.jit(step)(X), oracle(X))
    np.testing.assert_array_equal(jax.jit(lambda x: step(x + 1, factor=3.0))(X), oracle(X + 1, 3.0))
    assert isinstance(step(X), jax.Array)


def test_the_bare_primitive_runs_eagerly() -> None:
    """`jax.core.eval_jaxpr` and custom interpreters bind the primitive like this."""
    closed = jax.make_jaxpr(step)(X)
    (equation,) = closed.jaxpr.eqns
    (inner,) = equation.params["jaxpr"].eqns
    assert inner.primitive.name == "tilekern_call"
    np.testing.assert_array_equal(inner.primitive.bind(jnp.asarray(X), **inner.params)[0], oracle(X))


def test_inside_loops_and_branches() -> None:
    def carried(x: Any) -> Any:
        return lax.scan(lambda c, _: (step(c), c[0]), x, None, length=3)

    last, firsts = jax.jit(carried)(X)
    np.testing.assert_array_equal(last, oracle(oracle(oracle(X))))
    np.testing.assert_array_equal(firsts, [X[0], oracle(X)[0], oracle(oracle(X))[0]])
    np.testing.assert_array_equal(lax.fori_loop(0, 2, lambda n, c: step(c), X), oracle(oracle(X)))
    np.testing.assert_array_equal(lax.while_loop(lambda c: c[0] < 3, step, X), oracle(X) if X[0] < 3 else X)
    np.testing.assert_array_equal(lax.cond(X[0] > 0, step, lambda x: x, jnp.asarray(X)), oracle(X))
    np.testing.assert_array_equal(lax.map(step, np.stack([X, -X])), [oracle(X), oracle(-X)])


def test_under_checkpoint_and_disable_jit() -> None:
    np.testing.assert_array_equal(jax.checkpoint(step)(X), oracle(X))
    np.testing.assert_array_equal(jax.jit(jax.checkpoint(lambda x: step(step(x))))(X), oracle(oracle(X)))
    with jax.disable_jit():
        np.testing.assert_array_equal(step(X, factor=5.0), oracle(X, 5.0))


def test_the_types_of_results_need_no_run() -> None:
    aval = jax.eval_shape(step, jax.ShapeDtypeStruct((7,), jnp.bfloat16))
    assert (aval.shape, aval.dtype) == ((7,), jnp.bfloat16)


# JAX promises nothing for years about the call that runs Triton's code, and asks for consent to it.
CONSENT = [jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")]


@pytest.mark.parametrize("platforms", [("cpu",), ("cpu", "cuda"), ("cpu", "cuda", "tpu")])
def test_export_and_back(platforms: tuple[str, ...]) -> None:
    if "cuda" in platforms:
        pytest.importorskip("triton", reason="needs triton")
    function = jax.jit(lambda x: step(x) + 1)
    exported = jax.export.export(function, platforms=platforms, disabled_checks=CONSENT)(X)
    np.testing.assert_array_equal(exported.call(X), oracle(X) + 1)
    assert ("triton_kernel_call_ffi" in exported.mlir_module()) == ("cuda" in platforms)
    again = jax.export.deserialize(exported.serialize())
    assert again.platforms == platforms
    np.testing.assert_array_equal(jax.jit(again.call)(X), oracle(X) + 1)


def test_export_for_gpus_asks_for_consent() -> None:
    pytest.importorskip("triton", reason="needs triton")
    with pytest.raises(ValueError, match="triton_kernel_call_ffi"):
        jax.export.export(jax.jit(step), platforms=("cuda",))(X)


def test_export_with_more_than_one_result() -> None:
    @tk.kernel(out_type=lambda x: {"a": x, "b": (x, x)})
    def several(x, out):
        out["a"][...], out["b"][0][...], out["b"][1][...] = x[...], x[...] * 2, x[...] * 3

    exported = jax.export.export(jax.jit(several))(X)
    assert jax.tree.map(lambda x: float(x[1]), exported.call(X)) == {"a": 2.0, "b": (4.0, 6.0)}


def test_threads_call_at_once() -> None:
    """Several threads call an untraced kernel, with several types."""

    @like_first
    def fresh(x, out, *, block: tk.Block = 4):
        i = tk.parallel(x.shape[0], block)
        out[i] = tk.fold(tk.serial(3), lambda n, acc: acc * 2 - n, x[i])

    def call(n: int) -> bool:
        x = numbers(5 + n % 4) + n
        return np.array_equal(fresh(x), oracle(x)) and np.array_equal(jax.jit(fresh)(x), oracle(x))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(16)))


# --- what a call costs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "code"), [("cpu:xla", "stablehlo.while"), ("cpu:llvm", "@tilekern_llvm(")])
def test_many_calls_share_one_computation(target: str, code: str) -> None:
    """A model with 24 layers has the kernel's loop, or the call of its code, in the program once."""
    if target == "cpu:llvm":
        pytest.importorskip("llvmlite", reason="needs llvmlite")

    def model(x: Any, layers: int) -> Any:
        for _ in range(layers):
            x = step(x, target=target)
        return x

    loops = [jax.jit(model, static_argnums=1).lower(X, layers).as_text().count(code) for layers in (1, 24)]
    assert loops[0] > 0
    assert loops[1] == loops[0]


def test_repeated_calls_trace_once() -> None:
    traces: list[int] = []

    @like_first
    def counted(x, out, *, factor: float = 1.0):
        traces.append(len(traces))
        out[...] = x[...] * factor

    jitted = jax.jit(lambda x: counted(x))
    for n in range(5):
        counted(X + n)
        counted(jnp.asarray(X) + n)
        jitted(X + n)
        jax.jit(counted)(X + n)
    assert len(traces) == 1
    assert jitted._cache_size() == 1
    counted(X[:3])
    counted(X, factor=2.0)
    counted(X, factor=2.0)
    assert len(traces) == 3


@pytest.mark.parametrize("first", [True, False])
def test_64_bit_types_are_another_trace(first: bool) -> None:
    dtypes: list[Any] = []

    @like_first
    def f(x, out):
        dtypes.append(jnp.arange(3).dtype)
        out[...] = x[...] * jnp.arange(10)

    for x64 in (first, not first, first):
        with jax.enable_x64(x64):
            np.testing.assert_array_equal(f(X), X * np.arange(10))
    expected = [np.dtype("i8" if x64 else "i4") for x64 in (first, not first)]
    assert dtypes == expected


def test_weak_types_are_no_other_trace() -> None:
    traces: list[int] = []

    @like_first
    def f(x, out):
        traces.append(1)
        out[...] = x[...] + 1

    for x in (1.5, jnp.float32(1.5), np.float32(1.5), jnp.asarray(1.5), jnp.asarray(1.5) * 1):
        result = f(x)
        assert result == 2.5
        assert not result.weak_type
    assert len(traces) == 1


# --- transformations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_axes", [0, 1, -1])
def test_vmap_is_a_call_for_each(in_axes: int) -> None:
    x = numbers(3, 10)
    batched = jax.vmap(step, in_axes=in_axes)(x if in_axes == 0 else x.T)
    np.testing.assert_array_equal(batched, oracle(x))
    np.testing.assert_array_equal(jax.jit(jax.vmap(jax.vmap(step)))(x[None]), oracle(x)[None])


DERIVATIVES: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "grad": lambda f: jax.grad(lambda x: f(x).sum())(X),
    "jvp": lambda f: jax.jvp(f, (X,), (X,)),
    "vjp": lambda f: jax.vjp(f, X)[1](X),
    "linearize": lambda f: jax.linearize(f, X)[1](X),
    "jacobian": lambda f: jax.jacobian(f)(X),
    "jitted": lambda f: jax.jit(jax.grad(lambda x: f(x).sum()))(X),
    "value": lambda f: jax.value_and_grad(lambda x: (x * f(x)).sum())(X),
}


@pytest.mark.parametrize("how", DERIVATIVES)
def test_derivatives(how: str) -> None:
    jax.tree.map(np.testing.assert_array_equal, DERIVATIVES[how](step), DERIVATIVES[how](oracle))


@like_first
def grown(x, out):
    """A loop whose number of steps is known when it runs."""
    i = tk.parallel(x.shape[0])
    out[i] = lax.while_loop(lambda y: (y < 100).all(), lambda y: y * 2, jnp.abs(x[i]) + 1)


def test_a_derivative_is_refused_at_its_line() -> None:
    @like_first
    def grown(x, out):
        """A loop whose number of steps is known when it runs."""
        i = tk.parallel(x.shape[0])
        out[i] = lax.while_loop(lambda y: (y < 100).all(), lambda y: y * 2, jnp.abs(x[i]) + 1)  # <-

    with refused(
        NotDifferentiableError,
        "a while loop of grown",
        expected="loops of a known largest number of steps",
        got="lax.while_loop",
        fix="tk.fold",
    ):
        jax.grad(lambda x: grown(x).sum())(X)


def test_the_ways_out_of_derivatives() -> None:
    """The remedies that the error proposes work."""

    @jax.custom_vjp
    def with_rule(x: Any) -> Any:
        return grown(x)

    with_rule.defvjp(lambda x: (grown(x), None), lambda _, g: (8 * g,))
    np.testing.assert_array_equal(jax.grad(lambda x: with_rule(x).sum())(X), np.full(10, 8))
    stopped = jax.grad(lambda x: (x * grown(lax.stop_gradient(x))).sum())(X)
    np.testing.assert_array_equal(stopped, grown(X))
    forward = jax.jvp(grown, (X,), (X,))[1]
    np.testing.assert_array_equal(forward, X * np.sign(X) * grown(X) / (np.abs(X) + 1))


def test_what_does_not_depend_is_not_differentiated() -> None:
    np.testing.assert_array_equal(jax.grad(lambda x: (x * step(jnp.asarray(X))).sum())(X), oracle(X))
