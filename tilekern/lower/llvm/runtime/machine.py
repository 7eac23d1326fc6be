"""CPUs that kernels are compiled for: the features that the emitted code depends on."""

from __future__ import annotations

from collections.abc import Mapping

from tilekern.errors import SettingError, TargetError
from tilekern.ir.records import record
from tilekern.lower.llvm import calibration

# The subset of AVX-512 that all CPUs with 512-bit vectors have since 2017.
_AVX512 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_AVX2 = ("avx2", "fma", "f16c")

# Levels of the System V ABI for x86-64 (section 3.1.1, "Processor Architecture"), by LLVM's names of features: the
# features that x86-64-v3 has beyond the first level, and AVX-512.
_V3 = ("avx", "avx2", "bmi", "bmi2", "cx16", "f16c", "fma", "lzcnt", "movbe", "popcnt", "sahf", "sse4.2", "xsave")
_V4 = (*_V3, *_AVX512)
LEVELS: Mapping[str, tuple[str, ...]] = {
    "x86-64-v3": _V3,
    "x86-64-v4": _V4,
    "x86-64-v4+bf16": (*_V4, "avx512bf16", "avx512vnni"),
    "x86-64-v4+bf16+amx": (*_V4, "avx512bf16", "avx512vnni", "amx-tile", "amx-bf16", "amx-int8"),
}
"""Levels that code can be restricted to, each with the features that its code may use, lesser levels included."""

SETTING = "TILEKERN_CPU"
"""The environment variable that names the level; code is for the process's own CPU if it is unset or empty."""


@record
class Machine:
    """A CPU.

    Attributes:
      triple: LLVM's name of the architecture and the system.
      cpu: LLVM's name of the model.
      features: LLVM's names of features, each with a + (present) or a - (missing) in front.
      vector_bytes: the bytes of a vector register.
      registers: the number of vector registers.
      has_bfloat16_dots: True if it multiplies pairs of bfloat16 and adds them up in float32 (AVX512-BF16), faster than
        it multiplies float32.
      has_bfloat16_tiles: True if it multiplies tiles of bfloat16 (AMX), and the system lets this process use them.
      has_int8_tiles: the same of int8 and of uint8, added up in int32.
      has_int16_pairs: True if it multiplies pairs of int16 and adds them up in int32 (AVX2's vpmaddwd, or better).
      has_int8_fours: True if it multiplies fours of 8-bit integers and adds them up in int32 (AVX512-VNNI, AVX-VNNI, or
        ARM's dot products).
      has_byte_tables: True if it looks bytes up in pairs of registers (AVX512-VBMI).
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
    has_int8_fours: bool = False
    has_byte_tables: bool = False

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
        """True if code for this machine runs on `other`."""
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
      tiles: True if the system lets this process use the tile registers of AMX.

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
        return Machine(triple, cpu, listed, vector_bytes=16, registers=32, has_int8_fours="dotprod" in has)
    if not has.issuperset(_AVX512):
        fours = "avxvnni" in has
        return Machine(triple, cpu, listed, 32, 16, has_int16_pairs=True, has_int8_fours=fours)
    # For some models LLVM would split 512-bit vectors, to keep the clock up.
    listed += ",-prefer-256-bit"
    fast = "avx512bf16" in has and "amx-bf16" not in has and cpu not in calibration.CPUS_WITH_SLOW_BFLOAT16
    halves, bytes_ = (tiles and has.issuperset(("amx-tile", name)) for name in ("amx-bf16", "amx-int8"))
    fours, tables = ("avx512vnni" in has), ("avx512vbmi" in has)
    return Machine(
        triple,
        cpu,
        listed,
        64,
        32,
        fast,
        halves,
        bytes_,
        has_int16_pairs=True,
        has_int8_fours=fours,
        has_byte_tables=tables,
    )


def at_level(level: str, triple: str = "x86_64-unknown-linux-gnu") -> Machine:
    """The machine that has the features of a level and no other features.

    Args:
      level: one of `LEVELS`.
      triple: LLVM's name of the architecture and the system.

    Raises:
      SettingError: there is no such level.
    """
    if level not in LEVELS:
        raise SettingError(
            f"{SETTING} names no level of CPUs",
            expected=f"one of {', '.join(map(repr, LEVELS))}, or nothing",
            got=f"{SETTING} = {level!r}",
            fix="name one of these levels, or unset the variable: then code is for the CPU of the process",
        )
    return describe(triple, level.partition("+")[0], dict.fromkeys(LEVELS[level], True), tiles=True)


def restricted(level: str, triple: str, cpu: str, features: Mapping[str, bool], tiles: bool = False) -> Machine:
    """Machine that code is made for: the CPU of the process, or `level` with its features and no other features.

    Args:
      level: one of `LEVELS`, such as "x86-64-v3", or "" for all that the CPU has.
      triple: as for `describe`.
      cpu: as for `describe`.
      features: as for `describe`.
      tiles: as for `describe`.

    Raises:
      SettingError: there is no such level, or the CPU lacks a feature of it.
      TargetError: as for `describe`.
    """
    if not level:
        return describe(triple, cpu, features, tiles)
    machine = at_level(level, triple if triple.startswith("x86_64-") else "x86_64-unknown-linux-gnu")
    usable = {name for name, present in features.items() if present and (tiles or not name.startswith("amx-"))}
    missing = [name for name in LEVELS[level] if name not in usable]
    if machine.triple != triple or missing:
        lacks = f"without {', '.join(missing)}" if machine.triple == triple else f"of {triple}"
        raise SettingError(
            f"this machine lacks the level that {SETTING} names",
            expected=f"a CPU, and a system that permits its tile registers, of {level}",
            got=f"{SETTING} = {level!r}, on the CPU {cpu} {lacks}",
            fix=f"name the level that all your machines have: one of {', '.join(map(repr, LEVELS))}",
        )
    return machine
