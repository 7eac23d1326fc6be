"""CPUs that kernels are compiled for: the features that the emitted code depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilekern.errors import TargetError
from tilekern.lower.llvm import calibration

# The subset of AVX-512 that all CPUs with 512-bit vectors have since 2017.
_AVX512 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_AVX2 = ("avx2", "fma", "f16c")


@dataclass(frozen=True)
class Machine:
    """A CPU.

    Attributes:
      triple: LLVM's name of the architecture and the system.
      cpu: LLVM's name of the model.
      features: LLVM's names of features, each with a + (present) or a - (missing) in front.
      vector_bytes: the bytes of a vector register.
      registers: the number of vector registers.
      has_bfloat16_dots: whether it multiplies pairs of bfloat16 and adds them up in float32 (AVX512-BF16), faster than
        it multiplies float32.
      has_bfloat16_tiles: whether it multiplies tiles of bfloat16 (AMX), and the system lets this process use them.
      has_int8_tiles: the same of int8 and of uint8, added up in int32.
      has_int16_pairs: whether it multiplies pairs of int16 and adds them up in int32 (AVX2's vpmaddwd, or better).
    """

    triple: str
    cpu: str
    features: str
    vector_bytes: int
    registers: int
    has_bfloat16_dots: bool = False
    has_bfloat16_tiles: bool = False
    has_int8_tiles: bool = False
    has_int16_pairs: bool = False

    @property
    def lanes(self) -> int:
        """32-bit elements of a vector."""
        return self.vector_bytes // 4

    @property
    def multiplies_bfloat16(self) -> bool:
        """True if it multiplies bfloat16 faster than float32: pairs, or tiles."""
        return self.has_bfloat16_dots or self.has_bfloat16_tiles

    @property
    def casts_to_bfloat16(self) -> bool:
        """True if one instruction rounds to bfloat16, and subnormal numbers to 0 (AVX512-BF16)."""
        return self.has_bfloat16_dots or (self.has_bfloat16_tiles and "+avx512bf16" in self.features)

    @property
    def is_x86(self) -> bool:
        """True if it is an x86-64. Otherwise it is a 64-bit ARM."""
        return self.triple.startswith("x86_64-")

    def runs_on(self, other: Machine) -> bool:
        """True if code for this machine runs on the other one."""
        needed = {feature for feature in self.features.split(",") if feature.startswith("+")}
        fits = self.vector_bytes <= other.vector_bytes and needed <= set(other.features.split(","))
        tiles = ((m.has_bfloat16_tiles, m.has_int8_tiles) for m in (self, other))
        fits = fits and all(mine <= its for mine, its in zip(*tiles, strict=True))
        return self == other or (self.triple == other.triple and fits)


def describe(triple: str, cpu: str, features: Mapping[str, bool], tiles: bool = False) -> Machine:
    """The machine with LLVM's names and features.

    Args:
      triple: LLVM's name of the architecture and the system.
      cpu: LLVM's name of the model.
      features: LLVM's names of features.
      tiles: whether the system lets this process use the tile registers of AMX.

    Raises:
      TargetError: it is neither an x86-64 with AVX2 nor a 64-bit ARM with NEON, or its system is Windows.
    """
    has = {name for name, there in features.items() if there}
    x86, arm = triple.startswith("x86_64-"), triple.startswith(("aarch64-", "arm64"))
    if "windows" in triple or not ((x86 and has.issuperset(_AVX2)) or (arm and features.get("neon", True))):
        raise TargetError(
            "CPU without the needed features",
            expected="x86-64 with AVX2, FMA and F16C, or 64-bit ARM with NEON, on Linux or macOS",
            got=f"triple={triple}, cpu={cpu}",
            fix="use the target xla",
        )
    listed = ",".join(f"{'+' if there else '-'}{name}" for name, there in sorted(features.items()))
    if arm:
        return Machine(triple, cpu, listed, vector_bytes=16, registers=32)
    if not has.issuperset(_AVX512):
        return Machine(triple, cpu, listed, vector_bytes=32, registers=16, has_int16_pairs=True)
    # For some models LLVM would split 512-bit vectors, to keep the clock up.
    listed += ",-prefer-256-bit"
    fast = "avx512bf16" in has and "amx-bf16" not in has and cpu not in calibration.CPUS_WITH_SLOW_BFLOAT16
    halves, bytes_ = (tiles and has.issuperset(("amx-tile", name)) for name in ("amx-bf16", "amx-int8"))
    return Machine(triple, cpu, listed, 64, 32, fast, halves, bytes_, has_int16_pairs=True)
