"""Families of kernels, and of kernels under `jax.vmap`.

A family has a member for each target: the kernel traced with that target's blocks, when it is first needed.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import jax

from tilekern import _jax
from tilekern.errors import DependencyError, FallbackWarning, TargetError
from tilekern.ir.core import Func
from tilekern.ir.debug import Assert, Print
from tilekern.kernel.composite import mapped
from tilekern.kernel.derivatives import batched_jvp, batched_transpose
from tilekern.kernel.family import Calls, Family, Program, stacked
from tilekern.kernel.packed import before_pairs, packed, unpacked
from tilekern.kernel.sharding_rule import ShardingRule
from tilekern.lower.lowering import Lowering, lower, specialized
from tilekern.lower.target import DEFAULT, Target
from tilekern.passes.batch import batch, places


@dataclass(frozen=True)
class Member:
    """A kernel traced with the blocks of one target.

    Attributes:
      func: the block IR.
      reads: for each input of `func` the index of its array in (*operands of the call, *constants).
      constants: known arrays that the body closes over, and that are no operands of the call.
    """

    func: Func
    reads: tuple[int, ...]
    constants: tuple[Any, ...] = ()

    def inputs(self, operands: Sequence[Any]) -> list[Any]:
        """The inputs of `func` for the operands of a call."""
        arrays = (*operands, *self.constants)
        return [arrays[number] for number in self.reads]


class TileFamily(Family):
    """Base of the families whose members are Funcs."""

    def member(self, target: Target) -> Member:
        """The kernel traced with the blocks of a target, and improved by the passes."""
        raise NotImplementedError

    def func(self, target: Target | None = None) -> Func:
        """The block IR for a target."""
        return self.member(target or self.target).func

    def launch(self, target: Target) -> Mapping[str, int]:
        """The launch options on a target that the schedule or the call gives."""
        raise NotImplementedError

    def settings(self, target: Target) -> Mapping[str, int]:
        """Blocks and launch options on a target that `varied` can replace."""
        return {}

    def varied(self, settings: Mapping[str, int]) -> TileFamily:
        """The family with some blocks and launch options replaced."""
        raise NotImplementedError

    @property
    def types(self) -> list[jax.ShapeDtypeStruct]:
        """The types of the operands."""
        raise NotImplementedError

    @property
    def residuals(self) -> int:
        """The most bytes of carries that a derived backward pass may save."""
        raise NotImplementedError

    @property
    def is_for_derivatives(self) -> bool:
        """True if the author chose blocks and launch options for derived derivatives."""
        return False

    @property
    def states_rules(self) -> bool:
        """True if the author states derivatives, so that no derivative is derived from the block IR."""
        return False

    @property
    def derives(self) -> TileFamily:
        """The family that derivatives are derived from: itself, or a copy with blocks for derivatives."""
        return self

    def calls_host(self, target: Target) -> bool:
        return any(isinstance(op, (Assert, Print)) for op in self.func(target).walk())

    def lowered(self, target: Target) -> Lowering:
        """The member for a target, lowered to it."""
        return lower(self.func(target), target, self.launch(target))

    def served(self, target: Target) -> tuple[Target, Lowering]:
        """The member lowered to a target; for the emitter "auto" by Gluon, if that takes the kernel and is worth it.

        Returns:
          The target with the emitter that serves, and the lowered member.
        """
        if target.emitter == "auto":
            special, target = replace(target, emitter="gluon"), replace(target, emitter="")
            with suppress(TargetError):  # a saved kernel may have no blocks for it
                lowering = specialized(self.func(special), special, self.launch(special))
                if lowering is not None:
                    return special, lowering
        return target, self.lowered(target)

    def program(self, target: Target) -> Program:
        by_name = self.asked is not None and not self.asked.falls_back
        served, lowering = self.served(target) if by_name else self.lowered_or_portable(target)
        member = self.member(served)

        def program(*operands: jax.Array) -> Sequence[jax.Array]:
            return unpacked(lowering.run(*packed(member.inputs(operands))), self.outputs)

        program.__name__ = self.name
        return jax.jit(program), lowering.partitioning

    def kernels(self, target: Target, operands: Sequence[jax.ShapeDtypeStruct]) -> Calls:
        return [(self, target)]

    def lowered_or_portable(self, target: Target) -> tuple[Target, Lowering]:
        """The member lowered to a target; if the target refuses it, to the portable backend, with a warning.

        Too large a block is an error: the portable backend would need the memory, too.

        Returns:
          The target that serves, and the lowered member.
        """
        try:
            return target, self.lowered(target)
        except (TargetError, DependencyError) as error:
            if not target.has_fallback:
                raise
            message = f"{self.name} runs on {target.platform} by the portable backend, which is slower.\n{error}"
            warnings.warn(message, FallbackWarning, stacklevel=2)
            return DEFAULT, self.lowered(DEFAULT)

    def batched(self, size: int, dims: tuple[int | None, ...]) -> tuple[Family, tuple[int | None, ...]]:
        if _jax.has_symbols((size,)):
            dims = tuple(None if d is None else 0 for d in dims)
            return mapped(self, size, dims), dims
        batch_dims = places(self.func(), tuple(map(before_pairs, self.types, dims)))
        key = (size, batch_dims)
        batched = self.caches.batched.get(key)
        if batched is None:
            self.caches.batched[key] = batched = BatchedFamily(self, size, batch_dims)
        return batched, batch_dims


class BatchedFamily(TileFamily):
    """A family under `jax.vmap`: the batch is one more parallel axis of its members."""

    def __init__(self, inner: TileFamily, size: int, dims: tuple[int | None, ...]) -> None:
        super().__init__(inner.name, inner.asked)
        self._inner, self._size, self._dims = inner, size, dims
        self.outputs = stacked(inner.outputs, size)

    def member(self, target: Target) -> Member:
        member = self.caches.members.get(target)
        if member is None:
            inner = self._inner.member(target)
            dims = (*self._dims, *(None for _ in inner.constants))
            func = batch(inner.func, self._size, tuple(dims[number] for number in inner.reads))
            self.caches.members[target] = member = replace(inner, func=func)
        return member

    def launch(self, target: Target) -> Mapping[str, int]:
        return self._inner.launch(target)

    @property
    def derives(self) -> TileFamily:
        inner = self._inner.derives
        return self if inner is self._inner else BatchedFamily(inner, self._size, self._dims)

    @property
    def is_for_derivatives(self) -> bool:
        return self._inner.is_for_derivatives

    @property
    def residuals(self) -> int:
        return self._inner.residuals

    @property
    def states_rules(self) -> bool:
        return self._inner.states_rules

    @property
    def rule(self) -> ShardingRule | None:
        inner = self._inner.rule
        return None if inner is None else inner.batched(self._dims, self._size)

    def _part(self, parts: Mapping[str, int]) -> BatchedFamily | str:
        rule = self._inner.rule
        assert rule is not None
        inner = self._inner.part({name: count for name, count in parts.items() if name != rule.batch_name})
        if isinstance(inner, str):
            return inner
        return BatchedFamily(cast(TileFamily, inner), self._size // parts.get(rule.batch_name, 1), self._dims)

    @property
    def types(self) -> list[jax.ShapeDtypeStruct]:
        pairs = zip(self._inner.types, self._dims, strict=True)
        shapes = [(t, t.shape if d is None else (*t.shape[:d], self._size, *t.shape[d:])) for t, d in pairs]
        return [jax.ShapeDtypeStruct(shape, t.dtype) for t, shape in shapes]

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        return batched_jvp(self._inner, self._size, self._dims, primals, tangents)

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> Sequence[Any]:
        return batched_transpose(self._inner, self._size, self._dims, cotangents, operands)
