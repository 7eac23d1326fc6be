"""Kernels and ops: from Python functions over tiles to JAX functions. docs/architecture.md has the way of a call."""

from __future__ import annotations

from tilekern.kernel.choice import Choice
from tilekern.kernel.declare import CustomOp, Kernel, kernel, op
from tilekern.kernel.op_stages import CompiledOp, LoweredOp, TracedOp
from tilekern.kernel.results import Sum, Zeros
from tilekern.kernel.signature import Block, Signature
from tilekern.kernel.stages import Compiled, Lowered, Traced, interpret, load

__all__ = [
    "Block",
    "Choice",
    "Compiled",
    "CompiledOp",
    "CustomOp",
    "Kernel",
    "Lowered",
    "LoweredOp",
    "Signature",
    "Sum",
    "Traced",
    "TracedOp",
    "Zeros",
    "interpret",
    "kernel",
    "load",
    "op",
]
