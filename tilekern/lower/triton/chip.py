"""Hardware limits and features of GPUs: of NVIDIA's by compute capability, of AMD's by architecture."""

from __future__ import annotations

from dataclasses import replace

from tilekern.ir.records import record
from tilekern.lower.backend import Target
from tilekern.lower.triton.vendor import AMD, NVIDIA, Vendor

MAX_THREADS = 1024
"""Threads of a program: CUDA C++ Programming Guide, "Maximum number of threads per block". AMD's is the same: LLVM,
"User Guide for AMDGPU Backend", amdgpu-flat-work-group-size."""


@record
class Chip:
    """One compute capability of NVIDIA, or one architecture of AMD.

    Source of NVIDIA's limits: CUDA C++ Programming Guide, "Compute Capabilities", table "Technical Specifications per
    Compute Capability", and `cuda_occupancy.h` of the CUDA toolkit; of the dtypes: PTX ISA, "Alternate Floating-Point
    Data Formats". Numbers of multiprocessors and bandwidths come from XLA's records of GPUs
    (xla/backends/gpu/target_config/specs), peaks from NVIDIA's data sheets and architecture whitepapers.

    Source of AMD's limits: ROCm documentation, "AMD GPU specifications" (compute units, LDS, VGPR file); LLVM, "User
    Guide for AMDGPU Backend", and `AMDGPUBaseInfo.cpp` (waves, registers); data sheets of the MI300X and the MI355X
    (bandwidths and peaks).

    Attributes:
      name: name of the target, "cuda:sm_90".
      capability: 10 * major + minor, 90; of AMD the digits of the architecture, 942.
      gpu: the common GPU that `cores`, `bandwidth` and `flops` are of.
      cores: number of its multiprocessors.
      bandwidth: of its memory, in bytes a second.
      flops: multiplications and additions of dense bfloat16 matrices a second, with sums in float32.
      matrix_unit: instruction that multiplies matrices: "mma" takes operands from registers, "wgmma" and "tcgen05" from
        shared memory, and "wgmma" runs beside other instructions; "tcgen05" has its sums in tensor memory. AMD's "mfma"
        takes operands from registers.
      shared_bytes: limit of shared memory for one program.
      shared_bytes_per_core: shared memory of a multiprocessor.
      threads_per_core: limit of resident threads on a multiprocessor.
      programs_per_core: limit of resident programs on a multiprocessor.
      registers_per_core: 32-bit registers of a multiprocessor.
      registers_per_thread: limit of 32-bit registers for one thread.
      ptx_version: 10 * major + minor of the PTX ISA to write: the first with this target, but 8.6 at least.
      tma: True if the Tensor Memory Accelerator copies operands of matrix products.
      float8: True if the GPU converts from and to the E4M3 format.
      bf16_atomics: True if the GPU adds bfloat16 atomically.
      vendor: the maker.
    """

    name: str
    capability: int
    gpu: str
    cores: int
    bandwidth: float
    flops: float
    matrix_unit: str
    shared_bytes: int
    shared_bytes_per_core: int
    threads_per_core: int = 2048
    programs_per_core: int = 32
    registers_per_core: int = 65536
    registers_per_thread: int = 255
    ptx_version: int = 86
    tma: bool = False
    float8: bool = False
    bf16_atomics: bool = False
    vendor: Vendor = NVIDIA

    @property
    def architecture(self) -> str:
        """The compiler's name of the GPU: "sm90", "gfx942"."""
        return f"gfx{self.capability}" if self.vendor is AMD else f"sm{self.capability}"

    @property
    def largest_warps(self) -> int:
        """The most warps of a program: each has 1024 threads at most."""
        return MAX_THREADS // self.vendor.lanes


_AMPERE = Chip(
    name="cuda:sm_80",
    capability=80,
    gpu="A100 SXM 80 GB",
    cores=108,
    bandwidth=2.039e12,
    flops=312e12,
    matrix_unit="mma",
    shared_bytes=163 << 10,
    shared_bytes_per_core=164 << 10,
)

