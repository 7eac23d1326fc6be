"""The kernels that an op calls, for the stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilekern.ir.core import Func
from tilekern.kernel.family import TileFamily
from tilekern.kernel.results import Results
from tilekern.kernel.signature import Signature
from tilekern.lower.lowering import Lowering
from tilekern.lower.target import Target


class Inner:
    """A kernel that an op calls, as a function of flat arrays: those of its arguments, then those it closes over.

    Results are an array, or a tuple of several. Attributes are those of a `KernelFamily` that the stages need.
    """

    captured: tuple[Any, ...] = ()
    captures_tracers = False

    def __init__(self, family: TileFamily, target: Target) -> None:
        self._family, self._target, self.name = family, target, family.name
        self.arguments = tuple(family.types)
        self.signature = Signature(self.name, tuple(p.name for p in self.func().inputs), {}, {}, {})
        self.outputs = family.outputs
        self.results = Results(tuple(family.outputs), (), len(family.outputs) == 1)
        self.lowered: Callable[[Target], Lowering] = family.lowered
        self.lowered_or_portable: Callable[[Target], Lowering] = family.lowered_or_portable

    def func(self, target: Target | None = None) -> Func:
        """The block IR for a target."""
        return self._family.func(target or self._target)
