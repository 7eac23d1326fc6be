"""Libraries that replace functions of JAX while a model is traced: kernels, ops and derivatives mean what they did."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import like_first
from tilekern.kernels.flash_attention import flash_attention
from tilekern.kernels.matmul import matmul

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)


class Interceptor:
    """Replaces functions by those that round their results, in the threads in which it is active.

    Attributes:
      calls: the names of functions that were called in the place of JAX's.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._active = threading.local()

    def replacement(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            if not getattr(self._active, "on", False):
                return own(*args, **keywords)
            self._active.on = False  # a replacement calls the own function, as of the libraries
            try:
                self.calls.append(name)
                return jnp.round(own(*args, **keywords)).astype(jnp.bfloat16)
            finally:
                self._active.on = True

        return call

    @contextmanager
    def active(self) -> Generator[None]:
        self._active.on = True
        try:
            yield
        finally:
            self._active.on = False


@contextmanager
def attributes(interceptor: Interceptor) -> Generator[None]:
    """Replace functions as attributes of their modules."""
    places = [(jax.lax, "dot_general"), (jnp, "einsum"), (jnp, "tanh"), (jnp, "dot"), (jnp, "add")]
    places += [(sys.modules["jax._src.lax.lax"], "dot_general"), (jnp, "matmul")]
    own = [getattr(module, name) for module, name in places]
    try:
        for (module, name), function in zip(places, own, strict=True):
            setattr(module, name, interceptor.replacement(name, function))
        with interceptor.active():
            yield
    finally:
        for (module, name), function in zip(places, own, strict=True):
            setattr(module, name, function)


@contextmanager
def codes(interceptor: Interceptor) -> Generator[None]:
    """Replace the code of functions, as https://github.com/google/qwix does, so that all their names are replaced."""
    functions: list[Any] = [jax.lax.dot_general, jax.lax.tanh, jnp.einsum, type(jnp.add).__call__]
    own = [function.__code__ for function in functions]
    try:
        for function in functions:
            copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
            copy.__kwdefaults__ = function.__kwdefaults__
            REPLACED[function.__name__] = interceptor.replacement(function.__name__, copy)
            function.__code__ = code_of(function.__name__)
        with interceptor.active():
            yield
    finally:
        for function, code in zip(functions, own, strict=True):
            function.__code__ = code


REPLACED: dict[str, Callable[..., Any]] = {}


def code_of(name: str) -> Any:
    def call(*args: Any, **keywords: Any) -> Any:
        import sys

        from tests.test_interception import REPLACED

        return REPLACED[sys._getframe().f_code.co_name](*args, **keywords)

    return call.__code__.replace(co_name=name)


WAYS = {"attributes": attributes, "codes": codes}


@pytest.fixture(params=WAYS)
def intercepting(request: pytest.FixtureRequest) -> Callable[[Interceptor], Any]:
    return WAYS[request.param]


# --- what is traced -------------------------------------------------------------------------------------------------


def products() -> tk.Kernel:
    """A kernel with all products that there are, made anew, so that nobody has traced it."""

    @like_first
    def kernel(x, out):
        i = tk.parallel(x.shape[0], 4)
        a, b = x[i], x[:]
        by_language = tk.dot(tk.dot(a, b), b, tk.zeros((i, 8)))
        out[i] = by_language + a @ b + jnp.dot(a, b) + jnp.einsum("ij,jk->ik", jnp.tanh(a), b) + jnp.add(a, 1.0)

    return kernel


def op() -> tk.CustomOp:
    @tk.op(out_type=lambda x: x)
    def twice(x):
        return jnp.einsum("ij,jk->ik", jnp.tanh(x), matmul(x, x)) + x @ x

    return twice


def attention(x: jax.Array) -> jax.Array:
    return flash_attention(*[x.reshape(1, 8, 1, 8)] * 3, causal=True).reshape(8, 8)


def with_rule() -> Callable[..., Any]:
    @like_first
    def sine(x, out):
        out[...] = jnp.sin(x[...])

    @sine.defjvp
    def _(primals, tangents):
        return sine(*primals), jnp.einsum("ij,jk->ik", primals[0], tangents[0])

    return sine


MODELS: dict[str, Callable[[], Callable[..., Any]]] = {
    "kernel": products,
    "op": op,
    "rule": with_rule,
    "library": lambda: attention,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("jitted", [False, True])
def test_kernels_mean_what_they_did(name: str, jitted: bool, intercepting: Any) -> None:
    expected, found = MODELS[name](), MODELS[name]()

    def derivatives(function: Any) -> Any:
        """The result, a tangent, and a gradient by forward and reverse mode; of rules, the tangent only."""

        def run(x: jax.Array) -> Any:
            pair = jax.jvp(function, (x,), (x,))
            return pair if name == "rule" else (pair, jax.vmap(jax.grad(lambda x: (function(x) ** 2).sum()))(x[None]))

        return (jax.jit(run) if jitted else run)(X)

    jax.clear_caches()
    interceptor = Interceptor()
    with intercepting(interceptor):
        inside = derivatives(found)
        assert not interceptor.calls
        jax.jit(lambda x: jax.lax.dot_general(x, x, (((1,), (0,)), ((), ()))))(X)
        assert interceptor.calls == ["dot_general"]  # JAX code beside kernels is intercepted
    jax.tree.map(np.testing.assert_array_equal, inside, derivatives(expected))
    jax.tree.map(np.testing.assert_array_equal, derivatives(found), inside)


def test_replaced_code_is_seen_beside_changed_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defaults that changed without code, also to arrays, whose comparison is no truth value."""
    expected, interceptor = products()(X), Interceptor()
    defaults = jnp.linspace.__defaults__
    monkeypatch.setattr(jnp.linspace, "__defaults__", (np.ones(2), *defaults[1:]))
    np.testing.assert_array_equal(products()(X), expected)
    monkeypatch.setattr(jnp.linspace, "__defaults__", (np.zeros(2), *defaults[1:]))
    with codes(interceptor):
        np.testing.assert_array_equal(products()(X), expected)
    assert not interceptor.calls


def test_what_jax_traced_outside_of_a_kernel_is_traced_again() -> None:
    jax.clear_caches()
    kernel, interceptor = products(), Interceptor()
    with attributes(interceptor):
        jax.jit(lambda a, b: a @ b)(X[:4], X)  # the types of the kernel's tiles
        assert interceptor.calls
        inside = kernel(X)
    np.testing.assert_array_equal(inside, products()(X))


def test_a_module_without_one_of_its_functions_has_replacements(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, interceptor = products()(X), Interceptor()
    monkeypatch.delattr(jnp, "sinc")
    with attributes(interceptor):
        np.testing.assert_array_equal(products()(X), expected)
        assert not interceptor.calls and not hasattr(jnp, "sinc")


def test_other_threads_keep_their_replacements() -> None:
    interceptor, inside, outside = Interceptor(), threading.Event(), threading.Event()
    types: list[Any] = []

    def model() -> None:
        with interceptor.active():
            inside.wait(60)
            types.extend([jax.lax.dot_general(X, X, (((1,), (0,)), ((), ()))).dtype, jnp.add(X, X).dtype])
        outside.set()

    @like_first
    def slow(x, out):
        inside.set()
        assert outside.wait(60)
        out[...] = tk.dot(x[...], x[...]) + jnp.add(x[...], 1.0)

    with attributes(interceptor):
        thread = threading.Thread(target=model)
        thread.start()
        found = slow(X)
        thread.join()
        replaced = jnp.add
    np.testing.assert_allclose(found, X @ X + X + 1, rtol=1e-6, atol=1e-6)
    assert types == [jnp.bfloat16] * 2 and interceptor.calls == ["dot_general", "add"]
    assert isinstance(replaced, FunctionType) and jnp.add is not replaced
