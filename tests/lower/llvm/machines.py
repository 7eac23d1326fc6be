"""Machines that differ in what their code depends on, and whether their code runs on this one."""

from __future__ import annotations

import importlib.util

from tilekern.errors import TilekernError
from tilekern.lower.llvm.compile import toolchain
from tilekern.lower.llvm.runtime.machine import Machine

AVX2 = Machine("x86_64-unknown-linux-gnu", "haswell", "", vector_bytes=32, registers=16, has_int16_pairs=True)
AVX512 = Machine(
    "x86_64-unknown-linux-gnu",
    "skylake-avx512",
    "-prefer-256-bit",
    vector_bytes=64,
    registers=32,
    has_int16_pairs=True,
)
BFLOAT16 = Machine(
    "x86_64-unknown-linux-gnu",
    "cooperlake",
    "+avx512bf16,+avx512vnni,-prefer-256-bit",
    vector_bytes=64,
    registers=32,
    has_bfloat16_dots=True,
    has_int16_pairs=True,
    has_int8_fours=True,
)
FOURS = Machine(
    "x86_64-unknown-linux-gnu",
    "alderlake",
    "+avxvnni",
    vector_bytes=32,
    registers=16,
    has_int16_pairs=True,
    has_int8_fours=True,
)
TILES = Machine(
    "x86_64-unknown-linux-gnu",
    "sapphirerapids",
    "+amx-bf16,+amx-int8,+amx-tile,+avx512bf16,+avx512vnni,-prefer-256-bit",
    vector_bytes=64,
    registers=32,
    has_bfloat16_tiles=True,
    has_int8_tiles=True,
    has_int16_pairs=True,
    has_int8_fours=True,
)
NEON = Machine("aarch64-unknown-linux-gnu", "neoverse-n1", "+neon", vector_bytes=16, registers=32)
NEON_FOURS = Machine(
    "aarch64-unknown-linux-gnu", "neoverse-n1", "+neon,+dotprod", vector_bytes=16, registers=32, has_int8_fours=True
)
ALL = (AVX2, AVX512, BFLOAT16, FOURS, TILES, NEON, NEON_FOURS)


def runs_here(machine: Machine) -> bool:
    """True if this CPU can be asked to run code for a machine."""
    if importlib.util.find_spec("llvmlite") is None:
        return False
    try:
        return machine.runs_on(toolchain.host())
    except TilekernError:
        return False


def here() -> list[Machine]:
    """The machines whose code runs here, each of another kind."""
    return [machine for machine in ALL if runs_here(machine)]
