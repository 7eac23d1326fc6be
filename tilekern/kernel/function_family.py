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
from tilekern.primitive import call, calls_in, kernel_call_p


class FunctionFamily(Family):
    """Base of families that are a JAX function of kernels, made for each target.

    Explicit axes of a mesh divide the operations of the function by JAX's rules, and each kernel inside by its own.
    Then the function is traced again, for the types of its operands say how they are divided.
    """

    @property
    def types(self) -> Sequence[jax.ShapeDtypeStruct]:
        """The types of the operands."""
        raise NotImplementedError

    def function(self, target: Target) -> Callable[..., list[jax.Array]]:
        """The function of flat operands, traced once for a target."""
        function = self.caches.members.get(target)
        if function is None:
            self.caches.members[target] = function = self._trace(target)
        return function

    def _trace(self, target: Target) -> Callable[..., list[jax.Array]]:
        return _jax.of_jaxpr(traced(self.untraced(target), self.types), self.name)

    def untraced(self, target: Target) -> Callable[..., list[jax.Array]]:
        """The function of flat operands for a target, not traced."""
        raise NotImplementedError

    def kernels(self, target: Target, operands: Sequence[jax.ShapeDtypeStruct]) -> Calls:
        return called(traced(self.function(target), operands), target)

    def program(self, target: Target) -> Program:
        # The operations of the function are partitioned; each kernel inside is checked as a call of its own.
        return jax.jit(self.function(target)), "partitioned"

    def divided(self, operands: Sequence[Any]) -> Sequence[Any]:
        return _jax.bind(kernel_call_p, *operands, family=self)

    def types_on_mesh(self, operands: Sequence[Any]) -> Sequence[Any]:
        return _meshes.types_of(self.program_on_mesh(self.target), operands)

    def program_on_mesh(self, target: Target) -> Callable[..., Sequence[jax.Array]]:
        key = (target, "on a mesh")
        if key not in self.caches.programs:
            self.caches.programs[key] = jax.jit(self.untraced(target))
        return self.caches.programs[key]

    def batched(self, size: int, dims: tuple[int | None, ...]) -> tuple[Family, tuple[int | None, ...]]:
        return BatchedFunctionFamily(self, size, dims), dims

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        moving = tuple(t is not None for t in tangents)
        tangent_family = self.caches.derived.get(moving)
        if tangent_family is None:
            self.caches.derived[moving] = tangent_family = FunctionTangent(self, moving)
        return call(self, *primals), call(tangent_family, *primals, *(t for t in tangents if t is not None))

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> Sequence[Any]:
        linear = tuple(x if isinstance(x, jax.ShapeDtypeStruct) else None for x in operands)
        key = ("transpose", linear)
        transpose_family = self.caches.derived.get(key)
        if transpose_family is None:
            self.caches.derived[key] = transpose_family = FunctionTranspose(self, linear)
        fixed = [x for x, unknown in zip(operands, linear, strict=True) if unknown is None]
        results = iter(call(transpose_family, *fixed, *filled(cotangents, self.outputs)))
        return [None if unknown is None else next(results) for unknown in linear]


class BatchedFunctionFamily(FunctionFamily):
    """A function under `jax.vmap`, which batches the kernels inside."""

    def __init__(self, inner: FunctionFamily, size: int, dims: tuple[int | None, ...]) -> None:
        super().__init__(inner.name, inner.asked)
        self._inner, self._size, self._dims = inner, size, dims
        self.outputs = stacked(inner.outputs, size)

    def function(self, target: Target) -> Callable[..., list[jax.Array]]:
        return self._mapped(self._inner.function(target))

    def untraced(self, target: Target) -> Callable[..., list[jax.Array]]:
        return self._mapped(self._inner.untraced(target))

    def _mapped(self, function: Callable[..., list[jax.Array]]) -> Callable[..., list[jax.Array]]:
        return jax.vmap(function, in_axes=self._dims, axis_size=self._size)

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        return batched_jvp(self._inner, self._size, self._dims, primals, tangents)

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> Sequence[Any]:
        return batched_transpose(self._inner, self._size, self._dims, cotangents, operands)


