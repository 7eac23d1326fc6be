"""Derivatives that follow from the block IR, for kernels whose author states no rule.

The tangent of a kernel is a kernel: `TangentFamily`. The transpose of a kernel is a backward pass of one or several
kernels: `BackwardPass`. Both are called like any other kernel, so that they have derivatives, and go under `jax.vmap`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax

from tilekern.autodiff.backward import Backward, backward
from tilekern.autodiff.tangent import tangent
from tilekern.ir.core import Func, Value
from tilekern.kernel.composite import Composite, Divisible, Rules, filled, is_float
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


def backward_family(family: TileFamily, linear: tuple[bool, ...]) -> Composite:
    """The backward pass of a kernel, cached; `linear` has True for each operand that the kernel is linear in."""
    key = ("transpose", linear)
    derived = family.caches.derived.get(key)
    if derived is None:
        family.caches.derived[key] = derived = BackwardPass(family, linear).composite()
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


@dataclass(frozen=True)
class BackwardPass:
    """The backward pass of a kernel: the cotangents of operands in which the kernel is linear.

    It is a function of the other operands and of the results' cotangents.

    Attributes:
      of: the kernel.
      linear: one flag for each operand of the kernel.
    """

    of: TileFamily
    linear: tuple[bool, ...]

    def composite(self) -> Composite:
        """The pass as a function of kernels."""
        name, pairs = (
            f"{self.of.name.removesuffix('_tangent')}_backward",
            [*zip(self.of.types, self.linear, strict=True)],
        )
        types = [*(t for t, is_linear in pairs if not is_linear), *self.of.outputs]
        rules, divisible = Rules(None, self._transpose), Divisible(self._rule, self._part)
        self.funcs(self.of.target)  # so that an error comes with the call
        return Composite(name, self.of.asked, types, self._outputs, self._function, rules=rules, divisible=divisible)

    def funcs(self, target: Target) -> Backward:
        """The Funcs of the backward pass for a target, in their order, and the way of arrays from one to the next."""
        key = ("backward pass", self.linear, target)
        backward_pass = self.of.caches.derived.get(key)
        if backward_pass is None:
            member, operands = self.of.member(target), len(self.linear)
            linear = [n < operands and self.linear[n] for n in member.reads]
            self.of.caches.derived[key] = backward_pass = backward(member.func, linear, self.of.residuals)
        return backward_pass

    def stages(self, target: Target) -> list[StageFamily]:
        """The families of the kernels for a target."""
        return [StageFamily(stage.func, self.of) for stage in self.funcs(target).stages]

    @property
    def _outputs(self) -> list[jax.ShapeDtypeStruct]:
        return [t for t, is_linear in zip(self.of.types, self.linear, strict=True) if is_linear]

    def _function(self, target: Target, on_mesh: bool) -> Callable[..., list[jax.Array]]:
        member, backward_pass = self.of.member(target), self.funcs(target)
        families = self.stages(target)
        operands, fixed_numbers = len(self.linear), [n for n, is_linear in enumerate(self.linear) if not is_linear]

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
        order = [n for n in member.reads if n < len(self.linear) and self.linear[n]]
        by_number = dict(zip(order, cotangents, strict=True))
        linear = [n for n, is_linear in enumerate(self.linear) if is_linear]
        outputs = self._outputs
        arrays = filled([by_number.get(n) for n in linear], outputs)
        return [x.astype(o.dtype) for x, o in zip(arrays, outputs, strict=True)]

    def _transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> Sequence[Any] | None:
        """The kernel itself, for cotangents of the results: its transpose is the pass, whose transpose it then is."""
        unknown = [isinstance(x, jax.ShapeDtypeStruct) for x in operands]
        first = len(self.linear) - sum(self.linear)
        if any(unknown[:first]) or not all(unknown[first:]):
            return None
        fixed, moving = iter(operands[:first]), iter(filled(cotangents, self._outputs))
        results = call(self.of, *(next(moving) if is_linear else next(fixed) for is_linear in self.linear))
        return [*[None] * first, *results]

    def _rule(self) -> ShardingRule | None:
        rule = self.of.rule
        return None if rule is None else rule.transposed(self.linear)

    def _part(self, parts: Mapping[str, int]) -> Composite | str:
        part = self.of.part(parts)
        return part if isinstance(part, str) else BackwardPass(cast(TileFamily, part), self.linear).composite()


def _total(parts: Sequence[jax.Array]) -> jax.Array | None:
    """The sum of arrays; None if there are none."""
    return functools.reduce(jax.lax.add, parts) if parts else None