# GPUs of workstations and servers for inference: less shared memory, and fewer threads.
_SMALL = replace(_AMPERE, shared_bytes=99 << 10, shared_bytes_per_core=100 << 10, threads_per_core=1536)

_HOPPER = Chip(
    name="cuda:sm_90",
    capability=90,
    gpu="H100 SXM",
    cores=132,
    bandwidth=3.352e12,
    flops=989e12,
    matrix_unit="wgmma",
    shared_bytes=227 << 10,
    shared_bytes_per_core=228 << 10,
    tma=True,
    float8=True,
    bf16_atomics=True,
)

_BLACKWELL = replace(
    _HOPPER,
    name="cuda:sm_100",
    capability=100,
    gpu="B200",
    cores=148,
    bandwidth=7.672e12,
    flops=2250e12,
    matrix_unit="tcgen05",
)

# A compute unit is a multiprocessor, its LDS the shared memory. It has four SIMDs, each of which holds 8 waves of 64
# threads, and 512 vector registers for each of its lanes, which a single thread can use.
_CDNA3 = Chip(
    name="rocm:gfx942",
    capability=942,
    gpu="MI300X",
    cores=304,
    bandwidth=5.3e12,
    flops=1307e12,
    matrix_unit="mfma",
    shared_bytes=64 << 10,
    shared_bytes_per_core=64 << 10,
    programs_per_core=16,
    registers_per_core=131072,
    registers_per_thread=512,
    bf16_atomics=True,
    vendor=AMD,
)

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _AMPERE,
        replace(
            _SMALL,
            name="cuda:sm_86",
            capability=86,
            gpu="RTX A6000",
            cores=84,
            bandwidth=0.768e12,
            flops=155e12,
            programs_per_core=16,
        ),
        replace(
            _SMALL,
            name="cuda:sm_89",
            capability=89,
            gpu="L40S",
            cores=142,
            bandwidth=0.864e12,
            flops=362e12,
            programs_per_core=24,
            float8=True,
        ),
        _HOPPER,
        _BLACKWELL,
        # PTX ISA 8.8 introduced sm_103a, 8.7 sm_120a ("PTX ISA release history").
        replace(
            _BLACKWELL,
            name="cuda:sm_103",
            capability=103,
            gpu="B300",
            cores=158,
            bandwidth=7.936e12,
            ptx_version=88,
        ),
        # It has the Tensor Memory Accelerator, but its matrix products take operands from registers, which loads by
        # pointers fill as well.
        replace(
            _SMALL,
            name="cuda:sm_120",
            capability=120,
            gpu="RTX PRO 6000 Blackwell",
            cores=188,
            bandwidth=1.792e12,
            flops=504e12,
            programs_per_core=24,
            ptx_version=87,
            float8=True,
            bf16_atomics=True,
        ),
        _CDNA3,
        # Its 8-bit floats follow OCP. E4M3 of gfx942 is float8_e4m3fnuz, whose bit patterns mean other numbers.
        replace(
            _CDNA3,
            name="rocm:gfx950",
            capability=950,
            gpu="MI355X",
            cores=256,
            bandwidth=8e12,
            flops=2517e12,
            shared_bytes=160 << 10,
            shared_bytes_per_core=160 << 10,
            float8=True,
        ),
    )
}
"""Chips by the name of their target."""

PORTABLE = replace(
    _AMPERE,
    shared_bytes=_SMALL.shared_bytes,
    shared_bytes_per_core=_SMALL.shared_bytes_per_core,
)
"""NVIDIA's capability 8.0 with the least shared memory of all: a program for it fits every later GPU of NVIDIA."""


def chip_of(target: Target) -> Chip:
    """The chip to lower for: with the limits of all GPUs if the code must run on every later GPU."""
    return PORTABLE if target.portable else CHIPS[target.name]
