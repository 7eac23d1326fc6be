"""Checks of the arguments of functions around kernels, and errors that name the user's line."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import jax

from tilekern import _jax, _meshes, source
from tilekern.ir.compute import PRECISIONS
from tilekern.kernel.signature import LAUNCH as LAUNCH_OPTIONS
from tilekern.kernel.signature import check_sizes
from tilekern.lang.tiles import describe, static_int

__all__ = [
    "LAUNCH_OPTIONS",
    "PRECISIONS",
    "at_line_of",
    "check_sizes",
    "describe",
    "hide_frames",
    "is_array",
    "is_divided",
    "is_traced",
    "static_int",
    "type_beside",
]


def hide_frames(file: str) -> None:
    """Let errors that are raised in a file name the line of its caller: `hide_frames(__file__)`.

    It is for files that users call, or that call functions of users; not for files with kernels.
    """
    source.register_internal_file(file)


@contextmanager
def at_line_of(error: BaseException) -> Generator[None]:
    """Errors of `tilekern.errors` that are made inside name the user's line at which `error` was raised."""
    with source.at(_jax.loc_of_exception(error.__traceback__)):
        yield


def is_array(value: object) -> bool:
    """True for arrays of JAX or NumPy, concrete or traced."""
    return _jax.is_array(value)


def is_traced(value: object) -> bool:
    """True for a value that JAX traces, which is not known yet."""
    return isinstance(value, _jax.Tracer)


def is_divided(value: Any) -> bool:
    """True for an array of which each device has a part only, by its type: an explicit axis of a mesh divides it.

    A kernel divides such a call by its rule; an op, which has none, cannot take it.
    """
    return _meshes.is_divided(jax.typeof(value))


def type_beside(shaped: Any, value: Any) -> jax.ShapeDtypeStruct:
    """The type of an array that varies over the same manual axes of a mesh as `value` does.

    Args:
      shaped: has its shape and dtype.
      value: an array; outside of `jax.shard_map` it varies over no axis.
    """
    return _meshes.type_beside(shaped, value)
