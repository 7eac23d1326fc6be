"""A public record of the machine that a target names, for schedules."""

from __future__ import annotations

from dataclasses import dataclass

from tilekern.errors import checked
from tilekern.lower.mosaic.chip import CHIPS as TPUS
from tilekern.lower.mosaic.chip import LANES, PORTABLE, SUBLANES
from tilekern.lower.target import Target, resolve
from tilekern.lower.triton.chip import CHIPS as GPUS
from tilekern.lower.triton.chip import chip_of
from tilekern.lower.triton.compile import toolchain
from tilekern.lower.triton.gluon.clusters import LARGEST


@dataclass(frozen=True)
class Device:
    """A machine to choose blocks for; get it by `tk.device`, or as the parameter `device` of a schedule.

    0 stands for a number that the machine does not have, or that is not known.

    Attributes:
      target: its name, "cuda:sm_90".
      platform: JAX's name of the platform: "cpu", "cuda", "rocm" or "tpu".
      cores: multiprocessors of a GPU, or TensorCores of one device of JAX on a TPU.
      fast_memory: bytes that one program may take, of shared memory on a GPU, of vector memory on a TPU.
      registers: 32-bit registers of a multiprocessor of a GPU.
      lanes: threads of a warp on a GPU, elements of a row of a vector register on a TPU.
      sublanes: rows of a vector register of a TPU, each of `lanes` elements of 32 bits.
      matrix_size: rows and columns of a matrix unit of a TPU.
      gpu: the GPU of the target that `cores`, `bandwidth` and `flops` are of, "H100 SXM"; "" on other platforms.
      matrix_unit: the instruction by which a GPU multiplies matrices: "mma", "wgmma" or "tcgen05", "mfma" on AMD's; ""
        elsewhere. "mma" and "mfma" take their operands from registers, the others from shared memory.
      bandwidth: bytes a second that the memory of a GPU delivers at most.
      flops: multiplications and additions of bfloat16 matrices that a GPU does in a second at most.
      emitter: "gluon" if a program's blocks are for one warpgroup of a warp-specialised GPU program, which shares its
        loads with others; "triton" for other GPU programs, "" elsewhere.
      cluster: thread blocks that may compute a program together, `num_ctas`: 2 for the emitter "gluon" if the installed
        Triton has multicast for it, 1 otherwise.

    Example:
      >>> import tilekern as tk
      >>> tk.device("cuda:sm_90").cores
      132
    """

    target: str
    platform: str
    cores: int = 0
    fast_memory: int = 0
    registers: int = 0
    lanes: int = 0
    sublanes: int = 0
    matrix_size: int = 0
    gpu: str = ""
    matrix_unit: str = ""
    bandwidth: float = 0
    flops: float = 0
    emitter: str = ""
    cluster: int = 1


def device_of(target: Target) -> Device:
    """The record of a target."""
    if target.name in GPUS:
        chip, gluon = chip_of(target), target.emitter == "gluon"
        return Device(
            target.name,
            target.platform,
            cores=chip.cores,
            fast_memory=chip.shared_bytes,
            registers=chip.registers_per_core,
            lanes=chip.vendor.lanes,
            gpu=chip.gpu,
            matrix_unit=chip.matrix_unit,
            bandwidth=chip.bandwidth,
            flops=chip.flops,
            emitter="gluon" if gluon else "triton",
            cluster=LARGEST if gluon and toolchain.has_clusters() else 1,
        )
    if target.name in TPUS:
        tpu = PORTABLE if target.portable else TPUS[target.name]
        memory, side = tpu.vmem_budget, tpu.matrix_size
        return Device(target.name, target.platform, tpu.cores, memory, 0, LANES, SUBLANES, side)
    return Device(target.name, target.platform)


@checked
def device(target: str) -> Device:
    """The record of the machine that a target names.

    Args:
      target: "cpu", "cpu:xla", "cpu:llvm", "cuda:sm_90", "tpu:v5e" or another target.

    Raises:
      tilekern.errors.TargetError: there is no such target.
    """
    return device_of(resolve(target))
