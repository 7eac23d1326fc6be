"""AMD's GPUs: programs are compiled by Triton's HIP backend, interpreted, and lowered for JAX's ROCm plugin."""

from __future__ import annotations

import hashlib
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import like_first, refused
from tests.lower.triton import samples
from tests.lower.triton.test_call import opaque
from tilekern import _machine
from tilekern.errors import DependencyError, ResourceError, TargetError
from tilekern.kernels.flash_attention import flash_attention
from tilekern.kernels.matmul.kernel import matmul
from tilekern.kernels.softmax.kernel import softmax_forward
from tilekern.lower.triton.call import CUSTOM_CALL
from tilekern.lower.triton.call_message import Kernel, Launch, Pointer
from tilekern.lower.triton.chip import CHIPS
from tilekern.lower.triton.compile import amd_resources, compile_program
from tilekern.testing import assert_close

TARGETS = ("rocm:gfx942", "rocm:gfx950")
targets = pytest.mark.parametrize("target", TARGETS)


@pytest.fixture(scope="module", autouse=True)
def needs_triton() -> None:
    pytest.importorskip("triton.backends.amd.compiler", reason="needs triton with its HIP backend")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp()))


@like_first
def twice(x, out):
    i = tk.parallel(x.shape[0], 64)
    out[i] = x[i] * 2


X = np.arange(256, dtype=np.float32)


def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def compiled(kernel: Any, *arrays: Any, target: str, **options: Any) -> Any:
    return kernel.trace(*arrays, **options).lower(target).compile()


# --- machine code ----------------------------------------------------------------------------------------------------


@targets
def test_a_program_compiles_with_its_resources(target: str) -> None:
    found = compiled(matmul, shape(512, 512), shape(512, 512), target=target)
    assert set(found.asm) == {"ttir", "ttgir", "amdgcn", "hsaco"} and found.asm["hsaco"].startswith(b"\x7fELF")
    assert re.search(r"v_mfma_f32_\w+_bf16", found.asm["amdgcn"])
    assert f'-{target.removeprefix("rocm:")}"' in found.asm["amdgcn"]
    taken, chip = found.resources, CHIPS[target]
    assert taken.spills == 0 and 0 < taken.registers <= 512 and 0 < taken.shared_bytes <= chip.shared_bytes
    assert taken.threads in (128, 256) and 0 < taken.occupancy <= 1 and taken.serialized is None


def test_spills_are_counted() -> None:
    """1024 threads with 128 elements each, in 128 registers."""
    long = jax.ShapeDtypeStruct((8, 131072), "float32")

    taken = compiled(softmax_forward, long, block_rows=1, block_columns=131072, num_warps=16, target="rocm:gfx942")
    assert taken.resources.spills > 0 and taken.resources.registers == 128


def test_the_shared_memory_of_each_architecture_is_respected() -> None:
    arrays = shape(1024, 1024), shape(1024, 1024)
    blocks = {"block_m": 128, "block_n": 128, "block_k": 128, "num_stages": 3, "num_warps": 4}
    with pytest.raises(ResourceError, match=r"more bytes of shared memory than rocm:gfx942(.|\n)*at most 65,536"):
        compiled(matmul, *arrays, **blocks, target="rocm:gfx942")
    with pytest.raises(ResourceError, match=r"more bytes of shared memory than rocm:gfx950(.|\n)*at most 163,840"):
        compiled(matmul, *arrays, **blocks, target="rocm:gfx950")
    fits = compiled(matmul, *arrays, **{**blocks, "num_stages": 2}, target="rocm:gfx950")
    assert 65536 < fits.resources.shared_bytes <= 163840


