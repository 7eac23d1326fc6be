"""The machine's peak, as results of the benchmark, and the share of it that programs reach."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import cache

from bench.result import Result
from bench.timing import by_round, take_turns
from tilekern.errors import DependencyError, TargetError
from tilekern.estimate.cpu.peak import SECONDS, THREADS, DType, Peak
from tilekern.lower.llvm.compile import toolchain
from tilekern.lower.llvm.runtime.machine import Machine


def measure() -> Iterator[Result]:
    """All results of this file."""
    machine = host()
    if machine is None:
        return
    names = {"1 thread": 1, f"{THREADS} threads": THREADS}
    bfloat16: tuple[DType, ...] = ("bfloat16",) if machine.multiplies_bfloat16 else ()
    int8: tuple[DType, ...] = ("int8",) if has_fours(machine) else ()
    dtypes: tuple[DType, ...] = ("float32", *bfloat16, *int8)
    peaks = {f"peak {dtype}, {n}": timed for dtype in dtypes for n, t in names.items() if (timed := peak(dtype, t))}
    times = take_turns({name: timed.seconds for name, timed in peaks.items()})
    for name, timed in peaks.items():
        yield Result(name, "GFLOP/s", timed.flops / statistics.median(times[name]) / 1e9, None, "value")


@cache
def host() -> Machine | None:
    """This machine; None, and a message once, if the backend has no code for it."""
    try:
        return toolchain.host()
    except (DependencyError, TargetError) as error:
        print(f"bench: nothing of cpu:llvm is measured: {error}", file=sys.stderr)
        return None


@cache
def peak(dtype: str, threads: int = THREADS, seconds: float = SECONDS) -> Peak | None:
    """The loop for a dtype; float32's for bfloat16 without products of bfloat16; None without a machine.

    None, too, for int8 without products of fours.
    """
    machine = host()
    if machine is None:
        return None
    if dtype == "int8":
        return Peak(machine, "int8", threads, seconds) if has_fours(machine) else None
    halved = dtype == "bfloat16" and machine.multiplies_bfloat16
    return Peak(machine, "bfloat16" if halved else "float32", threads, seconds)


def has_fours(machine: Machine) -> bool:
    """True if int8 is multiplied in fours of x86-64, whose peak is measured."""
    return machine.has_int8_fours and machine.is_x86 and not machine.has_int8_tiles


def share(
    name: str, flops: float, ours: Sequence[float], loop: Peak, loops: Sequence[float], limit: float | None
) -> Result:
    """The share of the peak that a program reaches, by the seconds of both in every round.

    Args:
      name: the name of the result.
      flops: the operations of a call of the program.
      ours: the seconds of a call in each round.
      loop: the loop of the peak.
      loops: the seconds of a call of the loop in each round.
      limit: the least share that is an aim; None if there is no aim.
    """
    reached = flops / statistics.median(ours) / 1e9
    best = loop.flops / statistics.median(loops) / 1e9
    return Result(name, "GFLOP/s", reached, limit, "share", best, by_round(loops, ours) * flops / loop.flops)
