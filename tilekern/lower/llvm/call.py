"""Machine code → a custom call in an XLA program."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from tilekern import _jax, _meshes, source
from tilekern.errors import DeviceAssertionError, TargetError
from tilekern.ir.debug import Assert
from tilekern.lower.llvm.compile import toolchain
from tilekern.lower.llvm.compile.loaded_code import LoadedCode
from tilekern.lower.llvm.program import Program
from tilekern.lower.llvm.runtime import code_table

_TARGET = "tilekern_llvm"
"""The name under which XLA knows the handlers of all kernels."""


def call(
    program: Program, outputs: Sequence[jax.ShapeDtypeStruct], aliases: Mapping[int, int], *inputs: Any
) -> tuple[jax.Array, ...]:
    """Run a program; can be traced, and compiled by XLA for the platform `cpu` of this process.

    Args:
      program: the program to run.
      outputs: its results.
      aliases: for each input that a result replaces, its number → the result's number. XLA reuses the input's memory
        where nobody needs its old value, and copies it otherwise.
      inputs: its arguments.

    Raises:
      DependencyError: llvmlite is missing, broken, too old or too new.
      ResourceError: the program needs too much scratch.
      TargetError: the program was made for a machine whose code does not run here.
    """
    results = (*outputs, *([jax.ShapeDtypeStruct((1,), jnp.int32)] if program.checks else []))
    assert all(number < len(results) for number in program.zeroed), program.name
    parameters = {"outputs": results, "aliases": tuple(aliases.items()), "prints": program.prints}
    arrays = _jax.bind(native_call_p, *_meshes.alike(inputs), name=program.name, code=_loaded(program), **parameters)
    if program.checks:
        _raise_failed(program.checks, arrays[-1][0])
    return tuple(arrays[: len(outputs)])


def _raise_failed(checks: tuple[Assert, ...], failed: jax.Array) -> None:
    """Raise the error of the assertion that failed, on the host, if one failed."""

    def report() -> None:
        jax.debug.callback(functools.partial(_raise, checks), failed)

    def nothing() -> None: ...

    lax.cond(failed > 0, report, nothing)


def _raise(checks: tuple[Assert, ...], failed: Any) -> None:
    check = checks[len(checks) - int(failed)]
    with source.at(check.loc):
        raise DeviceAssertionError(check.message)


def _loaded(program: Program) -> LoadedCode:
    """The program's code in this process, known to XLA."""
    compiled = toolchain.compile(program)
    if compiled.code is None:
        raise TargetError(
            f"{program.name} was compiled for another CPU",
            expected=f"{toolchain.host().triple}, {toolchain.host().cpu}",
            got=f"{compiled.machine.triple}, {compiled.machine.cpu}",
            fix="lower it for the target of this machine",
        )
    with toolchain.lock:
        _register()
    return compiled.code


class _TypeInfo(ctypes.Structure):
    """XLA_FFI_TypeInfo."""

    _fields_ = (("size", ctypes.c_size_t), ("extension", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_type_info = _TypeInfo(ctypes.sizeof(_TypeInfo))


@functools.cache
def _register() -> None:
    """Register the handlers of all kernels, and the type of the state that each call of a kernel has."""
    functions = toolchain.code_table().functions
    _type_info.deleter = functions[code_table.RELEASE]
    type_id = ctypes.PYFUNCTYPE(ctypes.c_void_p)(functions[code_table.TYPE_ID])()
    info = ctypes.addressof(_type_info)
    jax.ffi.register_ffi_type(_TARGET, {"type_id": _capsule(type_id), "type_info": _capsule(info)}, "cpu")
    stages = {"instantiate": code_table.INSTANTIATE, "execute": code_table.EXECUTE}
    jax.ffi.register_ffi_target(_TARGET, {stage: _capsule(functions[name]) for stage, name in stages.items()}, "cpu")


def _capsule(address: int | None) -> Any:
    return jax.ffi.pycapsule(ctypes.c_void_p(address))


# --- the primitive: a lowered module keeps the code loaded until XLA has made an executable --------------------------


def _types(*operands: _jax.ShapedArray, outputs: Sequence[Any], **_: Any) -> list[_jax.ShapedArray]:
    return _meshes.result_types(native_call_p.name, operands, outputs)


def _lower(
    site: _meshes.Site,
    *operands: Any,
    name: str,
    code: LoadedCode,
    outputs: Sequence[Any],
    aliases: Sequence[tuple[int, int]],
    prints: bool,
) -> Sequence[jax.Array]:
    options = {"key": code.key, "has_side_effect": prints}
    return _jax.custom_call(name, _TARGET, outputs, *operands, aliases=dict(aliases), **options)


def _eager(*operands: Any, **parameters: Any) -> Sequence[jax.Array]:
    return cast(Any, jax.jit(functools.partial(_jax.bind, native_call_p, **parameters)))(*operands)


def _batch(operands: Sequence[Any], dims: Sequence[int | None], **parameters: Any) -> tuple[Any, list[int]]:
    """One call after the other."""
    mapped = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True)]

    def call(slices: Sequence[Any]) -> Any:
        slice_iter = iter(slices)
        call_operands = [x if d is None else next(slice_iter) for x, d in zip(mapped, dims, strict=True)]
        return _jax.bind(native_call_p, *call_operands, **parameters)

    results = cast(Any, jax.lax).map(call, [x for x, d in zip(mapped, dims, strict=True) if d is not None])
    return results, [0] * len(results)


native_call_p = _jax.primitive("tilekern_native_call", _types, multiple_results=True)
_jax.forget_parameters(native_call_p)
native_call_p.def_impl(_eager)
_jax.register_lowering(native_call_p, _lower, "cpu", kept_alive="code")
_jax.register_rules(native_call_p, batch=_batch)
