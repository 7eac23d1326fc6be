"""Hardware limits and features of NVIDIA GPUs, by compute capability."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One compute capability.

    Source of the numbers: CUDA C++ Programming Guide, "Compute Capabilities", table "Technical Specifications per
    Compute Capability"; of the dtypes: PTX ISA, "Alternate Floating-Point Data Formats".

    Attributes:
      name: name of the target, "cuda:sm_90".
      capability: 10 * major + minor, 90.
      shared_bytes: limit of shared memory for one program.
      shared_bytes_per_core: shared memory of a multiprocessor.
      threads_per_core: limit of resident threads on a multiprocessor.
      programs_per_core: limit of resident programs on a multiprocessor.
      registers_per_core: 32-bit registers of a multiprocessor.
      registers_per_thread: limit of 32-bit registers for one thread.
      wgmma: True if warpgroups multiply beside their other instructions (PTX ISA, "Asynchronous wgmma Operations").
      tma: True if the GPU has the Tensor Memory Accelerator.
      float8: True if the GPU converts from and to the E4M3 format.
      bf16_atomics: True if the GPU adds bfloat16 atomically.
    """

    name: str
    capability: int
    shared_bytes: int
    shared_bytes_per_core: int
    threads_per_core: int = 2048
    programs_per_core: int = 32
    registers_per_core: int = 65536
    registers_per_thread: int = 255
    wgmma: bool = False
    tma: bool = False
    float8: bool = False
    bf16_atomics: bool = False


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("cuda:sm_80", 80, shared_bytes=163 << 10, shared_bytes_per_core=164 << 10),
        Chip("cuda:sm_90", 90, 227 << 10, 228 << 10, wgmma=True, tma=True, float8=True, bf16_atomics=True),
        Chip("cuda:sm_100", 100, 227 << 10, 228 << 10, tma=True, float8=True, bf16_atomics=True),
    )
}
"""Chips by the name of their target."""
