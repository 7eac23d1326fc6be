"""Programs as custom calls: the message to jaxlib, the results, and export. No GPU, no Triton."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilekern import _jax, source
from tilekern.ir.types import BF16, BOOL, DTYPES, F32, I32, DType
from tilekern.lower.triton.call import CUSTOM_CALL, call, message
from tilekern.lower.triton.call_message import Int32, Int64, Kernel, Launch, Pointer, TensorMap
from tilekern.lower.triton.compile.binary import Binary, DescriptorFormat
from tilekern.lower.triton.program import Argument, Descriptor, Program, Result

HERE = source.Loc(__file__, 1, function="kernel")


def program(inputs: tuple[DType, ...], results: tuple[Result, ...], **changes: Any) -> Program:
    """A program whose operands are its inputs, in order."""
    dtypes = (*inputs, *(r.dtype for r in results))
    made = Program(
        name="twice",
        text="",
        arguments=tuple(Argument(f"a{n}", dtype) for n, dtype in enumerate(dtypes)),
        operands=tuple(range(len(inputs))),
        constants=(),
        results=results,
        programs=3,
        num_warps=1,
        num_stages=1,
        lines={},
        loc=HERE,
    )
    return replace(made, **changes)


BINARY = Binary(
    name="twice_0",
    asm={"ttir": "TTIR", "ttgir": "TTGIR", "ptx": "PTX", "cubin": b"\x7fELF \x00\xff"},
    capability=90,
    num_warps=8,
    num_ctas=2,
    shared_bytes=1000,
    tensor_columns=0,
    global_scratch_bytes=0,
    global_scratch_align=1,
    descriptors=(),
)
KERNEL = Kernel("twice_0", 8, 2, 1000, "PTX", 90, b"\x7fELF \x00\xff")
SAME = Result((8,), F32, F32)
TWICE = program((F32,), (SAME,))
X = np.arange(8, dtype=np.float32)


def lowered(function: Callable[..., Any], *arrays: Any) -> str:
    """The StableHLO text for NVIDIA GPUs."""
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def opaque(text: str) -> list[bytes]:
    """The messages of the custom calls in a StableHLO text."""
    found = re.findall(r'opaque = "((?:[^"\\]|\\.)*)"', text)
    return [zlib.decompress(_unescaped(s)) for s in found]


def _unescaped(text: str) -> bytes:
    """MLIR writes unprintable characters, `"` and backslashes as a backslash and two hexadecimal digits."""
    text = text.replace("\\\\", "\\5C")
    return re.sub(rb"\\([0-9A-F]{2})", lambda m: bytes.fromhex(m[1].decode()), text.encode())


# --- what jaxlib is told --------------------------------------------------------------------------------------------


def test_launch_data_come_from_the_compiler_and_not_from_the_request() -> None:
    assert message(TWICE, BINARY) == Launch("twice", KERNEL, 3, (Pointer(0, 16), Pointer(0, 16))).encode()


def test_the_custom_call_carries_the_message() -> None:
    text = lowered(lambda x: call(TWICE, BINARY, x), X)
    assert text.count(f"@{CUSTOM_CALL}") == 1
    assert opaque(text) == [message(TWICE, BINARY)]


def test_scratch_memory() -> None:
    binary = replace(BINARY, global_scratch_bytes=256, global_scratch_align=128)
    kernel = replace(KERNEL, scratch_bytes=256, scratch_align=128)
    assert message(TWICE, binary) == Launch("twice", kernel, 3, (Pointer(0, 16),) * 2).encode()


def test_a_descriptor_is_followed_by_its_shape_and_strides() -> None:
    """All numbers of element types; Triton and the driver differ in 8, 9 and 10."""
    first = Descriptor((5, 64), (128, 1), (16, 64))
    second = Descriptor((2, 3, 32), (96, 32, 1), (1, 1, 32))
    arguments = (Argument("x", BF16, first), Argument("p", F32), Argument("out", BF16, second))
    made = program((BF16, F32), (Result((2, 3, 32), BF16, BF16),), arguments=arguments)
    driver = {8: 10, 9: 8, 10: 9}
    for number in range(13):
        formats = (DescriptorFormat(number, 3, (16, 32)), DescriptorFormat(7, 1, (1, 1, 32)))
        expected = (
            TensorMap(driver.get(number, number), 3, (5, 64), (128, 1), (16, 32)),
            *map(Int32, (5, 64)),
            *map(Int64, (128, 1)),
            Pointer(0, 16),
            TensorMap(7, 1, (2, 3, 32), (96, 32, 1), (1, 1, 32)),
            *map(Int32, (2, 3, 32)),
            *map(Int64, (96, 32, 1)),
        )
        assert message(made, replace(BINARY, descriptors=formats)) == Launch("twice", KERNEL, 3, expected).encode()


def test_a_zeroed_result_is_zeroed_by_its_bytes() -> None:
    """bool arrays have a byte for each element."""
    results = (replace(SAME, zeroed=True), Result((3, 5), BOOL, BOOL, zeroed=True), SAME)
    parameters = tuple(Pointer(n, 16) for n in (0, 32, 15, 0))
    assert message(program((F32,), results), BINARY) == Launch("twice", KERNEL, 3, parameters).encode()


def test_an_input_written_in_place_is_aliased_and_not_zeroed() -> None:
    results = (SAME, replace(SAME, alias=1))
    made = program((F32, F32), results)
    assert message(made, BINARY) == Launch("twice", KERNEL, 3, (Pointer(0, 16),) * 4).encode()
    text = lowered(lambda x, y: call(made, BINARY, x, y), X, X)
    alias = "output_tuple_indices = [1], operand_index = 1, operand_tuple_indices = []"
    assert re.findall(r"output_operand_alias<(.*?)>", text) == [alias]


def test_operands_may_repeat_inputs_and_constants() -> None:
    made = program((F32, I32, F32), (SAME,), operands=(0, 1, 0), constants=(np.arange(5, dtype=np.int32),))
    text = lowered(lambda x: call(made, BINARY, x), X)
    assert re.search(rf"@{CUSTOM_CALL}\(%arg0, %c\w*, %arg0\)", text)


def test_an_array_of_another_dtype_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="twice"):
        call(TWICE, BINARY, X.astype(np.int32))


def test_a_zeroed_descriptor_is_a_bug() -> None:
    arguments = (Argument("x", F32), Argument("out", F32, Descriptor((8,), (1,), (8,))))
    made = program((F32,), (replace(SAME, zeroed=True),), arguments=arguments)
    with pytest.raises(AssertionError, match="out: jaxlib zeroes only"):
        message(made, replace(BINARY, descriptors=(DescriptorFormat(7, 0, (8,)),)))


# --- results --------------------------------------------------------------------------------------------------------

dtypes = st.sampled_from([d for d in DTYPES.values() if d.itemsize < 8])
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def results(draw: st.DrawFn) -> Result:
    partial_sums = draw(st.booleans())
    dtype = draw(dtypes.filter(lambda d: not partial_sums or d != BOOL))
    shape = (*((draw(st.integers(0, 3)),) if partial_sums else ()), *draw(shapes))
    return Result(shape, dtype, draw(st.one_of(st.just(dtype), dtypes)), draw(st.booleans()), None, partial_sums)


def _filled(result: Result) -> np.ndarray[Any, Any]:
    """The buffers that a launch is assumed to write: small numbers."""
    return (np.arange(result.nbytes // result.dtype.itemsize).reshape(result.shape) % 4).astype(result.dtype)


def _expected(buffer: np.ndarray[Any, Any], result: Result) -> np.ndarray[Any, Any]:
    if result.partial_sums:
        buffer = buffer.astype(np.float32).sum(axis=0).astype(result.dtype)
    return buffer.astype(result.final)


@given(st.lists(results(), max_size=4).map(tuple), st.sampled_from([0, 1, 7]))
def test_buffers_become_outputs(outputs: tuple[Result, ...], programs: int) -> None:
    """Partial sums are added up, and dtypes cast; results are zeros if no program runs."""
    made = program((F32,), outputs, programs=programs)
    runs = programs > 0 and any(0 not in r.shape for r in outputs)
    buffers = [_filled(r) for r in outputs]
    launched: list[Any] = []

    def custom_call(name: str, target: str, types: Any, *operands: Any, **options: Any) -> list[jax.Array]:
        launched.append(target)
        assert [(t.shape, t.dtype) for t in types] == [(r.shape, r.dtype) for r in outputs]
        return [jnp.asarray(b) for b in buffers]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_jax, "custom_call", custom_call)
        got = call(made, BINARY, X)
    assert launched == [CUSTOM_CALL] * runs
    wanted = [_expected(b if runs else np.zeros_like(b), r) for b, r in zip(buffers, outputs, strict=True)]
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(mine), theirs)


@pytest.mark.parametrize("shape, programs", [((8,), 0), ((0,), 3)])
def test_an_input_written_in_place_comes_back_where_nothing_runs(shape: tuple[int, ...], programs: int) -> None:
    x = X[: shape[0]]
    made = program((F32, F32), (Result(shape, F32, F32, alias=0),), programs=programs)
    assert CUSTOM_CALL not in lowered(lambda x: call(made, BINARY, x, x), x)
    np.testing.assert_array_equal(call(made, BINARY, x, -x)[0], x)


def test_partial_sums_are_summed_in_the_dtype_of_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = np.full((3, 2), 100, np.uint8)
    monkeypatch.setattr(_jax, "custom_call", lambda *_, **__: [jnp.asarray(buffer)])
    made = program((F32,), (Result((3, 2), buffer.dtype, I32, partial_sums=True),))
    np.testing.assert_array_equal(call(made, BINARY, X)[0], [300 % 256] * 2)


def test_64_bit_results_where_jax_has_them() -> None:
    with jax.enable_x64(True):
        made = program((F32,), (Result((4, 2), DTYPES["f64"], DTYPES["i64"], partial_sums=True),))
        assert jax.eval_shape(lambda x: call(made, BINARY, x), X) == (jax.ShapeDtypeStruct((2,), np.int64),)


def test_empty_operands_are_passed() -> None:
    text = lowered(lambda x, e: call(program((F32, F32), (SAME,)), BINARY, x, e), X, np.zeros((0, 3), np.float32))
    assert f"@{CUSTOM_CALL}(%arg0, %arg1)" in text


# --- export ---------------------------------------------------------------------------------------------------------

CONSENT = [jax.export.DisabledSafetyCheck.custom_call(CUSTOM_CALL)]

twice_p = _jax.primitive("twice", lambda x: _jax.ShapedArray(x.shape, x.dtype), multiple_results=False)
_jax.register_lowering(twice_p, lambda site, x: [x * 2], platform="cpu")
_jax.register_lowering(twice_p, lambda site, x: call(TWICE, BINARY, x), platform="cuda")


def exported(*platforms: str, **options: Any) -> Any:
    return jax.export.export(jax.jit(lambda x: twice_p.bind(x + 1) + 1), platforms=platforms, **options)(X)


@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda")])
def test_export_serialize_and_back(platforms: tuple[str, ...]) -> None:
    pytest.importorskip("flatbuffers", reason="needs flatbuffers to serialize")
    module = exported(*platforms, disabled_checks=CONSENT)
    again = jax.export.deserialize(module.serialize())
    assert again.platforms == platforms
    assert opaque(again.mlir_module()) == [message(TWICE, BINARY)]
    if "cpu" in platforms:
        np.testing.assert_array_equal(jax.jit(again.call)(X), (X + 1) * 2 + 1)


def test_export_asks_for_consent() -> None:
    with pytest.raises(ValueError, match=CUSTOM_CALL):
        exported("cuda")
