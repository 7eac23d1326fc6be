"""Derivatives that follow from the block IR, for kernels whose author states no rule.

The tangent of a kernel is a kernel: `TangentFamily`. The transpose of a kernel is a backward pass of one or several
kernels: `BackwardFamily`. Both are families like any other, so that they have derivatives, and go under `jax.vmap`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax

from tilekern.autodiff.backward import Backward, backward
from tilekern.autodiff.tangent import tangent
from tilekern.ir.core import Func, Value
from tilekern.kernel.divided import on_explicit_mesh
from tilekern.kernel.function_family import FunctionFamily, filled, is_float
from tilekern.kernel.sharding_rule import ShardingRule
from tilekern.kernel.tile_family import Member, TileFamily
from tilekern.lower.target import Target
from tilekern.passes import pipeline
from tilekern.primitive import call


def jvp(family: TileFamily, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The results of a kernel and their tangents, by the kernel's tangent kernel.

    Raises:
      NotDifferentiableError: an op of the kernel has no derivative, at the user's line.
    """
    moving = tuple(t is not None for t in tangents)
    results = call(family, *primals)
    tangent_kernel = tangent_family(family, moving)
    result_tangents = iter(call(tangent_kernel, *primals, *(t for t in tangents if t is not None)))
    return results, [next(result_tangents) if is_float(o) else None for o in family.outputs]


