"""Machines by LLVM's descriptions of CPUs, and the code that runs on them."""

from __future__ import annotations

import pytest

from tests.lower.llvm.tasks import ARM, HASWELL
from tilekern.errors import TargetError
from tilekern.lower.llvm.runtime.machine import describe

pytestmark = pytest.mark.sweep(1)  # all cases: they take little time

LINUX = "x86_64-unknown-linux-gnu"
AVX2 = dict.fromkeys(["avx2", "fma", "f16c"], True)
AVX512 = AVX2 | dict.fromkeys(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"], True)


def test_machines() -> None:
    small, large = describe(LINUX, "haswell", AVX2 | {"avx512f": False}), describe(LINUX, "skx", AVX512)
    assert (small.vector_bytes, small.lanes, small.registers, small.has_int16_pairs, small.has_bfloat16_dots) == (
        (32, 8, 16, True, False)
    )
    assert small.features == "+avx2,-avx512f,+f16c,+fma"
    assert (large.vector_bytes, large.lanes, large.registers, large.has_bfloat16_dots) == (64, 16, 32, False)
    assert large.features.endswith(",-prefer-256-bit")
    assert describe(LINUX, "znver5", AVX512 | {"avx512bf16": True}).has_bfloat16_dots
    assert not describe(LINUX, "emeraldrapids", AVX512 | {"avx512bf16": True}).has_bfloat16_dots  # float32 is faster
    masked = AVX512 | {"avx512bf16": True, "amx-bf16": True}
    assert not describe(LINUX, "rocketlake", masked).has_bfloat16_dots  # such a core, by another name
    with_tiles = masked | {"amx-tile": True}
    assert not describe(LINUX, "sapphirerapids", with_tiles).multiplies_bfloat16  # the system refuses them
    tiled = describe(LINUX, "sapphirerapids", with_tiles, tiles=True)
    assert (tiled.has_bfloat16_tiles, tiled.has_bfloat16_dots, tiled.casts_to_bfloat16) == (True, False, True)
    assert not tiled.has_int8_tiles
    assert describe(LINUX, "sapphirerapids", with_tiles | {"amx-int8": True}, tiles=True).has_int8_tiles
    assert not describe(LINUX, "skx", AVX512, tiles=True).has_bfloat16_tiles
    assert describe(LINUX, "knl", AVX512 | {"avx512vl": False}).vector_bytes == 32
    assert not large.has_int8_fours
    assert describe(LINUX, "icelake-server", AVX512 | {"avx512vnni": True}).has_int8_fours
    assert describe(LINUX, "alderlake", AVX2 | {"avxvnni": True}).has_int8_fours
    for triple in ("aarch64-unknown-linux-gnu", "arm64-apple-darwin24.0.0"):
        arm = describe(triple, "generic", {"neon": True})
        assert (arm.vector_bytes, arm.registers, arm.is_x86, arm.has_int16_pairs) == (16, 32, False, False)
        assert [describe(triple, "generic", {"neon": True, "dotprod": n}).has_int8_fours for n in (True, False)] == (
            [True, False]
        )


def test_which_code_runs_where() -> None:
    small, large = describe(LINUX, "haswell", AVX2), describe(LINUX, "skx", AVX512)
    assert small.runs_on(small)
    assert small.runs_on(large)
    assert HASWELL.runs_on(large)
    assert not large.runs_on(small)
    assert not ARM.runs_on(large)
    tiles = AVX512 | {"amx-bf16": True, "amx-tile": True}
    refused, allowed = (describe(LINUX, "sapphirerapids", tiles, tiles=given) for given in (False, True))
    assert refused.runs_on(allowed)
    assert not allowed.runs_on(refused)
    assert not describe(LINUX, "other", AVX2 | {"sse4a": True}).runs_on(large)


@pytest.mark.parametrize(
    ("triple", "features"),
    [
        (LINUX, AVX2 | {"fma": False}),
        (LINUX, {}),
        ("aarch64-unknown-linux-gnu", {"neon": False}),
        ("riscv64-unknown-linux-gnu", AVX2),
        ("x86_64-pc-windows-msvc", AVX2),
    ],
)
def test_machines_without_the_needed_features(triple: str, features: dict[str, bool]) -> None:
    with pytest.raises(TargetError, match="CPU without the needed features") as caught:
        describe(triple, "some", features)
    assert caught.value.got == f"triple={triple}, cpu=some"
