"""A Func lowered to Triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, cast

import jax

from tilekern import _jax, _machine
from tilekern.errors import TargetError
from tilekern.ir.core import Array, Func
from tilekern.lower.backend import Target
from tilekern.lower.partitioning import Partitioning
from tilekern.lower.resources import Resources
from tilekern.lower.triton.build import build
from tilekern.lower.triton.call import call
from tilekern.lower.triton.chip import chip_of
from tilekern.lower.triton.compile import resources
from tilekern.lower.triton.compile.binary import Binary
from tilekern.lower.triton.compile.compile_program import compile_program
from tilekern.lower.triton.gluon.build import build_gluon
from tilekern.lower.triton.gluon.simulator.run import simulate
from tilekern.lower.triton.interpret import interpret
from tilekern.lower.triton.plan.describe import describe
from tilekern.lower.triton.program import Program
from tilekern.lower.triton.targets import check_runs_here
from tilekern.lower.triton.vendor import AMD, NVIDIA, Vendor


class TritonLowering:
    """A Func as Triton source.

    Attributes:
      func: the Func.
      target: the device that it is lowered for.
      chip: limits and features of the device.
      program: the source, and how it is launched.
    """

    partitioning: ClassVar[Partitioning] = "replicated"

    def __init__(self, func: Func, target: Target, launch: Mapping[str, int]) -> None:
        self.func, self.target = func, target
        self.chip = chip_of(target)
        self.program: Program = (build_gluon if target.emitter == "gluon" else build)(func, self.chip, launch)
        # The source of a Gluon program reads its stages, so they cannot be changed behind it.
        self._stages_are_fixed = "num_stages" in launch or target.emitter == "gluon"
        self._types = [jax.ShapeDtypeStruct(p.ref.shape, p.ref.dtype) for p in func.inputs]

    @property
    def text(self) -> str:
        """Triton source: Python."""
        return self.program.text

    @property
    def plan(self) -> str:
        """The launch, the order of programs, their loops and copies, in words; stages as compiled, once it is."""
        return describe(self.launched, self.func, self.target.name, self._stages_are_fixed or self._is_compiled)

    @property
    def launched(self) -> Program:
        """The program with as many stages as it compiled with; before it is compiled, with as many as will be tried."""
        return self._fitted[0] if self._is_compiled else self.program

    @property
    def _is_compiled(self) -> bool:
        return "_fitted" in vars(self)

    @_jax.emits
    def run(self, *inputs: jax.Array) -> Sequence[jax.Array]:
        """The outputs, by a custom call; traceable by JAX when it lowers for the target's platform."""
        return call(self.program, self._binary, *inputs)

    def interpret(self, *inputs: Array) -> Sequence[Array]:
        """The outputs, by Triton's interpreter in a process of its own; for a program in Gluon, by our simulator."""
        return simulate(self.program, inputs) if self.program.language == "gluon" else interpret(self.program, inputs)

    def compile(self) -> TritonCompiled:
        """Compile with Triton, for the target's GPU, which this machine need not have."""
        return TritonCompiled(self, self._binary)

    @property
    def _binary(self) -> Binary:
        """The compiled program."""
        return self._fitted[1]

    @cached_property
    def _fitted(self) -> tuple[Program, Binary]:
        """The program as it was compiled, and its binary.

        Loads of fewer iterations are in flight if their tiles need too much shared memory.
        """
        program, binary = self.program, compile_program(self.program, self.chip)
        while not self._stages_are_fixed and program.num_stages > 1 and resources.lacks_shared(binary, self.chip):
            program = replace(program, num_stages=program.num_stages // 2)
            binary = compile_program(program, self.chip)
        resources.check_fits(binary, program, self.chip)
        # Machine code is used as it is, and fails on other GPUs; without it, the driver compiles the PTX.
        return program, replace(binary, asm={**binary.asm, NVIDIA.code: b""}) if self.target.portable else binary

    def on_gpu(self) -> Any:
        """The program compiled by XLA for this machine's GPU."""
        vendor = self.chip.vendor
        if (_machine.amd_architecture() if vendor is AMD else _machine.compute_capability()) is None:
            raise self._no_gpu(vendor)
        check_runs_here(self.target, self.program.name)
        device = jax.sharding.SingleDeviceSharding(cast(Any, jax).devices(vendor.platform)[0])
        return jax.jit(self.run, in_shardings=device, out_shardings=device).lower(*self._types).compile()

    def _no_gpu(self, vendor: Vendor) -> TargetError:
        with_plugin = {"cuda": "CUDA", "rocm": "ROCm"}[vendor.platform]
        return TargetError(
            f"there is no GPU here to run {self.program.name} on",
            expected=f"a machine with an {vendor.name} GPU, and JAX with {with_plugin}: {vendor.jax}",
            got=f"JAX runs on {jax.default_backend()}",
            fix="look at .asm and .resources, or interpret it: traced.lower(...).interpret(*arrays)",
        )


class TritonCompiled:
    """Compiled by Triton."""

    def __init__(self, lowering: TritonLowering, binary: Binary) -> None:
        self._lowering, self._binary = lowering, binary

    @property
    def asm(self) -> Mapping[str, Any]:
        """Triton's output, by the names "ttir", "ttgir", "ptx", "cubin" and "sass"; for AMD "amdgcn" and "hsaco"."""
        binary = self._binary
        return {**binary.asm, "sass": binary.sass} if binary.vendor is NVIDIA else binary.asm

    @property
    def resources(self) -> Resources:
        """The resources of a multiprocessor that one program takes."""
        return self._resources

    @cached_property
    def _resources(self) -> Resources:
        return resources.measure(self._binary, self._lowering.chip)

    def __call__(self, *inputs: Any) -> Sequence[jax.Array]:
        return self._on_gpu(*inputs)

    def interpret(self, *inputs: Array, races: bool = False) -> Sequence[Array]:
        """The outputs, by interpreting the PTX; see `tilekern.lower.triton.ptx.run.run_ptx`.

        Raises:
          TargetError: the program is for another vendor's GPU, or for a later one.
        """
        from tilekern.lower.triton.ptx.run import run_ptx

        binary = self._binary
        if binary.vendor is not NVIDIA or not 80 <= binary.capability <= 90:
            raise TargetError(
                f"there is no interpreter of compiled programs for {self._lowering.target.name}",
                expected="an NVIDIA GPU of compute capability 8.0 to 9.0",
                got=f"target = {self._lowering.target.name}",
                fix='compile for "cuda:sm_90", or interpret the lowered program',
            )
        return run_ptx(self._lowering.program, binary, inputs, races=races)

    def memory_analysis(self) -> Any:
        """XLA's account of the program's memory."""
        return self._on_gpu.memory_analysis()

    @cached_property
    def _on_gpu(self) -> Any:
        return self._lowering.on_gpu()