def transpose(family: TileFamily, cotangents: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """For each operand that is a `jax.ShapeDtypeStruct`, its cotangent by the kernel's backward pass; else None."""
    linear = tuple(isinstance(x, jax.ShapeDtypeStruct) for x in operands)
    backward_pass = backward_family(family, linear)
    fixed = [x for x, is_linear in zip(operands, linear, strict=True) if not is_linear]
    results = iter(call(backward_pass, *fixed, *filled(cotangents, family.outputs)))
    return [next(results) if is_linear else None for is_linear in linear]


def tangent_family(family: TileFamily, moving: tuple[bool, ...]) -> TangentFamily:
    """The tangent kernel of a kernel, cached; `moving` has a flag for each operand, True if it has a tangent."""
    derived = family.caches.derived.get(moving)
    if derived is None:
        family.caches.derived[moving] = derived = TangentFamily(family.derives, moving)
    return derived


def backward_family(family: TileFamily, linear: tuple[bool, ...]) -> BackwardFamily:
    """The backward pass of a kernel, cached; `linear` has True for each operand that the kernel is linear in."""
    key = ("transpose", linear)
    derived = family.caches.derived.get(key)
    if derived is None:
        family.caches.derived[key] = derived = BackwardFamily(family, linear)
    return derived


class DerivedTileFamily(TileFamily):
    """Base of families whose members, and whose derivatives, are derived from the members of another family."""

    def __init__(self, name: str, of: TileFamily) -> None:
        super().__init__(name, of.asked)
        self._of = of

    def launch(self, target: Target) -> Mapping[str, int]:
        return self._of.launch(target) if self._of.is_for_derivatives else {}

    @property
    def is_for_derivatives(self) -> bool:
        return self._of.is_for_derivatives

    @property
    def residuals(self) -> int:
        return self._of.residuals

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        return jvp(self, primals, tangents)

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> Sequence[Any]:
        return transpose(self, cotangents, operands)


class TangentFamily(DerivedTileFamily):
    """The tangents of a kernel's float results, for the kernel's operands and the tangents of operands that move."""

    def __init__(self, of: TileFamily, moving: tuple[bool, ...]) -> None:
        super().__init__(f"{of.name}_tangent", of)
        self._moving = moving
        self.outputs = [o for o in of.outputs if is_float(o)]
        self.member(self.target)  # so that an error comes with the call

    def member(self, target: Target) -> Member:
        member = self.caches.members.get(target)
        if member is None:
            self.caches.members[target] = member = self._member(self._of.member(target))
        return member

    def _member(self, of: Member) -> Member:
        operands, moved = len(self._moving), [n for n, moves in enumerate(self._moving) if moves]
        wrt = [number < operands and self._moving[number] for number in of.reads]
        reads = [number if number < operands else number + len(moved) for number in of.reads]
        reads += [operands + moved.index(number) for number, moves in zip(of.reads, wrt, strict=True) if moves]
        return Member(pipeline.run(tangent(of.func, wrt)), tuple(reads), of.constants)

    @property
    def types(self) -> list[jax.ShapeDtypeStruct]:
        types = self._of.types
        return [*types, *(t for t, moves in zip(types, self._moving, strict=True) if moves)]

    @property
    def rule(self) -> ShardingRule | None:
        rule = self._of.rule
        return None if rule is None else rule.tangent(self._moving, [is_float(o) for o in self._of.outputs])

    def _part(self, parts: Mapping[str, int]) -> TangentFamily | str:
        part = self._of.part(parts)
        return part if isinstance(part, str) else TangentFamily(cast(TileFamily, part), self._moving)


class StageFamily(DerivedTileFamily):
    """A kernel of a backward pass."""

    def __init__(self, func: Func, of: TileFamily) -> None:
        super().__init__(func.name, of)
        self._member = Member(func, tuple(range(len(func.inputs))))
        self.outputs = [jax.ShapeDtypeStruct(p.ref.shape, p.ref.dtype) for p in func.outputs]

    def member(self, target: Target) -> Member:
        return self._member

    @property
    def types(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(p.ref.shape, p.ref.dtype) for p in self._member.func.inputs]


class BackwardFamily(FunctionFamily):
    """The cotangents of operands in which a kernel is linear, for the other operands and the results' cotangents."""

    def __init__(self, of: TileFamily, linear: tuple[bool, ...]) -> None:
        super().__init__(f"{of.name.removesuffix('_tangent')}_backward", of.asked)
        self._of, self._linear = of, linear
        self.outputs = [t for t, is_linear in zip(of.types, linear, strict=True) if is_linear]
        self.pass_for(self.target)  # so that an error comes with the call

    @property
    def types(self) -> list[jax.ShapeDtypeStruct]:
        pairs = zip(self._of.types, self._linear, strict=True)
        return [*(t for t, is_linear in pairs if not is_linear), *self._of.outputs]

    @property
    def rule(self) -> ShardingRule | None:
        rule = self._of.rule
        return None if rule is None else rule.transposed(self._linear)

    def _part(self, parts: Mapping[str, int]) -> BackwardFamily | str:
        part = self._of.part(parts)
        return part if isinstance(part, str) else BackwardFamily(cast(TileFamily, part), self._linear)

    def divided(self, operands: Sequence[Any]) -> Sequence[Any]:
        return on_explicit_mesh(self, operands)

    def pass_for(self, target: Target) -> Backward:
        """The Funcs of the backward pass for a target, in their order, and the way of arrays from one to the next."""
        backward_pass = self.caches.batched.get(target)
        if backward_pass is None:
            self.caches.batched[target] = backward_pass = self._pass(target)
        return backward_pass

    def _pass(self, target: Target) -> Backward:
        member = self._of.member(target)
        operands = len(self._linear)
        linear = [n < operands and self._linear[n] for n in member.reads]
        return backward(member.func, linear, self._of.residuals)

    def stages(self, target: Target) -> list[StageFamily]:
        """The families of the kernels for a target."""
        return [StageFamily(stage.func, self._of) for stage in self.pass_for(target).stages]

    def untraced(self, target: Target) -> Callable[..., list[jax.Array]]:
        member, backward_pass = self._of.member(target), self.pass_for(target)
        families = self.stages(target)
        operands, fixed_numbers = len(self._linear), [n for n, is_linear in enumerate(self._linear) if not is_linear]

        def run(*operands_and_cotangents: jax.Array) -> list[jax.Array]:
            by_number = dict(zip(fixed_numbers, operands_and_cotangents, strict=False))
            by_number |= {operands + n: x for n, x in enumerate(member.constants)}
            read = [by_number[n] for n in member.reads if n in by_number]
            arrays: dict[Value, Any] = dict(zip(backward_pass.known, read, strict=True))
            arrays |= dict(zip(backward_pass.cotangents, operands_and_cotangents[len(fixed_numbers) :], strict=True))
            for stage, family in zip(backward_pass.stages, families, strict=True):
                results = call(family, *(arrays[p] for p in stage.func.inputs))
                arrays |= dict(zip(stage.results, results, strict=True))
            return self._in_order(member, [_total([arrays[p] for p in parts]) for parts in backward_pass.results])

        return run

    def _in_order(self, member: Member, cotangents: Sequence[jax.Array | None]) -> list[jax.Array]:
        """The cotangents in the order of the operands; zeros for an operand that no input of the Func reads."""
        order = [n for n in member.reads if n < len(self._linear) and self._linear[n]]
        by_number = dict(zip(order, cotangents, strict=True))
        linear = [n for n, is_linear in enumerate(self._linear) if is_linear]
        arrays = filled([by_number.get(n) for n in linear], self.outputs)
        return [x.astype(o.dtype) for x, o in zip(arrays, self.outputs, strict=True)]

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> Sequence[Any]:
        # It is the transpose of `_of`, so its own transpose, in the cotangents of the results, is `_of`.
        unknown = [isinstance(x, jax.ShapeDtypeStruct) for x in operands]
        first = len(self._linear) - sum(self._linear)
        if any(unknown[:first]) or not all(unknown[first:]):
            return super().transpose(cotangents, operands)
        fixed, moving = iter(operands[:first]), iter(filled(cotangents, self.outputs))
        results = call(self._of, *(next(moving) if is_linear else next(fixed) for is_linear in self._linear))
        return [*[None] * first, *results]


def _total(parts: Sequence[jax.Array]) -> jax.Array | None:
    """The sum of arrays; None if there are none."""
    return functools.reduce(jax.lax.add, parts) if parts else None
