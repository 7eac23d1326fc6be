"""JAX primitives of the language. They exist only while a body is traced: the importer turns them into IR.

A ref is a traced int32 scalar, its *token*, so that JAX's own plumbing carries refs into loops, branches and jitted
helpers, and a body that JAX had cached from an earlier trace shows up as an unknown token, never as a wrong array.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax.numpy as jnp

from tilekern import _jax, source
from tilekern.errors import NotBatchableError, NotDifferentiableError


def _load_type(*operands: Any, shape: tuple[int, ...], dtype: Any, **_: Any) -> _jax.ShapedArray:
    return _jax.ShapedArray(shape, dtype)


def _index_type(*operands: Any, **_: Any) -> _jax.ShapedArray:
    return _jax.ShapedArray((), jnp.int32)


def _nothing(*operands: Any, **_: Any) -> list[_jax.ShapedArray]:
    return []


# A jitted function of this name is a `tk.hoist`.
HOIST = "tilekern_hoist"

# token, *positions[, mask][, fill] -> tile
load_p = _jax.primitive("tile_load", _load_type)
# token, value, *positions[, mask] -> nothing
store_p = _jax.primitive("tile_store", _nothing, multiple_results=True)
# token, value, *positions[, mask] -> nothing
atomic_p = _jax.primitive("tile_atomic", _nothing, multiple_results=True)
# *values -> nothing
print_p = _jax.primitive("tile_print", _nothing, multiple_results=True)
# predicate -> nothing
assert_p = _jax.primitive("tile_assert", _nothing, multiple_results=True)
# -> the program's tile index along grid axis number `axis`
program_index_p = _jax.primitive("program_index", _index_type)
# counter, start, stop -> the tile index of a fold; marks the `while` around it as a fold over `axis`
fold_index_p = _jax.primitive("fold_index", _index_type)


def _no_derivative(primals: Any, tangents: Any, **params: Any) -> NoReturn:
    with source.at(params.get("loc", source.UNKNOWN)):
        raise NotDifferentiableError(
            "a load or store inside a kernel cannot be differentiated through its operands",
            expected="values of loads to be differentiated with respect to (jax.vjp of a function of tiles)",
            got="jax.grad, jax.vjp or jax.jvp around a store, or around a load whose mask or fill depends on the input",
            fix="load first, differentiate a function of the loaded tiles, and store its results afterwards",
        )


def _no_batching(operands: Any, dims: Any, **params: Any) -> NoReturn:
    with source.at(params.get("loc", source.UNKNOWN)):
        raise NotBatchableError(
            "a load or store inside a kernel cannot be mapped with jax.vmap",
            expected="jax.vmap of a function of tiles",
            got="jax.vmap of a function that indexes a ref",
            fix="index the ref with a Tile, a slice or an index vector to load all lanes at once",
        )


def _no_batched_bounds(operands: Any, dims: Any, **params: Any) -> NoReturn:
    with source.at(params["loc"]):
        raise NotBatchableError(
            "the bounds of a fold cannot be mapped with jax.vmap",
            expected="the same start and stop for all lanes",
            got="jax.vmap of a function that folds from or to a mapped position",
            fix="fold over the whole range, and select elements with jnp.where",
        )


def _constant(primitive: _jax.Primitive) -> Any:
    """JVP of a primitive without results: run it on the primals, and drop the tangents."""

    def rule(primals: Any, tangents: Any, **params: Any) -> tuple[list[Any], list[Any]]:
        return _jax.bind(primitive, *primals, **params), []

    return rule


def _all_lanes(primitive: _jax.Primitive) -> Any:
    """Batching rule: run the primitive once, on the whole batch."""

    def rule(operands: Any, dims: Any, **params: Any) -> tuple[list[Any], list[Any]]:
        return _jax.bind(primitive, *operands, **params), []

    return rule


for _p in (load_p, store_p, atomic_p):
    _jax.register_rules(_p, jvp=_no_derivative, batch=_no_batching)
for _p in (print_p, assert_p):
    _jax.register_rules(_p, jvp=_constant(_p), batch=_all_lanes(_p))
_jax.register_rules(fold_index_p, batch=_no_batched_bounds)
