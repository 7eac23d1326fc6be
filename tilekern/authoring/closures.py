"""Functions of the user that close over arrays, made to carry them as arguments.

A kernel can read a traced array that its body closes over. Its derivatives are traced later, when that array has ended.
So the array becomes an argument, as if the user had written a `jax.tree_util.Partial`. Large arrays do, too: caches, of
JAX and of this package, keep functions, but not their arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any, cast

import jax

from tilekern import _jax
from tilekern.lang.importer import CONSTANT_BYTES

# Rebuilds a value from (arrays in the place of the carried arrays, functions that are already rebuilt, by id).
_Maker = Callable[[tuple[Any, ...], dict[int, Any]], Any]


def carry_arrays(function: Callable[..., Any]) -> jax.tree_util.Partial:
    """A `Partial` of the function, which carries the traced and the large arrays that the function closes over.

    The search covers cells and default values of Python functions, functions over which they close, and pytrees in
    both. Arrays that a function reads in another way, such as attributes of an object, stay in place.

    Example:
      >>> import jax.numpy as jnp
      >>> def diagonal(table):
      ...     return lambda i: table[i, i]
      >>> (table,) = jax.tree.leaves(carry_arrays(diagonal(jnp.zeros((64, 64)))))
      >>> table.shape
      (64, 64)
    """
    search = _Search()
    make = search.maker(function)
    if make is None or not search.arrays:
        return jax.tree_util.Partial(function)

    def call(arrays: tuple[Any, ...], *args: Any) -> Any:
        return make(arrays, {})(*args)

    return jax.tree_util.Partial(call, tuple(search.arrays.values()))


class _Search:
    """A search for traced and large arrays.

    Attributes:
      arrays: the traced and large arrays, by id.
    """

    def __init__(self) -> None:
        self.arrays: dict[int, Any] = {}
        self._functions: dict[int, _Maker] = {}

    def maker(self, value: Any) -> _Maker | None:
        """A function that rebuilds the value with other arrays; None if the value has no traced or large array."""
        if isinstance(value, _jax.Tracer) or (isinstance(value, jax.Array) and value.nbytes > CONSTANT_BYTES):
            key = id(cast(Any, value))
            self.arrays.setdefault(key, value)
            number = list(self.arrays).index(key)
            return lambda arrays, _: arrays[number]
        if isinstance(value, FunctionType):
            return self._functions.get(id(value)) or self._of_function(value)
        if type(value) is functools.partial:
            of_parts = self.maker((value.func, value.args, value.keywords))
            return of_parts and (lambda arrays, functions: _partial(*of_parts(arrays, functions)))
        leaves, tree = cast(Any, jax.tree.flatten(value))
        if tree == jax.tree.structure(0):
            return None
        makers = [self.maker(leaf) for leaf in leaves]
        if not any(makers):
            return None
        other_leaves = [None if make else leaf for make, leaf in zip(makers, leaves, strict=True)]

        def rebuild(arrays: tuple[Any, ...], functions: dict[int, Any]) -> Any:
            return tree.unflatten([m(arrays, functions) if m else x for m, x in zip(makers, other_leaves, strict=True)])

        return rebuild

    def _of_function(self, function: FunctionType) -> _Maker | None:
        code, namespace, name, number = function.__code__, function.__globals__, function.__name__, id(function)
        try:
            contents = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError:  # a cell that is not filled yet
            return None

        def rebuild(arrays: tuple[Any, ...], functions: dict[int, Any]) -> FunctionType:
            if number not in functions:
                cells = tuple(CellType() for _ in code.co_freevars)
                functions[number] = copy = FunctionType(code, namespace, name, closure=cells)
                assert parts is not None
                copy.__defaults__, copy.__kwdefaults__, contents = parts(arrays, functions)
                for cell, value in zip(cells, contents, strict=True):
                    cell.cell_contents = value
            return functions[number]

        self._functions[number] = rebuild  # before its cells are searched: it may close over itself
        parts = self.maker((function.__defaults__, function.__kwdefaults__, contents))
        if parts is None:
            del self._functions[number]
            return None
        return rebuild


def _partial(function: Callable[..., Any], args: Any, keywords: Any) -> Any:
    return functools.partial(function, *args, **keywords)