def test_a_program_has_at_most_1024_threads() -> None:
    with pytest.raises(ResourceError, match=r"num_warps = 1, 2, 4, 8 or 16\n(.|\n)*got: num_warps=32"):
        compile_program.compile_program(samples.add(num_warps=32), CHIPS["rocm:gfx942"])


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "programs"),
    [
        # Waves of a SIMD by registers: 512 // round_up(registers, 8), at most 8.
        (64, 0, 4, 8),
        (65, 0, 4, 7),
        (128, 0, 4, 4),
        (129, 0, 4, 3),
        (512, 0, 4, 1),
        (256, 0, 8, 1),
        (128, 0, 8, 2),
        (24, 0, 1, 32),  # 8 waves on each of 4 SIMDs
        (24, 0, 2, 16),  # barriers
        (24, 0, 16, 2),
        # Programs by 64 KiB of LDS, in units of 512 bytes.
        (24, 32768, 4, 2),
        (24, 32769, 4, 1),
        (24, 513, 1, 32),
    ],
)
def test_occupancy(registers: int, shared: int, warps: int, programs: int) -> None:
    """By the rules of LLVM's `AMDGPUBaseInfo.cpp`."""
    found = amd_resources.occupancy(registers, shared, warps, CHIPS["rocm:gfx942"])
    assert found == programs * warps * 64 / 2048


def test_machine_code_comes_from_the_cache_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    program, chip = samples.add(512), CHIPS["rocm:gfx950"]
    first = compile_program.compile_program(program, chip)
    monkeypatch.setattr(compile_program, "_memory", {})
    monkeypatch.setattr(compile_program, "_run", None)
    assert compile_program.compile_program(program, chip) == first


def test_float8() -> None:
    """gfx942 has E4M3 of another range; both have E5M2, but gfx942 multiplies other numbers."""
    numbers = shape(64, 64, dtype=jnp.float8_e4m3fn)

    @like_first
    def copy(x, out):
        i = tk.parallel(x.shape[0], 16)
        out[i] = x[i]  # <-

    with refused(
        TargetError, "rocm:gfx942 has no f8e4m3fn", expected="gfx950", got="f8e4m3fn[", fix="convert the array"
    ):
        copy.trace(numbers).lower("rocm:gfx942").text  # noqa: B018
    assert "v_mfma_f32_32x32x64_f8f6f4" in compiled(matmul, numbers, numbers, target="rocm:gfx950").asm["amdgcn"]
    others = shape(64, 64, dtype=jnp.float8_e5m2)
    assert re.search(r"v_mfma_f32_\w+_f16", compiled(matmul, others, others, target="rocm:gfx942").asm["amdgcn"])


def test_a_function_that_the_library_lacks() -> None:
    @like_first
    def cube_root(x, out):
        i = tk.parallel(x.shape[0], 64)
        out[i] = jnp.cbrt(x[i])  # <-

    with refused(TargetError, "rocm:gfx942 has no cbrt", expected="a function", got="cbrt", fix="exp2 and log2"):
        cube_root.trace(X).lower("rocm:gfx942").text  # noqa: B018


# --- interpreted -----------------------------------------------------------------------------------------------------


@targets
def test_programs_are_interpreted(target: str) -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((70, 48)).astype(np.float32), rng.standard_normal((48, 40)).astype(np.float32)
    found = matmul.trace(x, w).lower(target).interpret(x, w)
    assert_close(found, x.astype(np.float64) @ w, x @ w, length=48)
    rows = softmax_forward.trace(x).lower(target).interpret(x)
    exponentials = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    assert_close(rows, exponentials / exponentials.sum(-1, keepdims=True), np.asarray(jax.nn.softmax(x)), length=48)


# --- lowered for JAX's ROCm plugin -----------------------------------------------------------------------------------


def lowered(function: Any, *arrays: Any) -> str:
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("rocm",)).as_text()


