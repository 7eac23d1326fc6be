"""Levels of CPUs, to which `TILEKERN_CPU` restricts code."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import like_first
from tests.lower.llvm.machines import runs_here
from tests.lower.llvm.tasks import process
from tilekern.errors import SettingError, TargetError
from tilekern.ir.core import Func
from tilekern.lower.llvm.compile import toolchain
from tilekern.lower.llvm.lowering import LlvmLowering
from tilekern.lower.llvm.runtime.machine import LEVELS, at_level, restricted

pytest.importorskip("llvmlite", reason="needs llvmlite")

LINUX, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
ALL = dict.fromkeys(LEVELS["x86-64-v4+bf16+amx"], True)
AVX2 = dict.fromkeys(LEVELS["x86-64-v3"], True)

CALL = """
import tilekern as tk
@tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
def doubled(x, out):
    i = tk.parallel(x.shape[0], 8)
    out[i] = x[i] * 2
try:
    print(doubled(jnp.arange(20.0), {target})[19], toolchain.host().cpu, toolchain.compile(scale(4)).name)
except tk.errors.SettingError as error:
    print(error.summary)
"""


@like_first
def squared(x, out):
    out[...] = tk.dot(x[...], x[...]).astype(x.dtype)


def products(dtype: type) -> Func:
    return squared.trace(np.ones((64, 64), dtype)).lower("cpu:xla").ir


def test_each_level_adds_to_those_before() -> None:
    levels = list(LEVELS)
    assert levels == ["x86-64-v3", "x86-64-v4", "x86-64-v4+bf16", "x86-64-v4+bf16+amx"]
    for number, level in enumerate(levels):
        for other in levels[number:]:
            assert at_level(level).runs_on(restricted("", LINUX, "some", ALL, tiles=True))
            assert set(LEVELS[level]) <= set(LEVELS[other])
    bytes_, dots, tiles, fours = zip(
        *((m.vector_bytes, m.has_bfloat16_dots, m.has_int8_tiles, m.has_int8_fours) for m in map(at_level, levels)),
        strict=True,
    )
    assert bytes_ == (32, 64, 64, 64)
    assert dots == (False, False, True, False)  # with AMX, tiles multiply
    assert tiles == (False, False, False, True)
    assert fours == (False, False, True, True)


def test_a_level_decides_the_machine_whatever_else_the_cpu_has() -> None:
    for cpu, features in [("haswell", AVX2), ("znver3", AVX2 | {"vaes": True}), ("sapphirerapids", ALL)]:
        assert restricted("x86-64-v3", LINUX, cpu, features) == at_level("x86-64-v3")
    assert restricted("", LINUX, "znver3", AVX2).cpu == "znver3"


@pytest.mark.parametrize("level", ["avx2", "x86-64-v2", "x86-64-v4+amx", "X86-64-V3"])
def test_unknown_levels(level: str) -> None:
    with pytest.raises(SettingError, match="TILEKERN_CPU names no level of CPUs") as caught:
        restricted(level, LINUX, "some", ALL)
    assert caught.value.got == f"TILEKERN_CPU = {level!r}"
    assert caught.value.expected == (
        "one of 'x86-64-v3', 'x86-64-v4', 'x86-64-v4+bf16', 'x86-64-v4+bf16+amx', or nothing"
    )


@pytest.mark.parametrize(
    ("level", "triple", "features", "lacks"),
    [
        ("x86-64-v3", LINUX, AVX2 | {"movbe": False}, "without movbe"),
        ("x86-64-v4", LINUX, AVX2, "without avx512f, avx512bw, avx512cd, avx512dq, avx512vl"),
        ("x86-64-v4+bf16+amx", LINUX, ALL, "without amx-tile, amx-bf16, amx-int8"),  # the system refuses them
        ("x86-64-v3", ARM, {"neon": True}, f"of {ARM}"),
    ],
)
def test_levels_that_the_machine_lacks(level: str, triple: str, features: dict[str, bool], lacks: str) -> None:
    with pytest.raises(SettingError, match="this machine lacks the level that TILEKERN_CPU names") as caught:
        restricted(level, triple, "some", features, tiles=False)
    assert caught.value.got == f"TILEKERN_CPU = {level!r}, on the CPU some {lacks}"


def test_a_level_without_what_the_backend_needs_is_refused_as_before() -> None:
    with pytest.raises(TargetError, match="CPU without the needed features"):
        restricted("", LINUX, "some", {})


@pytest.mark.parametrize("target", ["", "target='cpu:llvm'"])
def test_a_wrong_level_does_not_fall_back(target: str) -> None:
    found = process(CALL.format(target=target), TILEKERN_CPU="avx2")
    assert found == "TILEKERN_CPU names no level of CPUs\n"


def test_a_process_at_a_level() -> None:
    """Its code has another name than that for the CPU itself, so that caches keep the two apart."""
    if not runs_here(at_level("x86-64-v3")):
        pytest.skip("needs a CPU of x86-64-v3")
    call = CALL.format(target="target='cpu:llvm'")
    found = [process(call, TILEKERN_CPU=level).split() for level in ("x86-64-v3", "")]
    assert [words[:2] for words in found] == [["38.0", "x86-64-v3"], ["38.0", toolchain.host().cpu]]
    assert found[0][2] != found[1][2]


@pytest.mark.parametrize(
    ("level", "registers", "multiplies"),
    [
        ("x86-64-v3", "ymm", "vfmadd"),
        ("x86-64-v4", "zmm", "vfmadd"),
        ("x86-64-v4+bf16", "zmm", "vdpbf16ps"),
        ("x86-64-v4+bf16+amx", "zmm", "tdpbf16ps"),
    ],
)
def test_code_of_each_level_compiles_on_any_machine(level: str, registers: str, multiplies: str) -> None:
    assembly = LlvmLowering(products(ml_dtypes.bfloat16), at_level(level)).compile().asm["s"]
    assert registers in assembly and multiplies in assembly
    assert ("zmm" in assembly) == (registers == "zmm")
    assert [word for word in ("vdpbf16ps", "tdpbf16ps") if word in assembly] == [multiplies] * ("bf16" in multiplies)
