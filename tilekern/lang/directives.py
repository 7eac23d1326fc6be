"""What steers a kernel besides loops: `when`, `hoist`, `debug_print`, `device_assert`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

from tilekern import _jax, source
from tilekern.errors import ArgumentError
from tilekern.lang import state
from tilekern.lang.primitives import HOIST, assert_p, print_p
from tilekern.lang.tiles import describe


def when(condition: Any) -> Callable[[Callable[[], None]], None]:
    """Run the decorated function, for its stores, if `condition`, a bool scalar, holds.

    @tk.when(i.index == 0)
    def _():
        out[i] = ...
    """
    state.current("tk.when")
    predicate = _bool(condition, "the condition of tk.when")
    if predicate.shape != ():
        raise ArgumentError(
            "the condition of tk.when must be a scalar",
            expected="a bool scalar",
            got=f"condition = {describe(condition)}",
            fix="reduce it with .any() or .all(), or store with mask=",
        )

    def run(body: Callable[[], None]) -> None:
        # Fresh functions: JAX caches traced branches by identity.
        def yes() -> None:
            body()

        def no() -> None:
            return None

        jax.lax.cond(predicate, yes, no)

    return run


def hoist(function: Callable[[], Any]) -> Any:
    """The value of `function()`, a pytree of tiles that depends on grid indices and inputs only.

    A backend may compute it for the whole grid beforehand, as a table: the bounds of loops that depend on data, say.
    The function may load inputs, and use tiles of `tk.parallel` and what the body computed from these.
    """
    state.current("tk.hoist")

    def hoisted() -> Any:
        return function()

    hoisted.__name__ = HOIST
    return cast(Any, jax.jit(hoisted)())


def debug_print(format: str, *values: Any) -> None:
    """Print tiles, in a format of `str.format`, while the kernel runs.

    Each program prints its own; how often and in which order they do is up to the backend.
    """
    state.current("tk.debug_print")
    try:
        format.format(*values)
    except (IndexError, KeyError, ValueError, TypeError) as error:
        raise ArgumentError(
            "the format of tk.debug_print does not fit its values",
            expected='a format of str.format with one field for each value, e.g. "row sums {}"',
            got=f"{format!r} with {len(values)} values: {error}",
            fix="write {} for each value",
        ) from error
    _jax.bind(print_p, *[jnp.asarray(v) for v in values], format=format, loc=source.of_stack())


def device_assert(condition: Any, message: str = "the assertion does not hold") -> None:
    """Stop the kernel with `message` unless all of `condition`, a bool tile, holds.

    `tk.interpret` raises `tilekern.errors.DeviceAssertion` with the line; compiled programs fail with an error of JAX.
    """
    state.current("tk.device_assert")
    predicate = _bool(condition, "the condition of tk.device_assert")
    _jax.bind(assert_p, predicate, message=message, loc=source.of_stack())


def _bool(value: Any, what: str) -> jax.Array:
    array = jnp.asarray(value)
    if array.dtype == jnp.bool_:
        return array
    raise ArgumentError(f"{what} must be bool", expected="a bool", got=describe(value), fix="compare: x != 0")
