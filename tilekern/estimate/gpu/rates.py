"""GPUs of the model: clocks, bandwidths and latencies, and the time that an instruction holds a unit.

Sources, by the short names that comments here use:

- guide: CUDA C++ Programming Guide, "Arithmetic Instructions", table of results a cycle and multiprocessor.
- whitepapers: "NVIDIA A100 Tensor Core GPU Architecture", "NVIDIA H100 Tensor Core GPU Architecture", and the data
  sheets of the A100, H100, H200 and B200. Operations a cycle follow from the peak, the clock and
  the number of multiprocessors: 989.4e12 / (132 * 1.83e9) = 4096 on an H100.
- Luo: Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via Microbenchmarking",
  arXiv 2402.13499, and "Dissecting the NVIDIA Hopper Architecture through Microbenchmarking and Multiple Level
  Analysis", arXiv 2501.12084.
- Jia: Jia et al., "Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking", arXiv 1804.06826.
- Chips and Cheese: "Nvidia's H100: Funny L2, and Tons of Bandwidth", 2023.
"""

from __future__ import annotations

from dataclasses import dataclass

SUBPARTITIONS = 4
"""Quarters of a multiprocessor, each with a scheduler that issues an instruction of one warp a cycle (whitepapers)."""

WARP = 32
SHARED_BYTES = 128
"""Bytes of shared memory a cycle: 32 banks of 4 bytes (CUDA C++ Programming Guide, "Shared Memory")."""


