"""The message to jaxlib equals that of jaxlib's own builder, byte for byte."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilekern.lower.triton.call_message import Int32, Int64, Kernel, Launch, Parameter, Pointer, TensorMap

jaxlib: Any = pytest.importorskip("jax_cuda13_plugin._triton", reason="needs jax-cuda13-plugin")

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)

kernels = st.builds(
    Kernel,
    name=names,
    num_warps=st.integers(1, 32),
    num_ctas=st.integers(1, 16),
    shared_bytes=st.integers(0, 232448),
    ptx=names,
    capability=st.sampled_from([80, 86, 90, 100, 103, 120]),
    scratch_bytes=st.integers(0, 2**20),
    scratch_align=st.sampled_from([0, 1, 128]),
)


@st.composite
def tensor_maps(draw: st.DrawFn) -> TensorMap:
    rank = draw(st.integers(1, 5))

    def dims(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(low, high), min_size=rank, max_size=rank)))

    return TensorMap(
        draw(st.integers(0, 12)), draw(st.integers(0, 3)), dims(1, 2**32), (*dims(0, 2**40)[1:], 1), dims(1, 256)
    )


KINDS: dict[str, st.SearchStrategy[Parameter]] = {
    "pointer": st.builds(Pointer, u64, st.sampled_from([0, 1, 16])),
    "int32": st.builds(Int32, st.integers(-(2**31), 2**31 - 1)),
    "int64": st.builds(Int64, st.integers(-(2**63), 2**63 - 1)),
    "tensor map": tensor_maps(),
}
parameters = st.lists(st.one_of(*KINDS.values()), max_size=8).map(tuple)
launches = st.builds(Launch, names, kernels, u32, parameters)


def built(launch: Launch) -> bytes:
    """The same message by jaxlib's builder."""
    k = launch.kernel
    scratch = (k.scratch_bytes, k.scratch_align) if k.scratch_bytes else (None, None)
    kernel = jaxlib.TritonKernel(k.name, k.num_warps, k.num_ctas, k.shared_bytes, k.ptx, "", k.capability, *scratch)
    made = [parameter(p) for p in launch.parameters]
    return jaxlib.TritonKernelCall(kernel, launch.programs, 1, 1, made).to_proto(launch.name, b"")


def parameter(p: Parameter) -> Any:
    match p:
        case Pointer():
            return jaxlib.create_array_parameter(p.bytes_to_zero, p.divisibility)
        case Int32():
            return jaxlib.create_scalar_parameter(p.value, "i32")
        case Int64():
            return jaxlib.create_scalar_parameter(p.value, "i64")
        case TensorMap():
            return jaxlib.create_tma_descriptor_parameter(
                elem_type=p.element_type,
                swizzle=p.swizzle,
                shape=p.shape,
                strides=p.strides,
                block_shape=p.block,
                oob_fill=0,
            )


@given(launches)
def test_the_bytes_are_those_of_jaxlibs_builder(launch: Launch) -> None:
    assert launch.encode() == built(launch)


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_every_kind_of_parameter(kind: str, data: st.DataObject) -> None:
    launch = Launch("name", Kernel("kernel", 4, 1, 0, "PTX", 90), 1, (data.draw(KINDS[kind]),))
    assert launch.encode() == built(launch)


@given(kernels, st.binary(min_size=1, max_size=300))
def test_jaxlib_parses_a_message_with_machine_code(kernel: Kernel, cubin: bytes) -> None:
    """jaxlib's builder makes no image. Fields behind an image must still be found."""
    with_image = Launch("name", replace(kernel, cubin=cubin), 1, ()).encode()
    assert jaxlib.get_serialized_metadata(zlib.compress(with_image + b"\x1a\x04meta")) == b"meta"


def test_machine_code_as_googles_library_writes_it() -> None:
    """The expected bytes are those of Python's protobuf package with the message's descriptor, taken from jaxlib."""
    kernel = Kernel("add", 4, 1, 300, "PTX", 90, b"\x7fELF", 256, 128)
    image = b"ZP\x01Z\x0e\n\x04\x7fELF\x12\x03add\x18\xac\x02"
    assert kernel.encode() == b'\n\x03add\x10\x04\x18\xac\x02"\x03PTX0' + image + b"\x60\x80\x02\x68\x80\x01"


@pytest.mark.parametrize("wrong", [Int32(2**31), Int32(-(2**31) - 1), Int64(2**63)])
def test_a_number_that_does_not_fit_is_a_bug(wrong: Parameter) -> None:
    with pytest.raises(AssertionError):
        wrong.encode()
