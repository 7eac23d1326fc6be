"""Families that are a JAX function of kernels: their functions, derivatives, and `jax.vmap`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from tilekern import _jax, _meshes
from tilekern.kernel.derivatives import batched_jvp, batched_transpose
from tilekern.kernel.family import Calls, Family, Program, stacked
from tilekern.lower.target import Target
from tilekern.primitive import call, calls_in


class FunctionFamily(Family):
    """Base of families that are a JAX function of kernels, made for each target."""

    @property
    def types(self) -> Sequence[jax.ShapeDtypeStruct]:
        """The types of the operands."""
        raise NotImplementedError

    def function(self, target: Target) -> Callable[..., list[jax.Array]]:
        """The function of flat operands, traced once for a target."""
        found = self.caches.members.get(target)
        if found is None:
            self.caches.members[target] = found = self._trace(target)
        return found

    def _trace(self, target: Target) -> Callable[..., list[jax.Array]]:
        return _jax.of_jaxpr(traced(self._function(target), self.types), self.name)

    def _function(self, target: Target) -> Callable[..., list[jax.Array]]:
        """The function of flat operands for a target, not traced."""
        raise NotImplementedError

    def kernels(self, target: Target, operands: Sequence[jax.ShapeDtypeStruct]) -> Calls:
        return called(traced(self.function(target), self.types), target)

    def program(self, target: Target) -> Program:
        # The operations of the function are partitioned; each kernel inside is checked as a call of its own.
        return jax.jit(self.function(target)), "partitioned"

    def batched(self, size: int, dims: tuple[int | None, ...]) -> tuple[Family, tuple[int | None, ...]]:
        return BatchedFunctionFamily(self, size, dims), dims

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        moving = tuple(t is not None for t in tangents)
        made = self.caches.derived.get(moving)
        if made is None:
            self.caches.derived[moving] = made = FunctionTangent(self, moving)
        return call(self, *primals), call(made, *primals, *(t for t in tangents if t is not None))

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> Sequence[Any]:
        linear = tuple(isinstance(x, jax.ShapeDtypeStruct) for x in operands)
        key = ("transpose", linear)
        made = self.caches.derived.get(key)
        if made is None:
            self.caches.derived[key] = made = FunctionTranspose(self, linear)
        known = [x for x, is_linear in zip(operands, linear, strict=True) if not is_linear]
        found = iter(call(made, *known, *filled(cotangents, self.outputs)))
        return [next(found) if is_linear else None for is_linear in linear]


class BatchedFunctionFamily(Family):
    """A function under `jax.vmap`, which batches the kernels inside."""

    def __init__(self, inner: FunctionFamily | BatchedFunctionFamily, size: int, dims: tuple[int | None, ...]) -> None:
        super().__init__(inner.name, inner.asked)
        self._inner, self._size, self._dims = inner, size, dims
        self.outputs = stacked(inner.outputs, size)

    def function(self, target: Target) -> Callable[..., list[jax.Array]]:
        """The batched function of flat operands."""
        return jax.vmap(self._inner.function(target), in_axes=self._dims, axis_size=self._size)

    def kernels(self, target: Target, operands: Sequence[jax.ShapeDtypeStruct]) -> Calls:
        return called(traced(self.function(target), operands), target)

    def program(self, target: Target) -> Program:
        # The operations of the function are partitioned; each kernel inside is checked as a call of its own.
        return jax.jit(self.function(target)), "partitioned"

    def batched(self, size: int, dims: tuple[int | None, ...]) -> tuple[Family, tuple[int | None, ...]]:
        return BatchedFunctionFamily(self, size, dims), dims

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        return batched_jvp(self._inner, self._size, self._dims, primals, tangents)

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> Sequence[Any]:
        return batched_transpose(self._inner, self._size, self._dims, cotangents, operands)


class FunctionTangent(FunctionFamily):
    """The tangents of a family's results, for its operands and the tangents of those that move."""

    def __init__(self, of: FunctionFamily, moving: tuple[bool, ...]) -> None:
        super().__init__(f"{of.name}_tangent", of.asked)
        self._of, self._moving, self.outputs = of, moving, of.outputs

    @property
    def types(self) -> list[jax.ShapeDtypeStruct]:
        types = self._of.types
        return [*types, *(t for t, moves in zip(types, self._moving, strict=True) if moves)]

    def _function(self, target: Target) -> Callable[..., list[jax.Array]]:
        function, count = self._of.function(target), len(self._moving)
        moved = [n for n, moves in enumerate(self._moving) if moves]

        def run(*operands: jax.Array) -> list[jax.Array]:
            primals, tangents = operands[:count], operands[count:]

            def of_moving(*moving: jax.Array) -> list[jax.Array]:
                given = dict(zip(moved, moving, strict=True))
                return function(*(given.get(n, x) for n, x in enumerate(primals)))

            return jax.jvp(of_moving, [primals[n] for n in moved], list(tangents))[1]

        return run


class FunctionTranspose(FunctionFamily):
    """The cotangents of operands in which a family is linear, for the other operands and the results' cotangents."""

    def __init__(self, of: FunctionFamily, linear: tuple[bool, ...]) -> None:
        super().__init__(f"{of.name}_transpose", of.asked)
        self._of, self._linear = of, linear
        self.outputs = [t for t, is_linear in zip(of.types, linear, strict=True) if is_linear]

    @property
    def types(self) -> list[jax.ShapeDtypeStruct]:
        pairs = zip(self._of.types, self._linear, strict=True)
        return [*(t for t, is_linear in pairs if not is_linear), *self._of.outputs]

    def _function(self, target: Target) -> Callable[..., list[jax.Array]]:
        function, count = self._of.function(target), len(self._linear) - sum(self._linear)

        def run(*operands: jax.Array) -> list[jax.Array]:
            def of_linear(*moving: jax.Array) -> list[jax.Array]:
                given, moved = iter(operands[:count]), iter(moving)
                return function(*(next(moved) if is_linear else next(given) for is_linear in self._linear))

            pull = cast(Callable[..., Any], jax.linear_transpose(of_linear, *self.outputs))
            return list(pull(list(operands[count:])))

        return run


def filled(values: Sequence[Any], types: Sequence[jax.ShapeDtypeStruct]) -> list[Any]:
    """Values, zeros for those that are None."""
    return [jnp.zeros(t.shape, t.dtype) if v is None else v for v, t in zip(values, types, strict=True)]


def is_float(aval: jax.ShapeDtypeStruct) -> bool:
    """True for an array of floats: only these have tangents."""
    return jnp.issubdtype(aval.dtype, jnp.floating)


def traced(function: Callable[..., list[jax.Array]], operands: Sequence[jax.ShapeDtypeStruct]) -> _jax.Jaxpr:
    """The jaxpr of a function of flat operands."""
    with _meshes.outside_of_meshes():
        return _jax.make_jaxpr(function, *operands)


def called(jaxpr: _jax.Jaxpr, target: Target) -> Calls:
    """The kernels that a jaxpr calls, each different one once."""
    found: Calls = []
    for family, operands in calls_in(jaxpr):
        found += family.kernels(family.asked or target, operands)
    return list(dict.fromkeys(found))
