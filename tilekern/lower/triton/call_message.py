"""The message that tells jaxlib what to launch: `TritonAnyKernelCall`, in the wire format of Protocol Buffers.

jaxlib has a builder of this message, but only in its CUDA plugin; this module lets any machine lower and export
programs for NVIDIA GPUs. The fields, their numbers and types come from jaxlib/gpu/triton.proto in JAX 0.11.2 and
0.12.0; a comment behind each field gives its name there. The format: https://protobuf.dev/programming-guides/encoding.
Fields stand in the order of their numbers, as every serializer writes them.
"""

from __future__ import annotations

from collections.abc import Iterable

from tilekern.ir.records import record


def _varint(value: int) -> bytes:
    """A number as seven bits a byte, lowest first; the top bit is set in all but the last byte.

    A negative number is encoded as 64 bits.
    """
    bits = value & (1 << 64) - 1
    encoded = bytearray()
    while bits > 127:
        encoded.append(bits & 127 | 128)
        bits >>= 7
    encoded.append(bits)
    return bytes(encoded)


def _field(number: int, value: int | str | bytes) -> bytes:
    """A field that is written even if it is 0 or empty: a message, or one declared `optional` or `oneof`."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)  # wire type 0, VARINT
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data  # wire type 2, LEN


def _plain(number: int, value: int | str | bytes) -> bytes:
    """A field that is left out if it is 0 or empty: proto3's rule for all other fields."""
    return _field(number, value) if value else b""


def _packed(number: int, values: Iterable[int]) -> bytes:
    return _plain(number, b"".join(map(_varint, values)))


@record
class Pointer:
    """A parameter that takes the next of the call's buffers.

    Attributes:
      bytes_to_zero: number of bytes that are set to 0 before the launch.
      divisibility: of the address; the launch fails if the address has a smaller alignment. 0 checks nothing.
    """

    bytes_to_zero: int
    divisibility: int

    def encode(self) -> bytes:
        """The message `TritonKernelCall.Parameter`."""
        array = _plain(1, self.bytes_to_zero) + _plain(2, self.divisibility)  # bytes_to_zero, ptr_divisibility
        return _field(1, array)  # array


@record
class TensorMap:
    """A parameter that takes the next of the call's buffers and passes a TMA descriptor of it, made at each launch.

    Attributes:
      element_type: a `CUtensorMapDataType` of the CUDA driver API.
      swizzle: a `CUtensorMapSwizzle`.
      shape, strides, block: in elements, outermost dim first.
    """

    element_type: int
    swizzle: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]

    def encode(self) -> bytes:
        """The message `TritonKernelCall.Parameter`; oob_fill = 6 stays 0, so elements out of bounds read 0."""
        nvidia = (
            _plain(1, self.element_type)  # elem_type
            + _plain(2, self.swizzle)  # swizzle
            + _packed(3, self.shape)  # shape
            + _packed(4, self.strides)  # strides
            + _packed(5, self.block)  # block_shape
        )
        return _field(9, _field(1, nvidia))  # tensor_descriptor, nvidia


@record
class Int32:
    """A parameter that is a 32-bit number."""

    value: int

    def encode(self) -> bytes:
        """The message `TritonKernelCall.Parameter`."""
        assert -(2**31) <= self.value < 2**31, self
        return _field(3, self.value)  # i32


@record
class Int64:
    """A parameter that is a 64-bit number."""

    value: int

    def encode(self) -> bytes:
        """The message `TritonKernelCall.Parameter`."""
        assert -(2**63) <= self.value < 2**63, self
        return _field(5, self.value)  # i64


Parameter = Pointer | TensorMap | Int32 | Int64


@record
class Kernel:
    """The machine code, and the resources that a launch must provide.

    Attributes:
      name: of the entry function.
      num_warps: warps in a block.
      num_ctas: blocks in a cluster.
      shared_bytes: dynamic shared memory of a block.
      ptx: compiled by the driver if there is no cubin.
      capability: the compute capability that the cubin is for, 10 * major + minor.
      cubin: machine code, b"" if there is none.
      scratch_bytes: global memory for each block, allocated at each launch.
      scratch_align: alignment of that memory, in bytes.
    """

    name: str
    num_warps: int
    num_ctas: int
    shared_bytes: int
    ptx: str
    capability: int
    cubin: bytes = b""
    scratch_bytes: int = 0
    scratch_align: int = 0

    def encode(self) -> bytes:
        """The message `TritonKernel`, without ttir = 5: nothing reads that field, and every launch would copy it."""
        encoded = (
            _plain(1, self.name)  # kernel_name
            + _plain(2, self.num_warps)  # num_warps
            + _plain(3, self.shared_bytes)  # shared_mem_bytes
            + _plain(4, self.ptx)  # ptx
            + _plain(6, self.capability)  # compute_capability
            + _field(10, self.num_ctas)  # num_ctas
        )
        if self.cubin:
            # jaxlib caches images by name, shared memory, PTX and capability. So the name must equal the one above, and
            # the PTX is needed: without it, two kernels of one name would share an image.
            image = _plain(1, self.cubin) + _plain(2, self.name) + _plain(3, self.shared_bytes)  # object_file, ...
            encoded += _field(11, image)  # module_image
        if self.scratch_bytes:
            encoded += _field(12, self.scratch_bytes) + _field(13, self.scratch_align)  # global_scratch_size, _align
        return encoded


@record
class Launch:
    """A kernel, the number of its programs, and the parameters of its entry function."""

    name: str
    kernel: Kernel
    programs: int
    parameters: tuple[Parameter, ...]

    def encode(self) -> bytes:
        """The message `TritonAnyKernelCall`."""
        call = (
            _field(1, self.kernel.encode())  # kernel
            + _plain(2, self.programs)  # grid_0
            + _plain(3, 1)  # grid_1
            + _plain(4, 1)  # grid_2
            + b"".join(_field(5, parameter.encode()) for parameter in self.parameters)  # parameters
        )
        return _field(1, call) + _plain(4, self.name)  # kernel_call, name
