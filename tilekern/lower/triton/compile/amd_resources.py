"""Resources of a program for AMD's GPUs, from the metadata at the end of its assembly.

The metadata follow code object version 5: LLVM, "User Guide for AMDGPU Backend", section "Code Object Metadata".
The rules of occupancy follow LLVM's `AMDGPUBaseInfo.cpp` for gfx90a and later architectures of CDNA.
"""

from __future__ import annotations

import re

from tilekern.ir.core import cdiv, round_up
from tilekern.lower.resources import Resources
from tilekern.lower.triton.chip import Chip
from tilekern.lower.triton.compile.binary import Binary

_SIMDS = 4  # of a compute unit
_WAVES = 8  # that a SIMD holds at most: `getMaxWavesPerEU`
_REGISTER_UNIT = 8  # vector registers are allocated in units: `getVGPRAllocGranule`
_SHARED_UNIT = 512  # bytes of LDS are: COMPUTE_PGM_RSRC2, granulated_lds_size, for gfx7 to gfx11


def measure(binary: Binary, chip: Chip) -> Resources:
    """The resources of a binary.

    `registers` counts vector and accumulation registers, which are of one file. `spills` counts vector registers in
    memory; scalar registers spill to lanes of vector registers.
    """
    assembly = binary.text("amdgcn")
    registers = _number(assembly, "vgpr_count")
    threads = chip.vendor.lanes * binary.num_warps
    return Resources(
        registers=registers,
        spills=min(4 * _number(assembly, "vgpr_spill_count"), _number(assembly, "private_segment_fixed_size")),
        shared_bytes=binary.shared_bytes,
        threads=threads,
        occupancy=occupancy(registers, binary.shared_bytes, binary.num_warps, chip),
    )


def occupancy(registers: int, shared_bytes: int, num_warps: int, chip: Chip) -> float:
    """The fraction of a compute unit's threads that programs of this size can fill.

    The warps of a program are dealt out to the four SIMDs.
    """
    of_simd = chip.registers_per_core // (_SIMDS * chip.vendor.lanes)
    waves = min(_WAVES, of_simd // max(_REGISTER_UNIT, round_up(registers, _REGISTER_UNIT)))
    of_program = cdiv(num_warps, _SIMDS)
    programs = waves // of_program if num_warps >= _SIMDS else waves * _SIMDS // num_warps
    if num_warps > 1:
        programs = min(programs, chip.programs_per_core)  # each has a barrier, of which there are 16
    if shared_bytes:
        programs = min(programs, chip.shared_bytes_per_core // round_up(shared_bytes, _SHARED_UNIT))
    return programs * num_warps * chip.vendor.lanes / chip.threads_per_core


def _number(assembly: str, name: str) -> int:
    """A number of the metadata. There is one kernel."""
    (digits,) = re.findall(rf"^ +(?:- )?\.{name}: +(\d+)$", assembly, re.MULTILINE)
    return int(digits)
