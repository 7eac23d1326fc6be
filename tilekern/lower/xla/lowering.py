"""A Func lowered to the portable backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar

import jax
import numpy as np

from tilekern import _jax
from tilekern.ir.core import Array, Func
from tilekern.ir.quote import visible
from tilekern.lower.partitioning import Partitioning
from tilekern.lower.resources import Resources
from tilekern.lower.sizes import warn_large
from tilekern.lower.xla.emit import emit_xla
from tilekern.lower.xla.legalize import legalize
from tilekern.lower.xla.plan.describe import describe


class XlaLowering:
    """A Func as plain XLA operations.

    Attributes:
      func: the Func.

    Raises:
      ResourceError: intermediate values take more than half of this machine's memory.
      TargetError: an array is longer, or the grid larger, than the backend counts.
    """

    partitioning: ClassVar[Partitioning] = "partitioned"

    def __init__(self, func: Func) -> None:
        warn_large(func, "cpu:xla")
        self.func = legalize(func)

    @_jax.emits
    def run(self, *inputs: jax.Array) -> Sequence[jax.Array]:
        """The outputs; traceable by JAX."""
        return emit_xla.run(self.func, *inputs)

    @property
    def text(self) -> str:
        """StableHLO."""
        return self._lowered.as_text()

    @property
    def plan(self) -> str:
        """The batches of programs that XLA computes at once, and their loops, in words."""
        return describe(self.func)

    def interpret(self, *inputs: Array) -> Sequence[Array]:
        """The outputs: XLA runs here, so nothing has to be interpreted."""
        return [np.asarray(x) for x in self.compile()(*inputs)]

    def compile(self) -> XlaCompiled:
        """Compile for this machine."""
        return XlaCompiled(self._lowered.compile())

    @cached_property
    def _lowered(self) -> Any:
        program = partial(self.run)
        program.__name__ = visible(self.func.name)  # pyright: ignore[reportAttributeAccessIssue] -- jax.jit names the computation after it
        types = [jax.ShapeDtypeStruct(p.ref.shape, p.ref.dtype) for p in self.func.inputs]
        return jax.jit(program).lower(*types)


class XlaCompiled:
    """Compiled by XLA for this machine."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled

    def __call__(self, *inputs: Any) -> Sequence[jax.Array]:
        return self._compiled(*inputs)

    @property
    def asm(self) -> Mapping[str, Any]:
        """The optimised HLO, as `asm["hlo"]`."""
        return {"hlo": self._compiled.as_text()}

    @property
    def resources(self) -> Resources:
        """The scratch memory of the program."""
        return Resources(scratch_bytes=self._compiled.memory_analysis().temp_size_in_bytes)

    def memory_analysis(self) -> Any:
        """XLA's account of the program's memory; `.temp_size_in_bytes` is its scratch."""
        return self._compiled.memory_analysis()
