"""Derivatives of many calls at once: the derivatives of one call under `jax.vmap`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from tilekern.kernel.primitive import Callee, Dims, Types


def stacked(outputs: Types, size: int) -> list[jax.ShapeDtypeStruct]:
    """The types of the results of `size` calls, stacked along dim 0."""
    return [jax.ShapeDtypeStruct((size, *o.shape), o.dtype) for o in outputs]


def vmapped_jvp(
    of: Callee, size: int, dims: Dims, primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """`Callee.jvp` of `size` calls at once, operand number n stacked along `dims[n]`."""
    # A list, for jax.vmap takes no axis for an operand that is None.
    axes = [None if t is None else d for t, d in zip(tangents, dims, strict=True)]
    mapped = jax.vmap(of.jvp, in_axes=(list(dims), axes), axis_size=size)
    return mapped(list(primals), list(tangents))


def vmapped_transpose(
    of: Callee, size: int, dims: Dims, cotangents: Sequence[Any], operands: Sequence[Any]
) -> list[Any]:
    """For each operand that is a `jax.ShapeDtypeStruct` its cotangent, stacked along `dims[n]`; None for the others.

    A shared operand, with None in `dims`, gets the sum of the cotangents of the `size` calls. As of `Callee.transpose`,
    a cotangent of zeros may be None.
    """
    unknown = [isinstance(x, jax.ShapeDtypeStruct) for x in operands]
    slice_types = [_slice_type(x, d) if u else None for x, d, u in zip(operands, dims, unknown, strict=True)]

    def run(cotangents: list[Any], fixed: list[Any]) -> Sequence[Any]:
        return of.transpose(cotangents, [k if t is None else t for t, k in zip(slice_types, fixed, strict=True)])

    axes = [None if u else d for d, u in zip(dims, unknown, strict=True)]
    over = [None if c is None else 0 for c in cotangents]
    fixed_operands = [None if u else x for x, u in zip(operands, unknown, strict=True)]
    mapped = jax.vmap(run, in_axes=(over, axes), axis_size=size)(list(cotangents), fixed_operands)
    return [_placed(x, d) for x, d in zip(mapped, dims, strict=True)]


def _slice_type(stacked: jax.ShapeDtypeStruct, dim: int | None) -> jax.ShapeDtypeStruct:
    shape = stacked.shape if dim is None else (*stacked.shape[:dim], *stacked.shape[dim + 1 :])
    return stacked.update(shape=shape)


def _placed(cotangent: Any, dim: int | None) -> Any:
    """A cotangent, stacked along dim 0, moved to the `dim` of its operand; summed over dim 0 if that is None."""
    if cotangent is None:
        return None
    return cotangent.sum(axis=0) if dim is None else jax.numpy.moveaxis(cotangent, 0, dim)