@targets
def test_the_custom_call_is_that_of_the_rocm_plugin(target: str) -> None:
    """jaxlib registers one name and one message for both platforms: jaxlib/gpu_triton.py, jaxlib/gpu/triton.proto."""
    text = lowered(lambda x: twice(x, target=target), X)
    assert text.count(f"@{CUSTOM_CALL}") == 1 and CUSTOM_CALL == "triton_kernel_call_ffi"
    binary = twice.trace(X).lower(target).compile()
    code = binary.asm["hsaco"]
    (found,) = opaque(text)
    number = int(target.removeprefix("rocm:gfx"))
    threads = binary.resources.threads
    # In the place of PTX there is a digest, by which jaxlib tells machine codes of one name apart.
    key = hashlib.sha256(code).hexdigest()
    kernel = Kernel("twice", threads // 64, 1, binary.resources.shared_bytes, key, number, code)
    assert found == Launch("twice", kernel, 4, (Pointer(0, 16), Pointer(0, 16))).encode()
    assert code in found


def test_the_code_takes_the_parameters_that_jaxlib_passes() -> None:
    """jaxlib appends two pointers, for scratch memory and for profiles: `KernelCall::Launch`."""
    assembly = twice.trace(X).lower("rocm:gfx942").compile().asm["amdgcn"]
    assert len(re.findall(r"\.value_kind: +global_buffer", assembly)) == 2 + 2
    assert ".wavefront_size: 64" in assembly and ".amdhsa_code_object_version 5" in assembly


def test_a_call_without_a_target_is_portable() -> None:
    text = lowered(twice, X)
    assert CUSTOM_CALL not in text and "stablehlo.multiply" in text


def test_attention_is_lowered_with_its_gradient() -> None:
    q = shape(1, 128, 2, 64)

    def loss(q: Any) -> Any:
        return flash_attention(q, q, q, target="rocm:gfx942").astype(jnp.float32).sum()

    assert len(opaque(lowered(jax.grad(loss), q))) >= 3


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_call_for_amd_is_not_lowered_for_another_platform(platform: str) -> None:
    with refused(
        TargetError,
        "a call with target='rocm:gfx942' is lowered for another platform",
        expected="a program for rocm",
        got=f"platform = {platform!r}",
        fix="lowering_platforms=('rocm',)",
    ):
        jax.jit(lambda x: twice(x, target="rocm:gfx942")).trace(X).lower(lowering_platforms=(platform,))  # <-


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(_machine.amd_architecture() is not None, reason="needs a machine without a GPU of AMD")
def test_running_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = twice.trace(X).lower("rocm:gfx942").compile()
    with pytest.raises(TargetError, match="there is no GPU here to run twice on") as caught:
        found(X)
    assert "an AMD GPU, and JAX with ROCm" in str(caught.value.expected)
    monkeypatch.setattr(_machine, "amd_architecture", lambda: "gfx90a")
    with pytest.raises(TargetError, match="compiled for another GPU") as other:
        found(X)
    assert "runs the code of rocm:gfx942" in str(other.value.expected) and "gfx90a" in str(other.value.got)
    assert "cpu:xla" in other.value.fix


@pytest.mark.parametrize(("name", "expected"), [("gfx942", "gfx942"), ("gfx950:sramecc+:xnack-", "gfx950")])
def test_the_architecture_of_a_gpu(name: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = type("Device", (), {"compute_capability": name})
    monkeypatch.setattr(jax, "devices", lambda platform: {"rocm": [device()]}[platform])
    assert _machine.amd_architecture() == expected


def test_triton_without_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.backends.amd", None)
    monkeypatch.setitem(sys.modules, "triton.backends.amd.compiler", None)
    with pytest.raises(DependencyError, match="no backend for AMD's GPUs") as caught:
        compile_program.compile_program(samples.add(), CHIPS["rocm:gfx942"])
    assert "triton.backends.amd" in str(caught.value.expected) and "pip install" in caught.value.fix


# --- schedules -------------------------------------------------------------------------------------------------------


def test_schedules_for_cuda_serve_with_as_many_threads() -> None:
    @like_first
    def copy(x, out, *, block: tk.Block = 4):
        i = tk.parallel(x.shape[0], block)
        out[i] = x[i]

    @copy.schedule("cuda")
    def _cuda(x: Any, device: tk.Device) -> dict[str, int]:
        return {"block": device.lanes, "num_warps": 8}

    def plan(target: str) -> str:
        return copy.trace(shape(256)).lower(target).plan.splitlines()[0]

    assert "4 programs, 4 warps" in plan("rocm:gfx942")
    assert "8 programs, 8 warps" in plan("cuda:sm_80")

    @copy.schedule("rocm:gfx950")
    def _own(x: Any) -> dict[str, int]:
        return {"block": 128, "num_warps": 8}

    assert "2 programs, 8 warps" in plan("rocm:gfx950")
    assert "4 programs, 4 warps" in plan("rocm:gfx942")


def test_devices() -> None:
    for target, memory in (("rocm:gfx942", 64 << 10), ("rocm:gfx950", 160 << 10)):
        device = tk.device(target)
        assert (device.platform, device.lanes, device.fast_memory, device.matrix_unit) == ("rocm", 64, memory, "mfma")
