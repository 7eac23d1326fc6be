"""A primitive for linear functions that state their transpose, and their derivative along arrays that are not linear.

JAX transposes a ring by keeping the keys of all steps. `jax.custom_vjp` has no forward mode, and no rule of JAX has
both a transpose of its own and derivatives along arrays that are not linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from tilekern import _jax, _meshes


class Linear(Protocol):
    """A function (*primals, *linear) of arrays that is linear in the arrays after the first `num_primals`."""

    @property
    def num_primals(self) -> int:
        """The number of primals."""
        ...

    @property
    def like(self) -> Sequence[int]:
        """For each result the number of a primal of the same type."""
        ...

    def run(self, *operands: Any) -> Sequence[Any]:
        """The results."""
        ...

    def along(self, tangents: Sequence[Any], *operands: Any) -> Sequence[Any]:
        """The derivative of the results along tangents of the primals; None is zero."""
        ...

    def transposed(self, needs: Sequence[bool], present: Sequence[bool]) -> Linear:
        """The transpose: (*primals, *cotangents) -> the cotangent of each linear array whose flag in `needs` is True.

        `present` has a flag for each result: True if its cotangent is an argument; other cotangents are zero.
        """
        ...


@dataclass(frozen=True)
class _Batched:
    """A linear function under `jax.vmap`: all arrays are stacked in dim 0."""

    function: Linear

    @property
    def num_primals(self) -> int:
        return self.function.num_primals

    @property
    def like(self) -> Sequence[int]:
        return self.function.like

    def run(self, *operands: Any) -> Sequence[Any]:
        return jax.vmap(self.function.run)(*operands)

    def along(self, tangents: Sequence[Any], *operands: Any) -> Sequence[Any]:
        return jax.vmap(self.function.along)(tangents, *operands)

    def transposed(self, needs: Sequence[bool], present: Sequence[bool]) -> Linear:
        return _Batched(self.function.transposed(needs, present))


def call(function: Linear, *operands: Any) -> list[Any]:
    """The results of a linear function, for JAX to transpose and to differentiate by its own rules."""
    return _jax.bind(_linear_p, *operands, function=function)


def _types(*operands: Any, function: Linear) -> list[Any]:
    return [operands[n].strip_weak_type() for n in function.like]


def _run(*operands: Any, function: Linear) -> list[Any]:
    return list(function.run(*operands))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, function: Linear) -> tuple[Any, Any]:
    of_primals, of_linear = tangents[: function.num_primals], tangents[function.num_primals :]
    terms: list[Sequence[Any]] = []
    if any(t is not None for t in of_linear):
        pairs = zip(primals[function.num_primals :], of_linear, strict=True)
        whole = (_meshes.varying_like(jnp.zeros_like(x), [jax.typeof(x)]) if t is None else t for x, t in pairs)
        terms.append(call(function, *primals[: function.num_primals], *whole))
    if any(t is not None for t in of_primals):
        terms.append(function.along(of_primals, *primals))
    return call(function, *primals), [sum(some[1:], some[0]) for some in zip(*terms, strict=True)]


def _transpose(cotangents: Sequence[Any], operands: Sequence[Any], *, function: Linear) -> list[Any]:
    primals, linear = operands[: function.num_primals], operands[function.num_primals :]
    needs = [isinstance(x, jax.ShapeDtypeStruct) for x in linear]
    present = [c is not None for c in cotangents]
    transposed = function.transposed(needs, present)
    results = iter(call(transposed, *primals, *(c for c in cotangents if c is not None)))
    return [None] * function.num_primals + [next(results) if n else None for n in needs]


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
