"""Checks of the arguments of functions around kernels, and errors that name the user's line."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import jax

from tilekern import _jax, _meshes, source
from tilekern.authoring.keywords import unknown_keyword
from tilekern.errors import ArgumentError
from tilekern.ir.compute import PRECISIONS
from tilekern.kernel.signature import LAUNCH as LAUNCH_OPTIONS
from tilekern.kernel.statics import python_numbers
from tilekern.lang.tiles import describe, static_int

__all__ = [
    "LAUNCH_OPTIONS",
    "PRECISIONS",
    "at_line_of",
    "describe",
    "hide_frames",
    "is_array",
    "is_divided",
    "is_traced",
    "static_int",
    "takes_python_numbers",
    "type_beside",
]


def hide_frames(file: str) -> None:
    """Let errors that are raised in a file name the line of its caller: `hide_frames(__file__)`.

    Call it in files that users call, or that call functions of users; not in files with kernels.
    """
    source.register_internal_file(file)


def takes_python_numbers[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a public function: its body sees Python numbers for numbers of NumPy, and arrays for variables.

    It converts numbers of arguments whose annotation names `int`, `float` or `bool`, as in `float | None` or
    `tuple[int, int]`. With `softcap=np.float64(30)` the function computes as with `softcap=30.0`: a number of NumPy has
    a dtype, which JAX would give to tiles.

    Any argument with the method `__jax_array__`, such as a variable of Flax or Keras, becomes its array. The call
    raises an `ArgumentError` if the function compares a size that is a symbol of `jax.export`, which no value decides,
    and for a keyword that the function lacks: the error says `eps=` for another library's `epsilon=`.

    Example:
      >>> import numpy as np
      >>> from tilekern.authoring import takes_python_numbers
      >>> @takes_python_numbers
      ... def kind(eps: float):
      ...     return type(eps).__name__
      >>> kind(np.float64(1)), kind(eps=np.float32(1)), kind(1)
      ('float', 'float', 'int')
    """
    parameters = list(inspect.signature(function).parameters.values())
    names = [p.name for p in parameters]
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    numbers = {p.name for p in parameters if re.search(r"\b(int|float|bool)\b", str(p.annotation))}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    variadic = any(p.kind is p.VAR_KEYWORD and p.name in numbers for p in parameters)

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        arrays = list(map(_jax.array_of, args))
        places: Any = [python_numbers(x) if name in numbers else x for name, x in zip(positional, arrays, strict=False)]
        by_name: dict[str, Any] = {name: _jax.array_of(value) for name, value in keywords.items()}
        for name, value in by_name.items():
            if name in numbers or (variadic and name not in names):
                by_name[name] = python_numbers(value)
        try:
            return function(*places, *arrays[len(positional) :], **by_name)
        except (jax.errors.InconclusiveDimensionOperation, TypeError, NotImplementedError) as error:
            unknown = [name for name in keywords if not takes_all and name not in names]
            if unknown and "unexpected keyword argument" in str(error):
                raise unknown_keyword(function.__name__, unknown[0], keywords[unknown[0]], names) from None
            if not _is_of_symbols(error):
                raise
            named = {**dict(zip(positional, arrays, strict=False)), **by_name}
            raise _needs_sizes(function.__name__, named, error) from error

    return call


def _is_of_symbols(error: Exception) -> bool:
    """True if a size that is a symbol was compared, taken for a number of Python, or refused by a function of JAX."""
    words = ("_DimExpr", "non-constant size")
    return isinstance(error, jax.errors.InconclusiveDimensionOperation) or any(word in str(error) for word in words)


def _needs_sizes(function: str, arguments: dict[str, Any], error: Exception) -> ArgumentError:
    symbolic = ", ".join(f"{name} = {describe(x)}" for name, x in arguments.items() if _jax.has_symbols(x))
    reason = str(error).partition("\n")[0]
    return ArgumentError(
        f"{function} needs arrays of known sizes",
        expected="sizes that are known where the function decides by them",
        got=f"{symbolic}: {reason}" if symbolic else reason,
        fix=f"take jax.vmap of {function} over that dim, if its elements do not mix; or export it for each size",
    )


@contextmanager
def at_line_of(error: BaseException) -> Generator[None]:
    """Errors of `tilekern.errors` that are made inside name the user's line at which `error` was raised."""
    with source.at(_jax.loc_of_exception(error.__traceback__)):
        yield


def is_array(value: object) -> bool:
    """True for an array of JAX or NumPy, concrete or traced, and for a number of NumPy.

    Example:
      >>> import numpy as np
      >>> from tilekern.authoring import is_array
      >>> is_array(np.ones(3)), is_array(np.float32(1)), is_array(1.0), is_array([1.0])
      (True, True, False, False)
    """
    return _jax.is_array(value)


def is_traced(value: object) -> bool:
    """True for a value that JAX traces, so that the value is not known yet."""
    return isinstance(value, _jax.Tracer)


def is_divided(value: Any) -> bool:
    """True for an array that an explicit axis of a mesh divides by its type, so that each device has a part.

    A kernel divides such a call by its rule. An op has no rule and cannot take such an array.
    """
    return _meshes.is_divided(jax.typeof(value))


def type_beside(shaped: Any, value: Any) -> jax.ShapeDtypeStruct:
    """The type of an array like `shaped` that varies over the same manual axes of a mesh as `value` does.

    Args:
      shaped: has its shape and dtype.
      value: an array; outside of `jax.shard_map` it varies over no axis.
    """
    return _meshes.type_beside(shaped, value)
