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

# Gives a value with other arrays in it: of the carried arrays, and of the functions that are already made, by id.
_Maker = Callable[[tuple[Any, ...], dict[int, Any]], Any]


def carry_arrays(function: Callable[..., Any]) -> jax.tree_util.Partial:
    """A `Partial` of the function, which carries the traced and the large arrays that the function closes over.

    The arrays are found in the cells and default values of Python functions, of functions that these close over, and
    in pytrees there. Arrays that a function reads in another way, as attributes of an object, stay there.

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
      arrays: those found, by id.
    """

    def __init__(self) -> None:
        self.arrays: dict[int, Any] = {}
        self._functions: dict[int, _Maker] = {}

    def maker(self, value: Any) -> _Maker | None:
        """A maker of the value with other arrays in place of those found; None if it has none."""
        if isinstance(value, _jax.Tracer) or (isinstance(value, jax.Array) and value.nbytes > CONSTANT_BYTES):
            key = id(cast(Any, value))
            self.arrays.setdefault(key, value)
            number = list(self.arrays).index(key)
            return lambda arrays, _: arrays[number]
        if isinstance(value, FunctionType):
            return self._functions.get(id(value)) or self._of_function(value)
        if type(value) is functools.partial:
            of_parts = self.maker((value.func, value.args, value.keywords))
            return of_parts and (lambda arrays, made: _partial(*of_parts(arrays, made)))
        leaves, tree = cast(Any, jax.tree.flatten(value))
        if tree == jax.tree.structure(0):
            return None
        makers = [self.maker(leaf) for leaf in leaves]
        if not any(makers):
            return None
        kept = [None if make else leaf for make, leaf in zip(makers, leaves, strict=True)]

        def again(arrays: tuple[Any, ...], made: dict[int, Any]) -> Any:
            return tree.unflatten([m(arrays, made) if m else x for m, x in zip(makers, kept, strict=True)])

        return again

    def _of_function(self, function: FunctionType) -> _Maker | None:
        code, namespace, name, number = function.__code__, function.__globals__, function.__name__, id(function)
        try:
            contents = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError:  # a cell that is not filled yet
            return None

        def again(arrays: tuple[Any, ...], made: dict[int, Any]) -> FunctionType:
            if number not in made:
                cells = tuple(CellType() for _ in code.co_freevars)
                made[number] = found = FunctionType(code, namespace, name, closure=cells)
                assert parts is not None
                found.__defaults__, found.__kwdefaults__, contents = parts(arrays, made)
                for cell, value in zip(cells, contents, strict=True):
                    cell.cell_contents = value
            return made[number]

        self._functions[number] = again  # before its cells are searched: it may close over itself
        parts = self.maker((function.__defaults__, function.__kwdefaults__, contents))
        if parts is None:
            del self._functions[number]
            return None
        return again


def _partial(function: Callable[..., Any], args: Any, keywords: Any) -> Any:
    return functools.partial(function, *args, **keywords)
