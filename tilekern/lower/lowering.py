"""The lowering of a Func to a target, and the protocol that every backend's lowering follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Protocol

import jax

from tilekern.errors import CompileError, DependencyError, ResourceError, TargetError
from tilekern.ir.core import Array, Func
from tilekern.lower.llvm.lowering import LlvmLowering
from tilekern.lower.mosaic.lowering import MosaicLowering
from tilekern.lower.partitioning import Partitioning
from tilekern.lower.resources import Resources
from tilekern.lower.target import Target
from tilekern.lower.triton.gluon.choice import pays
from tilekern.lower.triton.lowering import TritonLowering
from tilekern.lower.xla.emit import emit_xla
from tilekern.lower.xla.lowering import XlaLowering


class Lowering(Protocol):
    """A lowered Func.

    Attributes:
      partitioning: the treatment of its calls by XLA's partitioner.
    """

    partitioning: ClassVar[Partitioning]

    @property
    def text(self) -> str:
        """The target's program, for people to read."""
        ...

    @property
    def plan(self) -> str:
        """The plan of the program, in words: loops, tiles, copies."""
        ...

    def run(self, *inputs: jax.Array) -> Sequence[jax.Array]:
        """The outputs; traceable by JAX, when it lowers for the target's platform."""
        ...

    def interpret(self, *inputs: Array) -> Sequence[Array]:
        """The outputs, computed on this machine without the target's hardware."""
        ...

    def compile(self) -> CompiledProgram:
        """Compile for the target; this machine need not have its hardware."""
        ...


class CompiledProgram(Protocol):
    """A compiled Func."""

    @property
    def asm(self) -> Mapping[str, Any]:
        """The stages of the compilation, by the name of the language."""
        ...

    @property
    def resources(self) -> Resources:
        """The resources of the machine that the program takes."""
        ...

    def __call__(self, *inputs: Any) -> Sequence[jax.Array]:
        """Run it here."""
        ...

    def memory_analysis(self) -> Any:
        """XLA's account of the program's memory."""
        ...


def specialized(func: Func, target: Target, launch: Mapping[str, int]) -> Lowering | None:
    """Lower a Func to a warp-specialised program; None if it has no such form, does not compile, or is not worth it.

    Args:
      func: the Func, with the blocks for that emitter.
      target: the device to run on, with the emitter "gluon".
      launch: launch options that somebody chose.
    """
    try:
        lowering = TritonLowering(func, target, launch)
        if not pays(func, lowering.program, lowering.chip):
            return None
        with suppress(DependencyError):  # without Triton there is the text
            lowering.compile()
    except (TargetError, ResourceError, CompileError):
        return None
    return lowering


def lower(func: Func, target: Target, launch: Mapping[str, int]) -> Lowering:
    """Lower a Func that went through the pipeline of passes.

    Args:
      func: the Func.
      target: the device to run on.
      launch: launch options that somebody chose.
    """
    match target.backend:
        case "triton":
            return TritonLowering(func, target, launch)
        case "mosaic":
            return MosaicLowering(func, target, emit_xla.run)
        case "llvm":
            return LlvmLowering(func)
        case _:
            return XlaLowering(func)
