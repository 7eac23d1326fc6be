"""The family of a kernel that was loaded from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tilekern.errors import NotDifferentiableError, TargetError
from tilekern.kernel import derived
from tilekern.kernel.tile_family import Member, TileFamily
from tilekern.lower.target import Target


class SavedFamily(TileFamily):
    """A kernel without its Python source: a member and launch options for each target that it was saved for.

    Its derivatives are derived from the block IR. It has none if the author stated rules, which are Python functions.
    """

    def __init__(
        self,
        name: str,
        asked: Target | None,
        types: Sequence[jax.ShapeDtypeStruct],
        outputs: Sequence[jax.ShapeDtypeStruct],
        members: Mapping[str, tuple[Member, Mapping[str, int]]],
        residuals: int | None,
    ) -> None:
        super().__init__(name, asked)
        self.outputs = outputs
        self._types, self._members, self._residuals = list(types), members, residuals

    def member(self, target: Target) -> Member:
        return self._entry(target)[0]

    def launch(self, target: Target) -> Mapping[str, int]:
        return self._entry(target)[1]

    @property
    def types(self) -> list[jax.ShapeDtypeStruct]:
        return self._types

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        return derived.jvp(self._derivable, primals, tangents)

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> Sequence[Any]:
        return derived.transpose(self._derivable, cotangents, operands)

    @property
    def states_rules(self) -> bool:
        return self._residuals is None

    @property
    def residuals(self) -> int:
        assert self._residuals is not None, self.name
        return self._residuals

    def _entry(self, target: Target) -> tuple[Member, Mapping[str, int]]:
        entry = self._members.get(target.full_name)
        if entry is None:
            raise TargetError(
                f"the file of {self.name} has no blocks for this target",
                expected=f"one of {', '.join(map(repr, self._members))}",
                got=f"target = {target.full_name!r}",
                fix=f"save the kernel with targets=[..., {target.full_name!r}]",
            )
        return entry

    @property
    def _derivable(self) -> SavedFamily:
        """The family, if derivatives are derived from it."""
        if not self.states_rules:
            return self
        raise NotDifferentiableError(
            f"{self.name} was loaded from a file, without the rules for its derivatives",
            expected="a call that is not differentiated, or a kernel that was saved without rules of its own",
            got=f"a derivative of {self.name}",
            fix="differentiate the kernel itself; or save its backward kernel, too, and wrap both in jax.custom_vjp",
        )
