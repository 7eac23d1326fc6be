"""Batches of symbolic size, as `jax.export` has them: `jax.vmap` maps each symbolic dim of a batch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax

from tilekern.authoring import describe, hide_frames
from tilekern.errors import ArgumentError

hide_frames(__file__)

Rank = int | Callable[[Mapping[str, Any]], int]


def maps_symbols[**P, R](
    unless: Callable[[Mapping[str, Any]], str | None] = lambda arguments: None, **ranks: Rank
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of a public function whose arrays have leading dims *B, a batch: these may be symbols.

    A call in which a dim of *B is a symbol becomes `jax.vmap` of the function over this dim: a kernel under `jax.vmap`
    takes a batch of any size. Symbols in other dims are refused.

    Args:
      unless: the name of an argument that depends on an element's place in the batch, which `jax.vmap` hides, or None;
        a function of all arguments.
      **ranks: for each argument with leading dims *B the number of its other dims, or a function of all arguments to
        it. Arguments may be tuples of arrays. An array with fewer dims belongs to all elements, and so does an array of
        size 1 in the place of the symbol.

    Returns:
      the decorator. Results of the function have the leading dims *B, too.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **keywords: P.kwargs) -> R:
            if not any(_symbols(x) for x in jax.tree.leaves((args, keywords))):
                return function(*args, **keywords)
            bound = signature.bind(*args, **keywords)
            bound.apply_defaults()
            arguments = bound.arguments
            sizes = {name: rank(arguments) if callable(rank) else rank for name, rank in ranks.items()}
            _check_inner(function.__name__, arguments, sizes)
            batches = [_batch(x, sizes[name]) for name in sizes for x in jax.tree.leaves(arguments[name])]
            batch = next((b for b in batches if any(map(jax.export.is_symbolic_dim, b))), None)
            if batch is None:
                return function(*args, **keywords)
            if blamed := unless(arguments):
                raise _unknown(
                    function.__name__,
                    expected=f"a batch of known size beside {blamed}, which depends on the place in the batch",
                    got=f"a batch of {', '.join(map(str, batch))}, {blamed} = {describe(arguments[blamed])}",
                    fix=f"leave {blamed} out, take jax.vmap over elements that are alike, or export for each size",
                )
            dim = next(n for n, size in enumerate(batch) if jax.export.is_symbolic_dim(size))
            return _mapped(call, bound, sizes, batch, dim)

        return call

    return decorate


def _check_inner(function: str, arguments: Mapping[str, Any], ranks: Mapping[str, int]) -> None:
    """Refuse symbols in dims that are no batch."""
    for name, rank in ranks.items():
        for x in jax.tree.leaves(arguments[name]):
            shape: tuple[Any, ...] = getattr(x, "shape", ())
            for dim in range(len(_batch(x, rank)), len(shape)):
                if jax.export.is_symbolic_dim(shape[dim]):
                    raise _unknown(
                        function,
                        expected=f"symbols in the leading dims of {', '.join(ranks)} alone, which are a batch; loops "
                        "and blocks depend on all other dims",
                        got=f"{name} = {describe(x)}, whose dim {dim} is the symbol {shape[dim]}",
                        fix="take jax.vmap over this dim, if its elements do not mix; or export for each size",
                    )


def _unknown(function: str, expected: str, got: str, fix: str) -> ArgumentError:
    return ArgumentError(f"{function} needs arrays of known sizes", expected=expected, got=got, fix=fix)


def _symbols(x: Any) -> bool:
    return any(map(jax.export.is_symbolic_dim, getattr(x, "shape", ())))


def _batch(x: Any, rank: int) -> tuple[Any, ...]:
    """The leading dims of an array."""
    shape: tuple[Any, ...] = getattr(x, "shape", ())
    return shape[: max(0, len(shape) - rank)]


def _mapped(call: Any, bound: inspect.BoundArguments, ranks: Mapping[str, int], batch: Any, dim: int) -> Any:
    """The call, mapped over dim number `dim` of the batch."""
    mapped: list[Any] = []

    def prepare(x: Any, rank: int) -> Any:
        """An array to map as its number among all such arrays; an array for all elements without the dim."""
        lead = _batch(x, rank)
        if len(lead) != len(batch) or lead[dim] not in (1, batch[dim]):
            return x
        if lead[dim] == 1:
            return x.squeeze(dim)
        mapped.append(x)
        return _Number(len(mapped) - 1)

    arguments = {**bound.arguments}
    for name, rank in ranks.items():
        arguments[name] = jax.tree.map(functools.partial(prepare, rank=rank), arguments[name])

    def of_element(*arrays: Any) -> Any:
        def fill(x: Any) -> Any:
            return arrays[x] if isinstance(x, _Number) else x

        element = {n: jax.tree.map(fill, arguments[n]) if n in ranks else x for n, x in arguments.items()}
        filled = inspect.BoundArguments(bound.signature, cast(Any, element))
        return call(*filled.args, **filled.kwargs)

    return jax.vmap(of_element, in_axes=dim, out_axes=dim)(*mapped)


class _Number(int):
    """The number of a mapped array."""
