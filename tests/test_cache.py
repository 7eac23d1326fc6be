"""`_jax.Cache`, and objects that must be freed with the user's functions, or by `jax.clear_caches`."""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tilekern import _jax
from tilekern.kernels.flash_attention import flash_attention


def test_a_full_cache_starts_anew() -> None:
    cache = _jax.Cache[int, int](2)
    cache[1] = cache[2] = 0
    cache[2] = 5
    assert dict(cache) == {1: 0, 2: 5}
    cache[3] = 0
    assert dict(cache) == {3: 0}


def test_jax_clears_it() -> None:
    cache, other = _jax.Cache[int, int](2), _jax.Cache[int, int](2)
    cache[1] = other[1] = 0
    jax.clear_caches()
    assert not cache and not other


Q = np.ones((1, 16, 2, 8), np.float32)


def table() -> tuple[jax.Array, Any]:
    """An array that is too large for a constant of the IR."""
    made = jnp.ones((64, 256), jnp.float32)
    return made, weakref.ref(made)


def score_mod() -> Any:
    bias, ref = table()
    flash_attention(Q, Q, Q, score_mod=lambda s, b, n, i, j: s + bias[i, j], target="cpu:xla")
    return ref


def gradient() -> Any:
    bias, ref = table()

    def loss(q: Any) -> Any:
        return flash_attention(q, Q, Q, score_mod=lambda s, b, n, i, j: s + bias[i, j], target="cpu:xla").sum()

    jax.jit(jax.grad(loss))(Q)
    return ref


def mask_mod() -> Any:
    known, ref = table()
    flash_attention(Q, Q, Q, mask_mod=lambda b, n, i, j: known[i, j] > 0, target="cpu:xla")
    return ref


@pytest.mark.parametrize("use", [score_mod, gradient, mask_mod])
def test_arrays_that_mods_close_over_are_freed_with_them(use: Callable[[], Any]) -> None:
    refs = [use() for _ in range(2)]
    for _ in range(3):
        gc.collect()
    assert [ref() for ref in refs] == [None, None]


def made(weight: Any, linear: tuple[str, ...] = ()) -> Any:
    @tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), linear=linear)
    def scaled(x: tk.Ref, out: tk.Ref) -> None:
        i = tk.parallel(x.shape[0], 64)
        out[i] = x[i] * weight[:, :8]

    return scaled


X = np.ones((64, 8), np.float32)


def eager(kernel: Any) -> None:
    kernel(X, target="cpu:xla")


def jitted(kernel: Any) -> None:
    jax.jit(lambda x: kernel(x, target="cpu:xla"))(X)


def mapped(kernel: Any) -> None:
    jax.jit(jax.vmap(lambda x: kernel(x, target="cpu:xla")))(X[None])


def lowered(kernel: Any) -> None:
    jax.jit(lambda x: kernel(x, target="cpu:xla")).lower(X)


def staged(kernel: Any) -> None:
    kernel.trace(X).lower("cpu:xla").compile()


@pytest.mark.parametrize("use", [eager, jitted, mapped, lowered, staged])
def test_arrays_that_bodies_close_over_are_freed_with_them(use: Callable[[Any], None]) -> None:
    def run() -> Any:
        weight, ref = table()
        use(made(weight))
        return ref

    refs = [run() for _ in range(2)]
    for _ in range(3):  # cycles through JAX's objects go one after the other
        gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_clearing_caches_frees_kernels_whose_rules_call_them() -> None:
    def run() -> Any:
        weight, ref = table()
        kernel = made(weight)
        kernel.defjvp(lambda primals, tangents: (kernel(*primals), kernel(*tangents)))
        eager(kernel)
        return ref

    refs = [run() for _ in range(2)]
    jax.clear_caches()
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_what_was_traced_outlives_its_kernel() -> None:
    def traced() -> tuple[Any, Any]:
        kernel = made(table()[0] + 2, linear=("x",))
        return jax.make_jaxpr(lambda x: kernel(x, target="cpu:xla"))(X), weakref.ref(kernel)

    jaxpr, living = traced()
    jax.clear_caches()
    gc.collect()
    assert living() is None
    evaluate = partial(_jax.evaluate, jaxpr, jaxpr.consts)
    (out,), (moved,) = jax.jvp(lambda x: evaluate([x]), (X,), (2 * X,))
    assert (out == 3).all() and (moved == 6).all()
