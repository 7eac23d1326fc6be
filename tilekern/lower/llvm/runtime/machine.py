"""The CPUs that the LLVM backend compiles for: their instructions, as far as the code it emits depends on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilekern.errors import TargetError

# The part of AVX-512 that every CPU with vectors of 512 bits has since 2017.
_AVX512 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_AVX2 = ("avx2", "fma", "f16c")
# Their products of pairs of bfloat16 start every other cycle, multiply-adds of float32 twice a cycle: 85, 172 GFLOP/s
# on a core of an Emerald Rapids. A Sapphire Rapids has the same cores. A virtual machine may show another number of
# the model, but these cores have AMX: 108, 183 GFLOP/s on one that LLVM takes for a Rocket Lake.
_SLOW_BFLOAT16 = ("sapphirerapids", "emeraldrapids")


@dataclass(frozen=True)
class Machine:
    """A CPU.

    Attributes:
      triple: LLVM's name of architecture and system.
      cpu: LLVM's name of the model.
      features: LLVM's names of what it has, each with a + or a - before.
      vector_bytes: the width of a vector register.
      registers: how many of them there are.
      has_bfloat16: whether it multiplies pairs of bfloat16 and adds them up in float32 (AVX512-BF16), and faster than
        float32.
      has_pairs: whether it does so with int16 in int32 (AVX2's vpmaddwd, or better).
    """

    triple: str
    cpu: str
    features: str
    vector_bytes: int
    registers: int
    has_bfloat16_dots: bool = False
    has_int16_pairs: bool = False

    @property
    def lanes(self) -> int:
        """Numbers of 32 bits in a vector."""
        return self.vector_bytes // 4

    @property
    def is_x86(self) -> bool:
        """Whether it is an x86-64; otherwise it is a 64-bit ARM."""
        return self.triple.startswith("x86_64-")

    def runs_on(self, other: Machine) -> bool:
        """Whether code for this machine runs on the other one."""
        needed = {feature for feature in self.features.split(",") if feature.startswith("+")}
        fits = self.vector_bytes <= other.vector_bytes and needed <= set(other.features.split(","))
        return self == other or (self.triple == other.triple and fits)


def describe(triple: str, cpu: str, features: Mapping[str, bool]) -> Machine:
    """A machine by what LLVM says of it.

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
    # LLVM would split vectors of 512 bits for some models, to keep their clock up.
    listed += ",-prefer-256-bit"
    fast = "avx512bf16" in has and "amx-bf16" not in has and cpu not in _SLOW_BFLOAT16
    return Machine(triple, cpu, listed, 64, 32, has_bfloat16_dots=fast, has_int16_pairs=True)
