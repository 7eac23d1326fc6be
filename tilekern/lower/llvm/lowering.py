"""A Func lowered to this machine's CPU, as vector code made by LLVM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import jax
import numpy as np

from tilekern import _jax, source
from tilekern.ir.core import Array, Func
from tilekern.lower.llvm.call import call
from tilekern.lower.llvm.compile import toolchain
from tilekern.lower.llvm.emit_program import emit, make_plan
from tilekern.lower.llvm.legalize import legalize
from tilekern.lower.llvm.plan.plan_text import plan_text
from tilekern.lower.llvm.plan.task_partition import partial_sums_of
from tilekern.lower.llvm.program import Program
from tilekern.lower.partitioning import Partitioning
from tilekern.lower.resources import Resources
from tilekern.lower.sizes import warn_large


class LlvmLowering:
    """A Func as LLVM IR.

    Attributes:
      func: the Func, as it came.
      machine: the CPU that it is lowered for.
      legal: the Func that the code was made of.
      planned: the steps of the code, and their buffers.
      program: the code.

    Raises:
      DependencyError: llvmlite is missing, broken, too old or too new.
      ResourceError: the code needs too much scratch.
      TargetError: the machine lacks AVX2 or NEON, or the backend an op.
    """

    partitioning: ClassVar[Partitioning] = "replicated"

    def __init__(self, func: Func, machine: toolchain.Machine | None = None) -> None:
        self.func, self.machine = func, machine or toolchain.working_host()
        warned = warn_large(func, "cpu:llvm")
        self.legal = legalize(func, self.machine)
        if not warned:
            warn_large(self.legal, "cpu:llvm")
        self.planned = make_plan(self.legal, self.machine)
        self.program: Program = emit(self.legal, self.planned, self.machine)
        with source.at(func.loc):
            toolchain.check_scratch(self.program)

    @property
    def text(self) -> str:
        """LLVM IR."""
        return self.program.module.text

    @property
    def plan(self) -> str:
        """The steps of a program of the grid, and where their tiles lie."""
        return plan_text(self.program, self.planned, self.legal.body)

    @_jax.emits
    def run(self, *inputs: jax.Array) -> Sequence[jax.Array]:
        """The outputs; traceable by JAX, when it lowers for the platform cpu."""
        func, shares = self.legal, partial_sums_of(self.legal)
        types = [jax.ShapeDtypeStruct(p.ref.shape, p.ref.dtype) for p in func.outputs]
        types += [jax.ShapeDtypeStruct(s.shape, s.dtype) for s in shares]
        numbers = {p: n for n, p in enumerate(func.inputs)}
        aliases = {numbers[p]: n for n, p in enumerate(func.outputs) if p in numbers}
        results = call(self.program, types, aliases, *inputs)
        outputs = dict(zip(func.outputs, results, strict=False))
        for share, parts in zip(shares, results[len(outputs) :], strict=True):
            # One by one: the order in which XLA adds up a dim depends on the other dims.
            total = sum((parts[n] for n in range(share.count)), outputs[share.ref].astype(share.dtype))
            outputs[share.ref] = total.astype(share.ref.ref.dtype)
        return list(outputs.values())

    def interpret(self, *inputs: Array) -> Sequence[Array]:
        """The outputs: the code runs here, so nothing has to be interpreted."""
        return [np.asarray(x) for x in self.compile()(*inputs)]

    def compile(self) -> LlvmCompiled:
        """Compile for the machine."""
        return LlvmCompiled(self)


class LlvmCompiled:
    """Compiled by LLVM."""

    def __init__(self, lowering: LlvmLowering) -> None:
        self._lowering = lowering
        self._compiled = toolchain.compile(lowering.program)

    @property
    def asm(self) -> Mapping[str, Any]:
        """The assembly, as `asm["s"]`."""
        return {"llvm": self._lowering.text, "s": self._compiled.assembly}

    @property
    def resources(self) -> Resources:
        """The scratch memory of each thread."""
        return Resources(scratch_bytes=self._lowering.program.scratch)

    def __call__(self, *inputs: Any) -> Sequence[jax.Array]:
        return self._program(*inputs)

    def memory_analysis(self) -> Any:
        """XLA's account of the program's memory."""
        return self._program.memory_analysis()

    @cached_property
    def _program(self) -> Any:
        types = [jax.ShapeDtypeStruct(p.ref.shape, p.ref.dtype) for p in self._lowering.func.inputs]
        return jax.jit(self._lowering.run).lower(*types).compile()
