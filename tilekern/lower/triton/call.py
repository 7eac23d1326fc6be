"""Machine code → a custom call in an XLA program.

The call is jaxlib's `triton_kernel_call_ffi`, which XLA's CUDA platform knows wherever the CUDA plugin of JAX is
installed. To lower or to export such a program no plugin and no GPU is needed.

A program that is exported for another machine rests on that machine's jaxlib having this call, which JAX does not
promise for years as it does for its own operations. So `jax.export` asks for a word of consent:

    jax.export.export(
        jax.jit(function),
        platforms=["cpu", "cuda"],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")],
    )

Which code runs: the binary's cubin wherever it has one; jaxlib does not look at the PTX then, nor at the GPU before
the first launch, which fails on one that the cubin is not for. A cubin of sm_80 runs on 8.0 to 8.9, one of sm_90 on 9.0
only and one of sm_100 on 10.0 only, for Triton compiles these for the targets sm_90a and sm_100a. A binary without a
cubin is compiled from its PTX when XLA compiles the program, for the GPU that is there: PTX of sm_80 suits every later
GPU, that of sm_90a and sm_100a no other one.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tilekern.lower.triton.call_message import Int32, Int64, Kernel, Launch, Parameter, Pointer, TensorMap
from tilekern.lower.triton.compile.binary import Binary, DescriptorFormat
from tilekern.lower.triton.program import Descriptor, Program, Result

CUSTOM_CALL = "triton_kernel_call_ffi"
"""The name of the custom call, for `jax.export.DisabledSafetyCheck.custom_call`."""

# What the compiled code assumes of every pointer, in bytes; jaxlib checks it at each launch. XLA's buffers have it.
_DIVISIBILITY = 16

# Triton's compiler numbers element types as the PTX instruction `tensormap.replace` does (PTX ISA, .elemtype:
# .f32.ftz 8, .f64 9, .bf16 10). jaxlib hands the number to the driver's cuTensorMapEncodeTiled, which takes a
# CUtensorMapDataType of cuda.h: FLOAT64 8, BFLOAT16 9, FLOAT32_FTZ 10. The others agree. Triton's own launcher has the
# same table, TMA_DTYPE_DEVICE_TO_HOST in triton/backends/nvidia/driver.py.
_DRIVER_ELEMENT_TYPE = {8: 10, 9: 8, 10: 9}


def call(program: Program, binary: Binary, *inputs: Any) -> tuple[jax.Array, ...]:
    """Run a compiled program on the Func's inputs; can be traced, and lowered for `cuda` on any machine.

    Returns:
      The Func's outputs. A result that is an input written in place is a new array: XLA reuses the input's memory where
      nobody needs its old value, and copies it otherwise.
    """
    arrays = [jnp.asarray(array) for array in (*inputs, *program.constants)]
    operands = [arrays[number] for number in program.operands]
    if program.programs == 0 or all(result.nbytes == 0 for result in program.results):
        buffers = [_unwritten(result, operands) for result in program.results]
    else:
        buffers = _launch(program, binary, operands)
    return tuple(_finished(buffer, result) for buffer, result in zip(buffers, program.results, strict=True))


def message(program: Program, binary: Binary) -> bytes:
    """What jaxlib is told: the attribute `opaque` of the custom call, before its compression."""
    kernel = Kernel(
        name=binary.name,
        num_warps=binary.num_warps,
        num_ctas=binary.num_ctas,
        shared_bytes=binary.shared_bytes,
        ptx=binary.text("ptx"),
        capability=binary.capability,
        cubin=binary.cubin,
        scratch_bytes=binary.global_scratch_bytes,
        scratch_align=binary.global_scratch_align,
    )
    return Launch(program.name, kernel, program.programs, tuple(_parameters(program, binary))).encode()


def _unwritten(result: Result, operands: Sequence[jax.Array]) -> jax.Array:
    """The buffer of a result where no program runs, or where it has no elements."""
    return jnp.zeros(result.shape, result.dtype) if result.alias is None else operands[result.alias]


def _launch(program: Program, binary: Binary, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """The buffers after the launch."""
    # A pointer has no type: an array of another dtype, say int32 for int64, would be read past its end.
    assert [o.dtype for o in operands] == [a.dtype for a in program.arguments[: len(operands)]], program.name
    types = tuple(jax.ShapeDtypeStruct(result.shape, result.dtype) for result in program.results)
    aliases = {r.alias: number for number, r in enumerate(program.results) if r.alias is not None}
    run = jax.ffi.ffi_call(CUSTOM_CALL, types, input_output_aliases=aliases, custom_call_api_version=4)
    with jax.named_scope(program.name):  # in profiles; the GPU's own timeline shows the entry function
        return run(*operands, opaque=zlib.compress(message(program, binary)))


def _parameters(program: Program, binary: Binary) -> list[Parameter]:
    """The entry function's parameters; jaxlib hands the buffers, operands first, to those that take one."""
    zeroed = [0] * len(program.operands) + [r.nbytes if r.zeroed else 0 for r in program.results]
    described = [argument.name for argument in program.arguments if argument.descriptor is not None]
    expected = dict(zip(described, binary.descriptors, strict=True))
    parameters: list[Parameter] = []
    for argument, bytes_to_zero in zip(program.arguments, zeroed, strict=True):
        if argument.descriptor is None:
            parameters.append(Pointer(bytes_to_zero, _DIVISIBILITY))
        else:
            assert not bytes_to_zero, f"{argument.name}: jaxlib zeroes only buffers that are passed as pointers"
            parameters += _described(argument.descriptor, expected[argument.name])
    return parameters


def _described(descriptor: Descriptor, expected: DescriptorFormat) -> list[Parameter]:
    """A descriptor: its map, then its shape and strides, which the compiled code takes as well."""
    return [
        TensorMap(
            _DRIVER_ELEMENT_TYPE.get(expected.elem_type, expected.elem_type),
            expected.swizzle,
            descriptor.shape,
            descriptor.strides,
            expected.block,
        ),
        *map(Int32, descriptor.shape),
        *map(Int64, descriptor.strides),
    ]


def _finished(buffer: jax.Array, result: Result) -> jax.Array:
    """The output that a buffer is, or that it adds up to."""
    if result.partial_sums:
        buffer = jnp.sum(buffer, axis=0, dtype=result.dtype)
    return jax.lax.convert_element_type(buffer, result.final)
