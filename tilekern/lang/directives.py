"""Directives of a kernel besides loops: `when`, `hoist`, `debug_print`, `device_assert`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from tilekern import _jax, source
from tilekern.errors import ArgumentError, CarryError, TraceError, checked
from tilekern.ir.debug import pieces
from tilekern.lang import state
from tilekern.lang.loops import not_callable
from tilekern.lang.primitives import HOIST, assert_p, print_p
from tilekern.lang.refs import Ref
from tilekern.lang.tiles import describe


@checked
def when(condition: Any) -> Callable[[Callable[[], object]], None]:
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

    def run(body: Callable[[], object]) -> None:
        if not callable(body):
            raise not_callable("tk.when", "body", body)

        # Fresh functions: JAX caches traced branches by identity.
        def yes() -> None:
            returned = body()
            if returned is not None:
                raise CarryError(
                    "the body of tk.when returned a value",
                    expected="None",
                    got=f"returned {describe(returned)}",
                    fix="use lax.cond for a value, or jnp.where",
                )

        def no() -> None:
            return None

        jax.lax.cond(predicate, yes, no)

    return run


@checked
def hoist(function: Callable[[], Any]) -> Any:
    """Value of `function()`, a pytree of tiles that depend on grid indices and inputs only.

    A backend may compute it in advance, as a table for the whole grid: loop bounds that depend on data, for example.
    The function may load inputs. It may use tiles of `tk.parallel`, and values that the body computed from them.
    """
    state.current("tk.hoist")

    if not callable(function):
        raise not_callable("tk.hoist", "function", function)

    def hoisted() -> Any:
        value = function()
        for leaf in jax.tree.leaves(value, is_leaf=_is_ref):
            if _is_ref(leaf) or not (_jax.is_array(leaf) or isinstance(leaf, (bool, int, float))):
                raise TraceError(
                    "the function of tk.hoist returned something that is no tile",
                    expected="a pytree of tiles, scalars and numbers",
                    got=f"returned {describe(leaf)}",
                    fix="load refs inside; of a Tile, return its index or start",
                )
        return value

    hoisted.__name__ = HOIST
    return cast(Any, jax.jit(hoisted)())


def _is_ref(value: Any) -> bool:
    return isinstance(value, Ref)


@checked
def debug_print(format: str, *values: Any) -> None:
    """Print tiles, in a format of `str.format`, while the kernel runs.

    Each program prints its own values. The order of programs is up to the backend, and so is the number of prints.
    Under `jax.vmap` inside the kernel, mapped values are printed whole.
    """
    trace, tiles = state.current("tk.debug_print"), [_tile(v) for v in values]
    try:
        list(pieces(format))
        format.format(*(np.zeros(t.shape, t.dtype) for t in tiles))
    except (IndexError, KeyError, ValueError, TypeError) as error:
        raise ArgumentError(
            "the format of tk.debug_print does not fit its values",
            expected='a format of str.format with one field for each value, e.g. "row sums {}"',
            got=f"{format!r} with {len(values)} values: {error}",
            fix="write {} for each value",
        ) from error
    loc = source.of_stack()
    trace.effects[loc] = "print"
    _jax.bind(print_p, *tiles, format=format, loc=loc)


@checked
def device_assert(condition: Any, message: str = "the assertion does not hold") -> None:
    """Stop the kernel with `message` unless all elements of `condition`, a bool tile, are true.

    `tk.interpret` raises `tilekern.errors.DeviceAssertionError` with the line. A compiled program fails with an error
    of JAX.
    """
    trace, loc = state.current("tk.device_assert"), source.of_stack()
    predicate = _bool(condition, "the condition of tk.device_assert")
    if not isinstance(message, str):  # pyright: ignore[reportUnnecessaryIsInstance] -- users pass anything
        raise ArgumentError(
            "the message of tk.device_assert is no text",
            expected="a str that is known when the kernel is traced",
            got=f"message = {describe(message)}",
            fix="print values with tk.debug_print",
        )
    trace.effects[loc] = "check"
    _jax.bind(assert_p, predicate, message=message, loc=loc)


def _tile(value: Any) -> jax.Array:
    if _jax.is_array(value) or isinstance(value, (bool, int, float)):
        return jnp.asarray(value)
    raise ArgumentError(
        "tk.debug_print prints tiles", expected="tiles and numbers", got=describe(value), fix="put it into the format"
    )


def _bool(value: Any, subject: str) -> jax.Array:
    array = jnp.asarray(value) if _jax.is_array(value) or isinstance(value, bool) else None
    if array is not None and array.dtype == jnp.bool_:
        return array
    raise ArgumentError(f"{subject} must be bool", expected="a bool", got=describe(value), fix="compare: x != 0")
