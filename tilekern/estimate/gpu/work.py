"""The work of single instructions: units, bytes, and the cycles of matrix products."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tilekern.estimate.gpu.rates import (
    HMMA_LATENCY,
    SHARED_BYTES,
    SHUFFLE_LATENCY,
    SUBPARTITIONS,
    UNIFORM_LATENCY,
    WARP,
    Gpu,
    units,
)
from tilekern.estimate.gpu.sass import ASYNCHRONOUS, Instruction

_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
_ASYNCHRONOUS_SHAPE = re.compile(r"64x(\d+)x(\d+)")
_SYNCHRONOUS_SHAPES = {"16816": (16, 8, 16), "1688": (16, 8, 8), "16832": (16, 8, 32), "16864": (16, 8, 64)}


@dataclass(frozen=True)
class Work:
    """The work of one instruction of one warp.

    Attributes:
      unit: unit that it holds: "fma", "alu", "mufu", "double", "uniform", "shared", "tensor", "issue".
      cycles: cycles for which it holds its quarter of the unit.
      latency: cycles until its result can be used.
      flops: operations of a matrix product; a warpgroup's operations are divided among its four warps.
      tensor: cycles for which it holds the multiprocessor's tensor cores, at the rate of dense products.
      shared: bytes through shared memory and L1.
      memory: bytes from or to global memory.
      known: False for an operation that the model does not know: only its issue counts.
    """

    unit: str
    cycles: float
    latency: float
    flops: float = 0.0
    tensor: float = 0.0
    shared: float = 0.0
    memory: float = 0.0
    known: bool = True


def work(instruction: Instruction, gpu: Gpu) -> Work:
    """The work of an instruction on a GPU."""
    name = instruction.name
    if name in ASYNCHRONOUS:
        return _warpgroup_product(instruction, gpu)
    if name in ("HMMA", "IMMA", "QMMA"):
        return _warp_product(instruction, gpu)
    rate = units(gpu).get(name)
    if rate is None and re.match(r"U[A-Z]", name):  # the uniform datapath: one lane for the warp
        return Work("uniform", 2.0, UNIFORM_LATENCY)
    if rate is None:
        return Work("issue", 1.0, 1.0, known=False)
    unit, cycles, latency = rate
    if unit != "shared" or name in ("LDC", "LDCU", "ULDC"):
        return Work(unit, cycles, latency)
    return _access(instruction, latency)


def _access(instruction: Instruction, latency: float) -> Work:
    name, suffixes = instruction.name, instruction.suffixes
    if name in ("LDSM", "STSM"):
        nbytes = 128.0 * (int(suffixes[-1]) if suffixes[-1] in "24" else 1)
    else:
        nbytes = float(WARP * next((_WIDTHS[s] for s in suffixes if s in _WIDTHS), 4))
    to_memory = name in ("LDG", "STG", "LD", "ST", "ATOM", "ATOMG", "RED", "REDG", "LDGSTS")
    if name == "SHFL":
        latency = SHUFFLE_LATENCY
    # A wavefront takes a cycle of the port that the four quarters share, however few its bytes.
    port = max(nbytes, SHARED_BYTES)
    return Work("shared", 1.0, latency, shared=port, memory=nbytes if to_memory else 0.0)


def _element_rate(instruction: Instruction) -> float:
    """The rate of a matrix product: 2.0 for operands of 8 bits, 0.5 for TF32, 1.0 for all others (whitepapers)."""
    name, suffixes = instruction.name, instruction.suffixes
    if name in ("QGMMA", "IGMMA", "QMMA", "IMMA"):
        return 2.0
    return 0.5 if "TF32" in suffixes else 1.0


def _warpgroup_product(instruction: Instruction, gpu: Gpu) -> Work:
    """A product of four warps: operands in shared memory are read once, and limit products of few columns (Luo)."""
    shape = _ASYNCHRONOUS_SHAPE.search(instruction.opcode)
    if shape is None or gpu.capability != 90:
        return Work("issue", 1.0, 1.0, known=False)
    n, k = int(shape[1]), int(shape[2])
    flops, rate = 2.0 * 64 * n * k, _element_rate(instruction)
    nbytes = 32.0 / k if instruction.name != "BGMMA" else 0.125  # k always spans 32 bytes
    in_registers = len(instruction.operands) > 1 and re.match(r"R\d", instruction.operands[1]) is not None
    shared = n * k * nbytes + (0 if in_registers else 64 * k * nbytes)
    cycles = max(flops / (gpu.flops * rate), shared / SHARED_BYTES)
    return Work("issue", 1.0, 1.0, flops / 4, cycles / 4, shared / 4)


def _warp_product(instruction: Instruction, gpu: Gpu) -> Work:
    """A product of one warp, from registers, on the tensor core of its quarter."""
    shape = next((_SYNCHRONOUS_SHAPES[s] for s in instruction.suffixes if s in _SYNCHRONOUS_SHAPES), None)
    if shape is None:
        return Work("issue", 1.0, 1.0, known=False)
    m, n, k = shape
    flops, rate = 2.0 * m * n * k, _element_rate(instruction) * gpu.flops * gpu.synchronous
    cycles = flops / (rate / SUBPARTITIONS)
    return Work("tensor", cycles, HMMA_LATENCY, flops, cycles / SUBPARTITIONS)
