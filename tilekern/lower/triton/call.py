"""Machine code → a custom call in an XLA program.

The call is jaxlib's `triton_kernel_call_ffi`, which JAX's CUDA plugin registers for XLA's CUDA platform, and its ROCm
plugin for the ROCM platform (jaxlib/gpu_triton.py). Lowering or exporting such a program takes neither plugin nor GPU.

An exported program runs only where jaxlib has this call. JAX promises years of compatibility for its own operations,
but not for this call. So `jax.export` asks for consent,
which is `tilekern.export.checks()`.

The code that runs is the binary's cubin, if it has one. Then jaxlib ignores the PTX, and does not look at the GPU
before the first launch, which fails if the cubin is for another GPU. So `check_runs_here`, in `targets.py` beside this
module, refuses such calls before. A cubin of sm_80 runs on 8.0 to 8.9. A cubin of sm_90 runs on 9.0 only and a cubin of
sm_100 on 10.0 only, because Triton compiles them for sm_90a and sm_100a.
Without a cubin, XLA has the PTX compiled for the GPU of the machine. PTX of sm_80 suits every later GPU; PTX of sm_90a
and sm_100a suits no other GPU.

For AMD the message is the same: warps have 64 threads there (jaxlib/gpu/vendor.h, kNumThreadsPerWarp), and the machine
code is an hsaco. jaxlib/gpu/triton_kernels.cc has two ways to give it: in `module_image`, or in a file whose path is in
`ptx`, which jaxlib reads once and deletes (`CompileModuleImage`). The first needs no file, so programs can be exported
and cached. `ptx` is then a part of the key of jaxlib's cache only. The code runs on the GPUs of one architecture.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tilekern import _jax
from tilekern.lower.triton.call_message import Int32, Int64, Kernel, Launch, Parameter, Pointer, TensorMap
from tilekern.lower.triton.compile.binary import Binary, DescriptorFormat
from tilekern.lower.triton.program import Descriptor, Program, Result
from tilekern.lower.triton.targets import CUSTOM_CALL
from tilekern.lower.triton.vendor import AMD

# Alignment of every pointer, in bytes: the compiled code assumes it, jaxlib checks it at each launch, XLA's buffers
# have it.
_DIVISIBILITY = 16

# Element types of TMA descriptors: Triton's number → the driver's number, where they differ. Triton's compiler counts
# like the PTX instruction `tensormap.replace` (PTX ISA, .elemtype: .f32.ftz 8, .f64 9, .bf16 10). jaxlib hands the
# number to the driver's cuTensorMapEncodeTiled, which takes a CUtensorMapDataType of cuda.h: FLOAT64 8, BFLOAT16 9,
# FLOAT32_FTZ 10. Triton's own launcher has the same table, TMA_DTYPE_DEVICE_TO_HOST in
# triton/backends/nvidia/driver.py.
_DRIVER_ELEMENT_TYPE = {8: 10, 9: 8, 10: 9}


def call(program: Program, binary: Binary, *inputs: Any) -> tuple[jax.Array, ...]:
    """Run a compiled program on the Func's inputs; can be traced, and lowered for `cuda` on any machine.

    Returns:
      The Func's outputs. An input that is written in place comes back as a new array: XLA reuses the input's memory if
      nobody needs its old value, and copies it otherwise.
    """
    arrays = [jnp.asarray(array) for array in (*inputs, *program.constants)]
    operands = [arrays[number] for number in program.operands]
    if program.programs == 0 or all(result.nbytes == 0 for result in program.results):
        buffers = [_unwritten(result, operands) for result in program.results]
    else:
        buffers = _launch(program, binary, operands)
    return tuple(_output(buffer, result) for buffer, result in zip(buffers, program.results, strict=True))


def message(program: Program, binary: Binary) -> bytes:
    """The message to jaxlib: the attribute `opaque` of the custom call, before its compression."""
    return described(program, binary).encode()


def described(program: Program, binary: Binary) -> Launch:
    """The launch that jaxlib is asked for."""
    kernel = Kernel(
        name=binary.name,
        num_warps=binary.num_warps,
        num_ctas=binary.num_ctas,
        shared_bytes=binary.shared_bytes,
        ptx=_key(binary),
        capability=binary.capability,
        cubin=binary.code,
        scratch_bytes=binary.global_scratch_bytes,
        scratch_align=binary.global_scratch_align,
    )
    return Launch(program.name, kernel, program.programs, tuple(_parameters(program, binary)))


def _key(binary: Binary) -> str:
    """The PTX; for AMD a digest of the machine code, which jaxlib only compares, and does not compile."""
    if binary.vendor is AMD:
        return hashlib.sha256(binary.code).hexdigest()
    return binary.text(binary.vendor.assembly)


def _unwritten(result: Result, operands: Sequence[jax.Array]) -> jax.Array:
    """The buffer of a result where no program runs, or where it has no elements."""
    return jnp.zeros(result.shape, result.dtype) if result.alias is None else operands[result.alias]


def _launch(program: Program, binary: Binary, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """The buffers after the launch."""
    # A pointer has no type: an array of another dtype, say int32 for int64, would be read past its end.
    assert [o.dtype for o in operands] == [a.dtype for a in program.arguments[: len(operands)]], program.name
    types = tuple(jax.ShapeDtypeStruct(result.shape, result.dtype) for result in program.results)
    aliases = {r.alias: number for number, r in enumerate(program.results) if r.alias is not None}
    opaque = zlib.compress(message(program, binary))
    # The name is for profiles; the GPU's own timeline shows the entry function.
    return _jax.custom_call(program.name, CUSTOM_CALL, types, *operands, aliases=aliases, opaque=opaque)


def _parameters(program: Program, binary: Binary) -> list[Parameter]:
    """The parameters of the entry function. jaxlib fills in the buffers in order, operands first."""
    zeroed = [0] * len(program.operands) + [r.nbytes if r.zeroed else 0 for r in program.results]
    described = [argument.name for argument in program.arguments if argument.descriptor is not None]
    expected = dict(zip(described, binary.descriptors, strict=True))
    parameters: list[Parameter] = []
    for argument, bytes_to_zero in zip(program.arguments, zeroed, strict=True):
        if argument.descriptor is None:
            parameters.append(Pointer(bytes_to_zero, _DIVISIBILITY))
        else:
            assert not bytes_to_zero, f"{argument.name}: jaxlib zeroes only buffers that are passed as pointers"
            parameters += _descriptor_parameters(argument.descriptor, expected[argument.name])
    return parameters


def _descriptor_parameters(descriptor: Descriptor, expected: DescriptorFormat) -> list[Parameter]:
    """The parameters of a descriptor: its map, then its shape and strides, which the compiled code takes as well."""
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


def _output(buffer: jax.Array, result: Result) -> jax.Array:
    """An output from its buffer: partial sums are added up, and converted to the final dtype."""
    if result.partial_sums:
        buffer = jnp.sum(buffer, axis=0, dtype=result.dtype)
    return jax.lax.convert_element_type(buffer, result.final)
