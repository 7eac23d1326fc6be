"""What NVIDIA GPUs can do, by compute capability."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One compute capability.

    Source of the numbers: CUDA C++ Programming Guide, "Compute Capabilities", table "Technical Specifications per
    Compute Capability"; of the dtypes: PTX ISA, "Alternate Floating-Point Data Formats".

    Attributes:
      name: of the target, "cuda:sm_90".
      capability: 10 * major + minor, 90.
      shared_bytes: the most shared memory one program may have.
      shared_bytes_per_core: what the programs on one multiprocessor share.
      threads_per_core: how many threads a multiprocessor runs at once.
      programs_per_core: how many programs it runs at once.
      registers_per_core: 32-bit registers of a multiprocessor.
      tma: whether tiles can be copied by the Tensor Memory Accelerator.
      float8: whether there are conversions from and to the E4M3 format.
      bf16_atomics: whether bfloat16 can be added atomically.
    """

    name: str
    capability: int
    shared_bytes: int
    shared_bytes_per_core: int
    threads_per_core: int = 2048
    programs_per_core: int = 32
    registers_per_core: int = 65536
    registers_per_thread: int = 255
    tma: bool = False
    float8: bool = False
    bf16_atomics: bool = False


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("cuda:sm_80", 80, shared_bytes=163 << 10, shared_bytes_per_core=164 << 10),
        Chip("cuda:sm_90", 90, 227 << 10, 228 << 10, tma=True, float8=True, bf16_atomics=True),
        Chip("cuda:sm_100", 100, 227 << 10, 228 << 10, tma=True, float8=True, bf16_atomics=True),
    )
}
"""By the name of the target."""
