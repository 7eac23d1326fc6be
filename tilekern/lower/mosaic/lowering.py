"""A Func lowered to Mosaic: one Pallas kernel for a TPU core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any, ClassVar, cast

import jax
import numpy as np

from tilekern import _jax, _machine, source
from tilekern.errors import TargetError
from tilekern.ir.analysis.costs import Cost, cost_of
from tilekern.ir.core import Array, Func
from tilekern.ir.quote import visible
from tilekern.lower.backend import Target
from tilekern.lower.mosaic.call import Evaluate, call
from tilekern.lower.mosaic.chip import CHIPS, PORTABLE
from tilekern.lower.mosaic.compile import ahead_of_time as compiler
from tilekern.lower.mosaic.legalize import legalize
from tilekern.lower.mosaic.legalize.reshape_arrays import reshape_arrays
from tilekern.lower.mosaic.plan.describe import describe
from tilekern.lower.mosaic.plan.kernel_plan import KernelPlan
from tilekern.lower.mosaic.plan.plan_kernel import plan_kernel
from tilekern.lower.partitioning import Partitioning
from tilekern.lower.resources import Resources
from tilekern.lower.sizes import warn_large


class MosaicLowering:
    """A Func as a Pallas kernel.

    Args:
      func: the Func.
      target: the TPU.
      evaluate: runs the Funcs that compute tables of prefetched scalars, outside of the kernel.

    Attributes:
      func: the Func.
      target: the TPU.
      planned: the plan of the kernel.
    """

    partitioning: ClassVar[Partitioning] = "refused"  # JAX cannot partition Mosaic kernels automatically

    def __init__(self, func: Func, target: Target, evaluate: Evaluate) -> None:
        self.func, self.target, self._evaluate = func, target, evaluate
        self._chip = PORTABLE if target.portable else CHIPS[target.name]
        warned = warn_large(func, self._chip.name)
        self._reshaped = reshape_arrays(func)
        self.planned: KernelPlan = plan_kernel(
            legalize(self._reshaped.func, self._chip.name.removeprefix("tpu:")), self._chip
        )
        if not warned:
            warn_large(self.planned.func, self._chip.name, self.planned.unrolled_ops)
        self._types = [jax.ShapeDtypeStruct(p.ref.shape, p.ref.dtype) for p in func.inputs]

    @_jax.emits
    def run(self, *inputs: jax.Array, interpret: Any = False) -> Sequence[jax.Array]:
        """The outputs; traceable by JAX when it lowers for TPUs, and if it is to `interpret` the kernel, for any."""
        elsewhere = _jax.abstract_tpu(self._chip.device_kind, self._chip.cores)
        with nullcontext() if _machine.tpu_kind() == self._chip.device_kind else elsewhere:
            results = call(
                self.planned, self._cost, self._evaluate, *self._reshaped.inputs(inputs), interpret=interpret
            )
        pairs = zip(results, self.func.outputs, strict=True)
        return tuple(x.astype(p.ref.dtype).reshape(p.ref.shape) for x, p in pairs)

    def interpret(self, *inputs: Array, params: Any = True) -> Sequence[Array]:
        """The outputs, by Pallas' interpreter, whose program XLA compiles without its optimizations.

        Args:
          inputs: the arrays.
          params: `pltpu.InterpretParams`, to look for races and for reads of unwritten memory.
        """
        # LLVM's vectorizer follows all paths of a loop, and does not end for the rounds of random bits.
        # `emit_xla` bounds the paths of its own programs.
        interpreter = jax.jit(partial(self.run, interpret=params), compiler_options=_jax.UNOPTIMIZED)
        results = cast(Sequence[jax.Array], interpreter(*inputs))
        return [np.asarray(x) for x in results]

    @property
    def text(self) -> str:
        """The kernel in MLIR, as Mosaic is given it."""
        return compiler.kernel_text(self._program, self._types, self._chip)

    @property
    def plan(self) -> str:
        """The plan of each loop and each access, and its cost in vector memory."""
        return "\n".join([describe(self.planned), *map(visible, self._reshaped.notes)])

    def compile(self) -> MosaicCompiled:
        """Compile with libtpu, for a TPU that need not be here."""
        return MosaicCompiled(self)

    @cached_property
    def _cost(self) -> Cost:
        return cost_of(self.func)

    @property
    def _program(self) -> Any:
        program = partial(self.run)
        program.__name__ = visible(self.func.name)  # pyright: ignore[reportAttributeAccessIssue] -- jax.jit names the computation after it
        return program

    @cached_property
    def ahead(self) -> Any:
        """The program compiled by libtpu."""
        with source.at(self.func.loc):
            return compiler.compile_ahead(self._program, self._types, self._chip)

    @cached_property
    def here(self) -> Any:
        """The program compiled for this machine's TPU."""
        kind = _machine.tpu_kind()
        if kind != self._chip.device_kind:
            raise TargetError(
                f"there is no {self._chip.device_kind} here to run {self.func.name} on",
                expected="a machine with that TPU, and JAX with libtpu: pip install 'jax[tpu]'",
                got=f"JAX runs on {kind or jax.default_backend()}",
                fix="look at .asm and .resources, or interpret it: traced.lower(...).interpret(*arrays)",
            )
        device = jax.sharding.SingleDeviceSharding(cast(Any, jax).devices("tpu")[0])
        return jax.jit(self.run, in_shardings=device, out_shardings=device).lower(*self._types).compile()


class MosaicCompiled:
    """Compiled by libtpu."""

    def __init__(self, lowering: MosaicLowering) -> None:
        self._lowering, self._compiled = lowering, lowering.ahead

    @property
    def asm(self) -> Mapping[str, Any]:
        """The compiler's output, by the names "hlo" and "mosaic"."""
        return compiler.asm(self._compiled)

    @property
    def resources(self) -> Resources:
        """The vector memory of a core, used and planned."""
        used, planned = compiler.vmem_used(self._compiled), self._lowering.planned.vmem_bytes
        return Resources(vmem_bytes=used, planned_bytes=planned)

    def __call__(self, *inputs: Any) -> Sequence[jax.Array]:
        return self._lowering.here(*inputs)

    def memory_analysis(self) -> Any:
        """XLA's account of the program's memory."""
        return self._compiled.memory_analysis()
