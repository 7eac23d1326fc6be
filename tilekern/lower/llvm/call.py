"""Machine code → a custom call in an XLA program."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tilekern.errors import TargetError
from tilekern.lower.llvm.compile import toolchain
from tilekern.lower.llvm.program import Program


def call(
    program: Program, outputs: Sequence[jax.ShapeDtypeStruct], aliases: Mapping[int, int], *inputs: Any
) -> tuple[jax.Array, ...]:
    """Run a program; can be traced, and compiled by XLA for the platform `cpu` of this process.

    Args:
      program: what to run.
      outputs: its results.
      aliases: the number of a result by that of the input which it replaces. XLA reuses the input's memory where nobody
        needs its old value, and copies it otherwise.
      inputs: its arguments.

    Raises:
      DependencyError: llvmlite is missing, broken, too old or too new.
      ResourceError: the program needs too much scratch.
      TargetError: the program was made for a machine whose code does not run here.
    """
    assert all(number < len(outputs) for number in program.zeroed), program.name
    run = jax.ffi.ffi_call(
        _registered_name(program), tuple(outputs), input_output_aliases=dict(aliases), vmap_method="sequential"
    )
    with jax.named_scope(program.name):
        return tuple(run(*inputs))


def _registered_name(program: Program) -> str:
    """The name under which XLA knows the program's handler."""
    compiled = toolchain.compile(program)
    if compiled.address is None:
        raise TargetError(
            f"{program.name} was compiled for another CPU",
            expected=f"{toolchain.host().triple}, {toolchain.host().cpu}",
            got=f"{compiled.machine.triple}, {compiled.machine.cpu}",
            fix="lower it for the target of this machine",
        )
    _register(compiled.name, compiled.address)
    return compiled.name


@functools.cache
def _register(name: str, address: int) -> None:
    """Tell XLA; twice, if threads meet here, does no harm."""
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(ctypes.c_void_p(address)), platform="cpu")
