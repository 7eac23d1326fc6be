"""`tilekern.patch()`: what is replaced, where, for whom, and what is restored."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import refused
from tilekern.errors import ArgumentError
from tilekern.nn.patching import _REPLACEMENTS

X = np.random.default_rng(0).standard_normal((1, 6, 2, 4)).astype(np.float32)
ORIGINALS = {name: getattr(module, name) for name, (module, _) in _REPLACEMENTS.items()}


def attend(x: Any) -> Any:
    return jax.nn.dot_product_attention(x, x, x)


def is_ours(function: Any, *args: Any) -> bool:
    return "tilekern_call" in str(jax.make_jaxpr(function)(*args))


@pytest.fixture(autouse=True)
def everything_is_restored() -> Any:
    yield
    assert all(getattr(_REPLACEMENTS[name][0], name) is original for name, original in ORIGINALS.items())


CALLS: dict[str, Any] = {
    "dot_product_attention": lambda: attend(X),
    "softmax": lambda: jax.nn.softmax(X, axis=(1, 3), where=X > -1),
    "log_softmax": lambda: jax.nn.log_softmax(X),
    "ragged_dot": lambda: jax.lax.ragged_dot(X[0, :, 0], X[0, :, :, None][:3, 0] * jnp.ones((3, 4, 4)), jnp.arange(3)),
    "scaled_matmul": lambda: jax.nn.scaled_matmul(X[0], X[0], X[0, ..., :2], X[0, ..., 2:]),
}


@pytest.mark.parametrize("name", _REPLACEMENTS)
def test_each_function(name: str) -> None:
    call = CALLS[name]
    expected = call()
    assert not is_ours(call)
    for names in ((name,), ()):
        with tk.patch(*names):
            assert is_ours(call)
            np.testing.assert_allclose(call(), expected, rtol=1e-5, atol=1e-5)
    with tk.patch(*(set(_REPLACEMENTS) - {name})):
        assert not is_ours(call)
    assert not is_ours(call)


def test_jitted_functions_are_traced_again() -> None:
    traces: list[bool] = []

    @jax.jit
    def jitted(x: Any) -> Any:
        traces.append(is_ours(attend, x))
        return attend(x)

    for _ in range(2):
        jitted(X)
        with tk.patch():
            jitted(X)
    assert traces == [False, True]
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(attend(x)))))
    plain = gradient(X)
    with tk.patch():
        assert "flash_attention_backward" in gradient.lower(X).as_text(debug_info=True)
        np.testing.assert_allclose(gradient(X), plain, rtol=1e-4, atol=1e-5)


def test_errors_end_a_patch() -> None:
    with pytest.raises(KeyError), tk.patch():
        assert is_ours(attend, X)
        raise KeyError
    assert not is_ours(attend, X)


def test_patches_nest() -> None:
    with tk.patch("softmax"):
        assert not is_ours(attend, X)
        with tk.patch("dot_product_attention", "dot_product_attention"):
            assert is_ours(attend, X) and is_ours(jax.nn.softmax, X)
            with tk.patch("softmax"):
                assert is_ours(jax.nn.softmax, X)
        assert not is_ours(attend, X) and is_ours(jax.nn.softmax, X)


def test_other_threads_call_the_functions_of_jax() -> None:
    seen: dict[str, bool] = {}
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with tk.patch():
            inside.set()
            leave.wait()
            seen["patched thread"] = is_ours(attend, X)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    seen["this thread"] = is_ours(attend, X)
    with tk.patch():
        leave.set()
        thread.join()
        seen["after the other patch"] = is_ours(attend, X)
    assert seen == {"patched thread": True, "this thread": False, "after the other patch": True}


def test_what_ours_refuses_goes_to_jax() -> None:
    eighth = X.astype(jnp.float8_e5m2)
    expected = jax.nn.softmax(eighth)
    with tk.patch():
        assert not is_ours(jax.nn.softmax, eighth)
        np.testing.assert_array_equal(np.float32(jax.nn.softmax(eighth)), np.float32(expected))
    with tk.patch(strict=True), pytest.raises(ArgumentError, match="softmax"):
        jax.nn.softmax(eighth)


def test_bodies_of_kernels_are_not_patched() -> None:
    @tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
    def weights(x: tk.Ref, out: tk.Ref) -> None:
        out[...] = jax.nn.softmax(x[...])

    with tk.patch():
        np.testing.assert_allclose(weights(X[0, :, 0]), jax.nn.softmax(X[0, :, 0]), rtol=1e-6)


def test_replacements_of_others_stay() -> None:
    """A function that another library puts in the place of ours stays, and ours calls JAX's when it returns."""
    with tk.patch("softmax"):
        ours = jax.nn.softmax
        jax.nn.softmax = attend
    assert jax.nn.softmax is attend
    jax.nn.softmax = ours
    assert not is_ours(jax.nn.softmax, X)
    with tk.patch("softmax"):
        assert is_ours(jax.nn.softmax, X)
    jax.nn.softmax = ORIGINALS["softmax"]


def test_other_names() -> None:
    with refused(ArgumentError, "patch replaces no function", expected="softmax", got="'gelu'", fix="leave"):
        tk.patch("gelu").__enter__()  # <-
    with pytest.raises(AttributeError, match="no attribute 'patches'"):
        tk.patches  # noqa: B018 -- the attribute is asked for


def test_names_in_a_list() -> None:
    with refused(ArgumentError, "patch replaces no function", expected="softmax", got="list", fix="one by one"):
        tk.patch(["softmax"]).__enter__()  # type: ignore[arg-type]  # <-