class FunctionTangent(FunctionFamily):
    """The tangents of a family's results, for its operands and the tangents of operands that move."""

    def __init__(self, of: FunctionFamily, moving: tuple[bool, ...]) -> None:
        super().__init__(f"{of.name}_tangent", of.asked)
        self._of, self._moving, self.outputs = of, moving, of.outputs

    @property
    def types(self) -> list[jax.ShapeDtypeStruct]:
        types = self._of.types
        return [*types, *(t for t, moves in zip(types, self._moving, strict=True) if moves)]

    def _trace(self, target: Target) -> Callable[..., list[jax.Array]]:
        return _jax.of_jaxpr(traced(self._tangents(self._of.function(target)), self.types), self.name)

    def untraced(self, target: Target) -> Callable[..., list[jax.Array]]:
        return self._tangents(self._of.untraced(target))

    def _tangents(self, function: Callable[..., list[jax.Array]]) -> Callable[..., list[jax.Array]]:
        moved = [n for n, moves in enumerate(self._moving) if moves]

        def run(*operands: jax.Array) -> list[jax.Array]:
            count = len(self._moving)
            primals, tangents = operands[:count], operands[count:]

            def of_moving(*moving: jax.Array) -> list[jax.Array]:
                by_number = dict(zip(moved, moving, strict=True))
                return function(*(by_number.get(n, x) for n, x in enumerate(primals)))

            return jax.jvp(of_moving, [primals[n] for n in moved], list(tangents))[1]

        return run


class FunctionTranspose(FunctionFamily):
    """The cotangents of operands in which a family is linear, for the other operands and the results' cotangents.

    Args:
      of: the family.
      linear: the types of such operands, with the axes that divide them; None for the others.
    """

    def __init__(self, of: FunctionFamily, linear: tuple[jax.ShapeDtypeStruct | None, ...]) -> None:
        super().__init__(f"{of.name}_transpose", of.asked)
        self._of, self._linear = of, linear
        self.outputs = [t for t, unknown in zip(of.types, linear, strict=True) if unknown is not None]

    @property
    def types(self) -> list[jax.ShapeDtypeStruct]:
        pairs = zip(self._of.types, self._linear, strict=True)
        return [*(t for t, unknown in pairs if unknown is None), *self._of.outputs]

    def _trace(self, target: Target) -> Callable[..., list[jax.Array]]:
        cotangents = self._cotangents(self._of.function(target), self.outputs)
        return _jax.of_jaxpr(traced(cotangents, self.types), self.name)

    def untraced(self, target: Target) -> Callable[..., list[jax.Array]]:
        return self._cotangents(self._of.untraced(target), [t for t in self._linear if t is not None])

    def _cotangents(
        self, function: Callable[..., list[jax.Array]], types: Sequence[jax.ShapeDtypeStruct]
    ) -> Callable[..., list[jax.Array]]:
        count = self._linear.count(None)

        def run(*operands: jax.Array) -> list[jax.Array]:
            def of_linear(*moving: jax.Array) -> list[jax.Array]:
                fixed, moved = iter(operands[:count]), iter(moving)
                return function(*(next(fixed) if unknown is None else next(moved) for unknown in self._linear))

            pull = cast(Callable[..., Any], jax.linear_transpose(of_linear, *types))
            return list(pull(_meshes.placed(operands[count:], jax.eval_shape(of_linear, *types))))

        return run


def filled(values: Sequence[Any], types: Sequence[jax.ShapeDtypeStruct]) -> list[Any]:
    """The values, with zeros of the type in `types` for each None."""
    return [jnp.zeros(t.shape, t.dtype) if v is None else v for v, t in zip(values, types, strict=True)]


def is_float(aval: jax.ShapeDtypeStruct) -> bool:
    """True for an array of floats: only these have tangents."""
    return jnp.issubdtype(aval.dtype, jnp.floating)


def traced(function: Callable[..., list[jax.Array]], operands: Sequence[jax.ShapeDtypeStruct]) -> _jax.Jaxpr:
    """The jaxpr of a function of flat operands."""
    with _meshes.outside_of_meshes():
        return _jax.make_jaxpr(function, *operands)


def called(jaxpr: _jax.Jaxpr, target: Target) -> Calls:
    """The kernels that a jaxpr calls, each with its target, without repetitions."""
    calls: Calls = []
    for family, operands in calls_in(jaxpr):
        calls += family.kernels(family.asked or target, operands)
    return list(dict.fromkeys(calls))
