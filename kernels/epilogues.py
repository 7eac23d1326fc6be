"""Functions of users that kernels of products apply to their sums: checks, and derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.authoring import describe, hide_frames, make_jaxpr
from tilekern.errors import ArgumentError

hide_frames(__file__)

Epilogue = Callable[..., Any]


def check_epilogue(function: str, epilogue: Any, dtype: Any, numbers: int) -> None:
    """Raise an `ArgumentError` unless the epilogue of a `function` gives one float for some `numbers`."""
    number = jax.ShapeDtypeStruct((), tk.accumulator(dtype))
    result = jax.eval_shape(epilogue, *[number] * numbers) if callable(epilogue) else epilogue
    if isinstance(result, jax.ShapeDtypeStruct) and result.shape == () and jnp.issubdtype(result.dtype, jnp.floating):
        return
    raise ArgumentError(
        f"the epilogue of {function} does not return a number",
        expected="a function of the products and each operand that returns a float without dims",
        got=f"epilogue = {epilogue}" if result is epilogue else f"epilogue(…) = {describe(result)}",
        fix="give operands of more than one number as arguments of the call",
    )


def mapped(epilogue: Epilogue, *matrices: jax.Array) -> jax.Array:
    """The epilogue at each element of matrices of one shape: a matrix of that shape."""
    return jax.vmap(jax.vmap(epilogue))(*matrices)


def applied(epilogue: Epilogue, like: Any, *matrices: jax.Array) -> jax.Array:
    """The epilogue at each element of matrices that broadcast to `like`, in the shape and dtype of `like`."""
    wide = tk.accumulator(like.dtype)
    return mapped(epilogue, *(jnp.broadcast_to(x.astype(wide), like.shape) for x in matrices)).astype(like.dtype)


def reads_first(function: Callable[..., Any], *arguments: Any) -> bool:
    """True if the result of a function depends on its first argument, a pytree of arrays."""
    jaxpr = make_jaxpr(function, *arguments).jaxpr
    read = {v for v in jaxpr.outvars if not hasattr(v, "val")}
    for eqn in reversed(jaxpr.eqns):
        if read.intersection(eqn.outvars):
            read.update(v for v in eqn.invars if not hasattr(v, "val"))
    return not read.isdisjoint(jaxpr.invars[: len(jax.tree.leaves(arguments[0]))])
