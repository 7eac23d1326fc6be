"""`fold` and `foreach`: loops over the tiles of a serial axis."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from tilekern import _jax, source
from tilekern.errors import ArgumentError, CarryError, checked
from tilekern.ir.core import Axis
from tilekern.lang import state
from tilekern.lang.primitives import fold_index_p
from tilekern.lang.serial import SerialAxis
from tilekern.lang.tiles import Scalar, Tile, describe, make_axis, tile_at


@checked
def fold(axis: SerialAxis | tuple[SerialAxis, ...], body: Callable[[Any, Any], Any], init: Any) -> Any:
    """Run `carry = body(tile, carry)` for the tiles of a serial axis in order, and return the last carry.

    `init` is a pytree of arrays. The body must return the same structure, shapes and dtypes. For an axis without a
    block the body gets the element's index, a traced int32 scalar, instead of a tile. `axis` may be a tuple of axes:
    the body then gets a tuple of tiles, and the last axis runs fastest.
    """
    state.current("tk.fold")
    if isinstance(axis, tuple):
        return _nested(axis, (), body, init)
    if not isinstance(axis, SerialAxis):  # pyright: ignore[reportUnnecessaryIsInstance] -- users pass anything
        raise ArgumentError(
            "tk.fold loops over a serial axis",
            expected="tk.serial(extent, block)",
            got=f"axis = {describe(axis)}",
            fix="wrap the extent: tk.fold(tk.serial(n, block), body, init)",
        )
    if not callable(body):
        raise not_callable("tk.fold", "body", body)
    leaves, tree = _jax.flatten(init)
    carries = [_carry(leaf, "init") for leaf in leaves]
    name = _first_parameter(body)
    loop = make_axis(name, axis.extent, axis.block)
    loc, hint = source.of_stack(), _hint(body, leaves)
    bounds, edges = tuple(jnp.asarray(b, jnp.int32) for b in axis.bounds()), axis.edges()

    # A fresh function for each fold: JAX caches traced loop bodies by identity. The importer recognises the `while` as
    # a fold by its fold_index_p, which holds the real bounds; the condition of the `while` only has to be traceable.
    def step(values: tuple[Any, ...]) -> tuple[Any, ...]:
        counter, *carry = values
        index = _jax.bind(fold_index_p, counter, *bounds, axis=loop, reverse=axis.reverse, loc=loc, hint=hint)
        scope = state.Scope(f"the fold over {name}")
        try:
            tile = index if axis.block is None else _tile(loop, index, scope, edges)
            result = body(tile, jax.tree.unflatten(tree, carry))
        finally:
            scope.open = False
        with source.at(loc):
            return (counter + 1, *_check_carries(result, tree, carries))

    values = jax.lax.while_loop(lambda values: values[0] < bounds[1], step, (jnp.int32(0), *carries))
    return jax.tree.unflatten(tree, values[1:])


def _tile(axis: Axis, index: jax.Array, scope: state.Scope, edges: tuple[Scalar | None, Scalar | None]) -> Tile:
    """Make a tile of a loop. Its live lanes lie between the edges of the loop's range."""
    low, high = (None if edge is None else edge - index * axis.block for edge in edges)
    return replace(tile_at(axis, index, scope), live=(low, high))


def _nested(axes: tuple[SerialAxis, ...], tiles: tuple[Any, ...], body: Callable[[Any, Any], Any], init: Any) -> Any:
    """Fold over several axes: a fold over the first axis that contains a fold over all later axes."""
    if not axes:
        return body(tiles, init)
    return fold(axes[0], lambda tile, carry: _nested(axes[1:], (*tiles, tile), body, carry), init)


@checked
def foreach(axis: SerialAxis | tuple[SerialAxis, ...], body: Callable[[Any], None]) -> None:
    """Run `body(tile)` for its stores, for the tiles of a serial axis in order. A tuple of axes works as in `fold`."""
    if not callable(body):
        raise not_callable("tk.foreach", "body", body)

    def step(tile: Any, carry: tuple[()]) -> tuple[()]:
        returned = body(tile)
        if returned is not None:
            raise CarryError(
                "the body of tk.foreach returned a value",
                expected="None",
                got=f"returned {describe(returned)}",
                fix="use tk.fold to carry a value from tile to tile",
            )
        return carry

    step.__signature__ = inspect.Signature(
        [inspect.Parameter(_first_parameter(body), inspect.Parameter.POSITIONAL_ONLY)]
    )
    fold(axis, step, ())


def not_callable(name: str, role: str, value: Any) -> ArgumentError:
    """Make the error for a `value` that is no function, in the place of a function."""
    return ArgumentError(
        f"{name} takes a function",
        expected=f"{role}, a function that {name} calls",
        got=f"{role} = {describe(value)}",
        fix=f"pass a def or a lambda, as {role}, without calling it",
    )


def _parameters(body: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(body).parameters)
    except (TypeError, ValueError):
        return []


def _first_parameter(body: Callable[..., Any]) -> str:
    return (_parameters(body) or ["t"])[0]


def _hint(body: Callable[..., Any], leaves: list[Any]) -> str:
    """Name for a single carry in errors: the name of the body's second parameter."""
    names = _parameters(body)
    return names[1] if len(leaves) == 1 and len(names) > 1 else ""


def _carry(leaf: Any, origin: str) -> jax.Array:
    if _jax.is_array(leaf) or isinstance(leaf, (bool, int, float)):
        return _jax.as_strong(leaf)
    raise CarryError(
        "a carry of a fold is no array",
        expected="a pytree of tiles, scalars and numbers",
        got=f"{origin} = {describe(leaf)}",
        fix="let the body close over anything else; of a Tile, carry its index",
    )


def _check_carries(result: Any, tree: Any, carries: list[jax.Array]) -> list[jax.Array]:
    leaves, structure = _jax.flatten(result)
    if structure != tree:
        raise CarryError(
            "the body of a fold returned another structure than init",
            expected=f"init's structure, {tree}",
            got=f"{structure}",
            fix="return the carries in the shape of init (a fold body returns its carry, always)",
        )
    values = [_carry(leaf, "returned") for leaf in leaves]
    paths = [jax.tree_util.keystr(path) for path, _ in _jax.flatten_with_path(result)[0]]
    for path, value, carry in zip(paths, values, carries, strict=True):
        if (value.shape, value.dtype) != (carry.shape, carry.dtype):
            raise CarryError(
                f"the body of a fold changed the type of carry{path}",
                expected=f"carry{path} = {describe(carry)}, as in init",
                got=f"carry{path} = {describe(value)}",
                fix="give init the dtype and shape that the body computes, or cast in the body with .astype",
            )
    return values
