"""A primitive for linear functions that state their transpose, and their derivative along arrays that they know.

JAX transposes a ring by keeping the keys of all of its steps. `jax.custom_vjp` has no forward mode, and no rule of JAX
has a transpose of its own and derivatives along known arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from tilekern import _jax, _meshes


class Linear(Protocol):
    """A function of arrays, linear in all but the first `known` of them."""

    @property
    def known(self) -> int:
        """The number of arrays that it knows."""
        ...

    @property
    def like(self) -> Sequence[int]:
        """For each result the number of a known array of its type."""
        ...

    def run(self, *operands: Any) -> Sequence[Any]:
        """The results."""
        ...

    def along(self, tangents: Sequence[Any], *operands: Any) -> Sequence[Any]:
        """The derivative along tangents of known arrays; None is zero."""
        ...

    def transposed(self, wanted: Sequence[bool], given: Sequence[bool]) -> Linear:
        """The cotangents of those linear arrays that are `wanted`, of those of the results that are `given`."""
        ...


@dataclass(frozen=True)
class _Batched:
    """A linear function under `jax.vmap`: all arrays are stacked in dim 0."""

    one: Linear

    @property
    def known(self) -> int:
        return self.one.known

    @property
    def like(self) -> Sequence[int]:
        return self.one.like

    def run(self, *operands: Any) -> Sequence[Any]:
        return jax.vmap(self.one.run)(*operands)

    def along(self, tangents: Sequence[Any], *operands: Any) -> Sequence[Any]:
        return jax.vmap(self.one.along)(tangents, *operands)

    def transposed(self, wanted: Sequence[bool], given: Sequence[bool]) -> Linear:
        return _Batched(self.one.transposed(wanted, given))


def call(function: Linear, *operands: Any) -> list[Any]:
    """The results of a linear function, for JAX to transpose and to differentiate by its own rules."""
    return _jax.bind(_linear_p, *operands, function=function)


def _types(*operands: Any, function: Linear) -> list[Any]:
    return [operands[n].strip_weak_type() for n in function.like]


def _run(*operands: Any, function: Linear) -> list[Any]:
    return list(function.run(*operands))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, function: Linear) -> tuple[Any, Any]:
    known, moved = tangents[: function.known], tangents[function.known :]
    terms: list[Sequence[Any]] = []
    if any(t is not None for t in moved):
        pairs = zip(primals[function.known :], moved, strict=True)
        whole = (_meshes.varying_like(jnp.zeros_like(x), [jax.typeof(x)]) if t is None else t for x, t in pairs)
        terms.append(call(function, *primals[: function.known], *whole))
    if any(t is not None for t in known):
        terms.append(function.along(known, *primals))
    return call(function, *primals), [sum(some[1:], some[0]) for some in zip(*terms, strict=True)]


def _transpose(cotangents: Sequence[Any], operands: Sequence[Any], *, function: Linear) -> list[Any]:
    known, moved = operands[: function.known], operands[function.known :]
    wanted = [isinstance(x, jax.ShapeDtypeStruct) for x in moved]
    given = [c is not None for c in cotangents]
    back = function.transposed(wanted, given)
    found = iter(call(back, *known, *(c for c in cotangents if c is not None)))
    return [None] * function.known + [next(found) if w else None for w in wanted]


def _batch(operands: Sequence[Any], dims: Sequence[int | None], *, function: Linear) -> tuple[Any, list[int]]:
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    pairs = zip(operands, dims, strict=True)
    stacked = (jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0) for x, d in pairs)
    results = call(_Batched(function), *stacked)
    return results, [0] * len(results)


_linear_p = _jax.primitive("tilekern_linear", _types, multiple_results=True)
_linear_p.def_impl(_run)
_meshes.register_lowering_inside(_linear_p, _run)
_jax.register_rules(_linear_p, batch=_batch)
_jax.register_derivatives(_linear_p, _jvp, _transpose)
