"""Derivatives of a kernel, from its definition in plain JAX and from kernels for its backward pass.

Reverse mode of first order runs the kernels. Forward mode, and all derivatives of higher order, differentiate the
definition, which XLA fuses. Residuals are the kernel's inputs, and nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import jax

import tilekern as tk
from tilekern.kernels.rows import like_first

Settings = tuple[tuple[str, Any], ...]


def along(function: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """The tangent of function(*primals) along `tangents`, one for each array or None, which is a tangent of zeros."""
    leaves, tree = cast(Any, jax.tree.flatten(list(primals)))
    moved: list[Any] = tree.flatten_up_to(list(tangents))
    which = [number for number, t in enumerate(moved) if t is not None]

    def of_some(*some: jax.Array) -> Any:
        return function(
            *jax.tree.unflatten(tree, [some[which.index(m)] if m in which else x for m, x in enumerate(leaves)])
        )

    return jax.jvp(of_some, [leaves[m] for m in which], [moved[m] for m in which])[1]


def against(function: Callable[..., Any], primals: Sequence[Any], cotangent: Any, needs: Sequence[bool]) -> Any:
    """The cotangent of each array of a function whose flag in `needs` is True; None for each other array."""

    def of_some(*some: jax.Array) -> Any:
        arrays = iter(some)
        return function(*(next(arrays) if n else x for x, n in zip(primals, needs, strict=True)))

    _, pull = cast(Any, jax.vjp(of_some, *(x for x, n in zip(primals, needs, strict=True) if n)))
    cotangents = iter(pull(cotangent))
    return tuple(next(cotangents) if n else None for n in needs)


def cast_like(cotangents: Sequence[Any], arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Cotangents in the dtypes of their arrays; None stays."""
    return tuple(None if c is None else c.astype(x.dtype) for c, x in zip(cotangents, arrays, strict=True))


def derive(
    kernel: Any, definition: Callable[..., Any], backward: Callable[..., Any]
) -> tuple[tk.CustomOp, tk.CustomOp]:
    """State the derivatives of a kernel whose one result is like its first input.

    Args:
      kernel: named `..._forward`; its inputs are arrays or None.
      definition: the same function of the same inputs in plain JAX. It gets the kernel's static arguments that are
        parameters of it.
      backward: `backward(*inputs, cotangent, needs=bools, **statics)` returns a cotangent for each input, or None where
        `needs` is False. It gets the static arguments of the definition.

    Returns:
      (tangent op, backward op). The kernel's module assigns them to the kernel's name, with `_tangent` and `_backward`
      in place of `_forward`.
    """

    def tangent_of(primals: tuple[Any, ...], tangents: tuple[Any, ...], *, settings: Settings) -> Any:
        return along(partial(definition, **dict(settings)), primals, tangents)

    def backward_of(
        primals: tuple[Any, ...], cotangent: jax.Array, *, needs: tuple[bool, ...], settings: Settings
    ) -> Any:
        return backward(*primals, cotangent, needs=needs, **dict(settings))

    name = kernel.__name__.removesuffix("_forward")
    for function, suffix in ((tangent_of, "tangent"), (backward_of, "backward")):
        function.__name__ = function.__qualname__ = f"{name}_{suffix}"
        function.__module__ = kernel.__module__
    tangent = tk.op(out_type=_tangent_type, linear=("tangents",))(tangent_of)
    pullback = tk.op(out_type=_backward_types, linear=("cotangent",))(backward_of)

    named = inspect.signature(definition).parameters

    def kernel_jvp(primals: Any, tangents: Any, **keywords: Any) -> Any:
        settings = tuple(sorted((name, value) for name, value in keywords.items() if name in named))
        return kernel(*primals, **keywords), tangent(primals, tangents, settings=settings)

    def tangent_transpose(cotangent: Any, primals: Any, tangents: Any, *, settings: Settings) -> Any:
        needs = tuple(t is not None for t in tangents)
        return {"tangents": pullback(primals, cotangent, needs=needs, settings=settings)}

    def tangent_jvp(primals: Any, moved: Any, *, settings: Settings) -> Any:
        arrays, tangents = primals
        of_arrays = partial(definition, **dict(settings))
        moved_tangent = along(lambda *arrays: along(of_arrays, arrays, tangents), arrays, moved[0])
        return tangent(arrays, tangents, settings=settings), moved_tangent

    def backward_transpose(cotangents: Any, primals: Any, cotangent: Any, *, settings: Settings) -> Any:
        return {"cotangent": tangent(primals, cotangents, settings=settings)}

    def backward_jvp(primals: Any, moved: Any, *, needs: tuple[bool, ...], settings: Settings) -> Any:
        arrays, cotangent = primals
        of_arrays = partial(definition, **dict(settings))
        moved_cotangents = along(lambda *arrays: against(of_arrays, arrays, cotangent, needs), arrays, moved[0])
        return pullback(arrays, cotangent, needs=needs, settings=settings), moved_cotangents

    kernel.defjvp(kernel_jvp)
    tangent.defjvp(tangent_jvp)
    tangent.deftranspose(tangent_transpose)
    pullback.defjvp(backward_jvp)
    pullback.deftranspose(backward_transpose)
    return tangent, pullback


def _tangent_type(primals: Any, tangents: Any, *, settings: Settings) -> jax.ShapeDtypeStruct:
    return like_first(*primals)


def _backward_types(primals: Any, cotangent: Any, *, needs: tuple[bool, ...], settings: Settings) -> Any:
    return tuple(like_first(x) if n else None for x, n in zip(primals, needs, strict=True))
