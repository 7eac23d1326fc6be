"""`tilekern.patch()`: programs that call `jax.nn` and `jax.lax` run on our kernels, without a change of their code."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax

from tilekern.authoring import describe, hide_frames
from tilekern.errors import ArgumentError, checked
from tilekern.lang.state import is_tracing_body
from tilekern.nn.attention import dot_product_attention
from tilekern.nn.products import ragged_dot, scaled_matmul
from tilekern.nn.softmaxes import log_softmax, softmax

hide_frames(__file__)

# The functions that are replaced: module of JAX, and ours.
_REPLACEMENTS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "dot_product_attention": (jax.nn, dot_product_attention),
    "log_softmax": (jax.nn, log_softmax),
    "ragged_dot": (jax.lax, ragged_dot),
    "scaled_matmul": (jax.nn, scaled_matmul),
    "softmax": (jax.nn, softmax),
}

# Pairs (name, strict) of what is replaced in this thread. JAX keeps traces under different values of the context apart,
# so that a function jitted outside of a patch is traced again inside, and the other way around.
_active: Any = jax.make_user_context(())

# For all threads: how many patches hold a name, and the function in its place.
_lock = threading.Lock()
_holders: Counter[str] = Counter()
_dispatchers: dict[str, Callable[..., Any]] = {}


@checked
def patch(*names: str, strict: bool = False) -> AbstractContextManager[None]:
    """Let functions of `jax.nn` and `jax.lax` run on our kernels within a `with`, and restore them after it.

    A model whose code calls `jax.nn.dot_product_attention`, as attention of Flax' NNX and of Keras does, runs on flash
    attention unchanged. A call that our function refuses, say of another dtype, goes to JAX's function.

    The patch ends with the `with`, also where an error ends it, and does not reach other threads: they call JAX's
    functions. Patches nest: an inner one adds its names. Functions under `jax.jit` are traced again, because JAX keeps
    traces inside and outside of a patch apart. What has been bound by `from jax.nn import softmax` before is not
    replaced, and neither is what runs in bodies of kernels.

    Args:
      *names: of "dot_product_attention", "log_softmax", "ragged_dot", "scaled_matmul" and "softmax"; all if none is
        given.
      strict: raise our error where our function refuses a call.

    Raises:
      tilekern.errors.ArgumentError: no function of such a name is replaced, or `strict` is not a bool.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import tilekern
      >>> def attend(x):
      ...     return jax.nn.dot_product_attention(x, x, x)
      >>> with tilekern.patch("dot_product_attention"):
      ...     "flash_attention" in str(jax.make_jaxpr(attend)(jnp.ones((1, 8, 2, 4))))
      True
      >>> "flash_attention" in str(jax.make_jaxpr(attend)(jnp.ones((1, 8, 2, 4))))
      False
    """
    unknown = [name for name in names if type(name) is not str or name not in _REPLACEMENTS]
    if unknown or type(strict) is not bool:
        raise ArgumentError(
            "patch replaces no function of this name" if unknown else "patch is strict, or it is not",
            expected=f"names of {', '.join(_REPLACEMENTS)}; strict=True or False",
            got=describe(unknown[0]) if unknown else f"strict = {describe(strict)}",
            fix='give names one by one, patch("softmax", "log_softmax"); leave them out to replace all',
        )
    return _patched(names or tuple(_REPLACEMENTS), strict)


@contextmanager
def _patched(names: tuple[str, ...], strict: bool) -> Generator[None]:
    active = dict(_active.value) | dict.fromkeys(names, strict)
    _install(names)
    try:
        with _active(tuple(sorted(active.items()))):
            yield
    finally:
        _remove(names)


def _install(names: tuple[str, ...]) -> None:
    with _lock:
        for name in names:
            _holders[name] += 1
            if _holders[name] == 1:
                module, ours = _REPLACEMENTS[name]
                _dispatchers[name] = _dispatcher(name, getattr(module, name), ours)
                setattr(module, name, _dispatchers[name])


def _remove(names: tuple[str, ...]) -> None:
    with _lock:
        for name in names:
            _holders[name] -= 1
            module, _ = _REPLACEMENTS[name]
            # Another library may have replaced the function since: its replacement stays, and may call ours.
            if not _holders[name] and getattr(module, name) is _dispatchers[name]:
                setattr(module, name, _dispatchers[name].__wrapped__)  # pyright: ignore[reportFunctionMemberAccess] -- of functools.wraps


def _dispatcher(name: str, original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ours where this thread has a patch, and otherwise the original."""

    @functools.wraps(original)
    def call(*args: Any, **keywords: Any) -> Any:
        strict = dict(_active.value).get(name)
        if strict is None or is_tracing_body():
            return original(*args, **keywords)
        with _active(()):  # inside, JAX's functions are JAX's, and traces are those of calls without a patch
            try:
                return ours(*args, **keywords)
            except ArgumentError:
                if strict:
                    raise
            return original(*args, **keywords)

    return call