PORT_BYTES = 64
"""Bytes a cycle that a multiprocessor gets from the L2 cache if no other one loads (Jia: 64 on Volta)."""


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
      name: the usual name.
      capability: 10 * major + minor.
      cores: multiprocessors.
      ghz: boost clock, at which NVIDIA states peaks. Under load, power limits the clock; the model does not know.
      bandwidth: bytes a second of the memory.
      l2_bandwidth: bytes a second of reads from the L2 cache.
      flops: dense bfloat16 operations of a multiprocessor in a cycle; a multiply-add counts as two.
      fp32_lanes: float32 multiply-adds of a multiprocessor in a cycle.
      synchronous: share of `flops` that products from registers (HMMA) reach.
    """

    name: str
    capability: int
    cores: int
    ghz: float
    bandwidth: float
    l2_bandwidth: float
    flops: int
    fp32_lanes: int
    synchronous: float = 1.0

    @property
    def peak(self) -> float:
        """Dense bfloat16 operations a second."""
        return self.flops * self.cores * self.ghz * 1e9

    def bytes_per_cycle(self, bandwidth: float) -> float:
        """The part of a bandwidth that one multiprocessor has, in bytes a cycle, if all share it."""
        return bandwidth / (self.ghz * 1e9 * self.cores)


# L2: Chips and Cheese measure 5.5 to 6 TB/s on an H100 PCIe with 114 multiprocessors, whose clock falls to 1.395 GHz
# under this load: 36 bytes a cycle and multiprocessor. For the other GPUs the same 36 are assumed: NVIDIA states 5120
# bytes a cycle for the whole L2 of the A100 (whitepaper), 47 for each multiprocessor, and nothing for the B200.
# Luo: products from registers (mma.sync) reach 62.9 % of the peak on an H100, on average.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100", 80, 108, 1.41, 2.039e12, 5.5e12, 2048, 64),
        Gpu("H100", 90, 132, 1.83, 3.352e12, 8.7e12, 4096, 128, synchronous=0.629),
        Gpu("H200", 90, 132, 1.83, 4.8e12, 8.7e12, 4096, 128, synchronous=0.629),
        Gpu("B200", 100, 148, 1.85, 7.672e12, 9.9e12, 8192, 128),
    )
}

# Cycles until a result can be used.
ALU_LATENCY = 4  # Jia: 4 for most arithmetic since Volta; Luo finds no other on Hopper
MUFU_LATENCY = 18  # Jia: 14 and more beyond the pipe's own 4 to 8 cycles
UNIFORM_LATENCY = 10  # Jia, "Turing" (arXiv 1903.07486): uniform results reach vector instructions after about 10
SHUFFLE_LATENCY = 23  # Jia: 22 to 25
SHARED_LATENCY = 29  # Luo: 29.0 on the H100
L2_LATENCY = 262  # Luo: 261.5 to 263 on A100 and H100
MEMORY_LATENCY = 479  # Luo: 478.8 on the H100, 466 on the A100
TMA_LATENCY = 170  # Luo (2501.12084): a copy by TMA takes about 170 cycles more than a load
HMMA_LATENCY = 33  # Luo: mma.m16n8k16, 33 on A100, 32 on H100
PRODUCT_LATENCY = 16  # Luo: wgmma m64n8k16 takes 13 to 18 cycles, of which the product itself takes 4
BARRIER_LATENCY = 20  # of bar.sync after the last arrival; the order of Jia's measurements
FENCE_LATENCY = 20

_FMA = "FADD FMUL FFMA FADD32I FMUL32I FFMA32I HADD2 HMUL2 HFMA2 FSWZADD"
_FMA_TWICE = "FADD2 FMUL2 FFMA2"  # two float32 operations a lane, from Blackwell on
_INTEGER_MULTIPLY = "IMAD IMUL IDP IDP4A"
_ALU = (
    "IADD3 IADD IADD2 VIADD VIADDMNMX LOP3 LOP SHF SHL SHR LEA SEL SGXT PRMT MOV ISETP FSETP FMNMX FMNMX3 FSEL FCHK "
    "FSET IMNMX VIMNMX VIMNMX3 IABS BMSK PLOP3 P2R R2P CS2R F2FP I2FP F2IP ICMP VABSDIFF VABSDIFF4 HSETP2 HMNMX2 HSET2 "
    "VHMNMX IADD64 VOTE ELECT PSETP I2I I2IP LEPC"
)
_XU = "MUFU F2F F2I I2F FRND POPC FLO BREV"
_DOUBLE = "DADD DMUL DFMA DSETP DMNMX"
_SPECIAL_READ = "S2R S2UR"
_UNIFORM = "R2UR VOTEU REDUX CREDUX UR2UR"
_SHARED = "LDS STS LDSM STSM ATOMS SHFL LDL STL LDT MATCH LDTM STTM LDC LDCU ULDC STAS"
_GLOBAL = "LDG STG LD ST ATOM ATOMG RED REDG LDGSTS TEX SULD SUST SUATOM"
_CONTROL = (
    "BRA BRX BRXU JMP EXIT CALL RET BSSY BSYNC BREAK BAR MEMBAR FENCE DEPBAR LDGDEPBAR NOP CCTL CCTLL UTMALDG UTMASTG "
    "UTMAREDG UTMAPF UTMACMDFLUSH UTMACCTL WARPGROUP WARPSYNC USETMAXREG SYNCS ARRIVES ERRBAR NANOSLEEP YIELD KILL BPT "
    "ACQBULK PREEXIT UCGABAR_ARV UCGABAR_WAIT BMOV UTCHMMA UTCQMMA UTCBAR UTCCP UTCATOMSWS WARPGROUPSET GETLMEMBASE "
    "HGMMA QGMMA IGMMA BGMMA UBLKCP UTCIMMA UTCOMMA UTCSHIFT RPCMOV LDCGATE ENDCOLLECTIVE CGAERRBAR"
)


def _lanes(names: str, pipe: str, lanes: int, latency: int) -> dict[str, tuple[str, float, int]]:
    """For each name the pipe, the cycles for which a warp holds its quarter of the pipe, and the latency in cycles.

    `lanes` are results of a multiprocessor in a cycle.
    """
    return dict.fromkeys(names.split(), (pipe, WARP * SUBPARTITIONS / lanes, latency))


def units(gpu: Gpu) -> dict[str, tuple[str, float, int]]:
    """Maps each SASS opcode to its unit, the cycles for which a warp holds the unit, and the latency in cycles.

    Example: on an H100, "FADD" maps to ("fma", 1.0, 4).
    The module names the sources. Opcodes that are missing are unknown to the model.
    """
    fp32 = gpu.fp32_lanes
    return {
        **_lanes(_FMA, "fma", fp32, ALU_LATENCY),
        **_lanes(_FMA_TWICE, "fma", fp32 // 2, ALU_LATENCY),
        **_lanes(_INTEGER_MULTIPLY, "fma", 64, ALU_LATENCY),  # guide: 64 for integer multiplications
        **_lanes(_ALU, "alu", 64, ALU_LATENCY),  # guide: 64 for additions, comparisons, logic, shifts, packing
        **_lanes(_XU, "mufu", 16, MUFU_LATENCY),  # guide: 16 for exp2, log2, rcp, rsqrt, sin, cos, popc
        **_lanes(_DOUBLE, "double", 64 if gpu.capability == 90 else 32, 8),  # guide: 64 on 9.0, 32 on 8.0
        **_lanes(_SPECIAL_READ, "uniform", 16, SHARED_LATENCY),
        **_lanes(_UNIFORM, "uniform", 64, UNIFORM_LATENCY),
        **_lanes(_SHARED, "shared", 128, SHARED_LATENCY),
        **_lanes(_GLOBAL, "shared", 128, L2_LATENCY),
        **_lanes(_CONTROL, "issue", 128, 1),
    }
