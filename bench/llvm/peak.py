"""The machine's peak: a loop of independent multiply-adds on full vectors or tiles, with all operands in registers."""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Literal

import ml_dtypes
import numpy as np

from bench.result import Result
from bench.timing import by_round, take_turns
from tilekern.errors import DependencyError, TargetError
from tilekern.ir.types import BF16
from tilekern.lower.llvm.compile import toolchain
from tilekern.lower.llvm.gemm.tiles import BLOCK, TILE, Strides, TileKernel
from tilekern.lower.llvm.runtime.machine import Machine

DType = Literal["float32", "bfloat16"]

THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
"""The number of threads of XLA's pool."""

_SECONDS = 0.1
_TILE_SUMS = 4  # tile registers that hold sums


def measure() -> Iterator[Result]:
    """All results of this file."""
    machine = host()
    if machine is None:
        return
    names = {"1 thread": 1, f"{THREADS} threads": THREADS}
    dtypes: tuple[DType, ...] = ("float32", "bfloat16") if machine.multiplies_bfloat16 else ("float32",)
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
def peak(dtype: str, threads: int = THREADS, seconds: float = _SECONDS) -> Peak | None:
    """The loop for a dtype; float32's for bfloat16 without products of bfloat16; None without a machine."""
    machine = host()
    if machine is None:
        return None
    halved = dtype == "bfloat16" and machine.multiplies_bfloat16
    return Peak(machine, "bfloat16" if halved else "float32", threads, seconds)


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


class Peak:
    """The loop, compiled.

    Attributes:
      flops: the operations of a call, on all threads together; a multiply-add counts as two.
    """

    def __init__(self, machine: Machine, dtype: DType, threads: int, seconds: float = _SECONDS) -> None:
        llvm = toolchain.llvmlite()
        target = llvm.Target.from_triple(machine.triple)
        options = target.create_target_machine(cpu=machine.cpu, features=machine.features, opt=2, jit=True)
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(loop(machine, dtype)), options)
        self._engine.finalize_object()
        address = self._engine.get_function_address("peak")
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_void_p)(address)
        numbers = np.random.default_rng(0).standard_normal((threads, 1024), np.float32)
        self._operands = numbers.astype(ml_dtypes.bfloat16) if dtype == "bfloat16" else numbers
        self._pool = ThreadPoolExecutor(threads)
        self._iterations = 10_000
        self.seconds()
        self._iterations = max(1, int(self._iterations * seconds / self.seconds()))
        of_iteration = 2 * machine.lanes * (1 + (dtype == "bfloat16")) * _chains(machine)
        if dtype == "bfloat16" and machine.has_bfloat16_tiles:
            of_iteration = _TILE_SUMS * 2 * 16 * 16 * 32
        self.flops = float(of_iteration * self._iterations * threads)

    def seconds(self) -> float:
        """Make one call, and return the seconds that it took."""
        start = time.perf_counter()
        # ctypes lets go of Python's lock, so the threads run side by side.
        list(self._pool.map(lambda row: self._function(self._iterations, row.ctypes.data), self._operands))
        return time.perf_counter() - start


def loop(machine: Machine, dtype: DType) -> str:
    """LLVM IR of `void peak(i64 iterations, ptr operands)`; the sums are stored after both operands.

    For bfloat16 the machine must have products of pairs, or of tiles.
    """
    if dtype == "bfloat16" and machine.has_bfloat16_tiles:
        return _loop_of_tiles()
    sums = f"<{machine.lanes} x float>"
    if dtype == "bfloat16":
        factors, function = (
            f"<{2 * machine.lanes} x bfloat>",
            f"@llvm.x86.avx512bf16.dpbf16ps.{machine.vector_bytes * 8}",
        )
        operands, parameters = "{s} {total}, {f} %x, {f} %y", f"{sums}, {factors}, {factors}"
    else:
        factors, function = sums, f"@llvm.fma.v{machine.lanes}f32"
        operands, parameters = "{f} %x, {f} %y, {s} {total}", f"{sums}, {sums}, {sums}"
    count = range(_chains(machine))
    phis = [f"  %a{n} = phi {sums} [zeroinitializer, %entry], [%b{n}, %loop]" for n in count]
    calls = [f"  %b{n} = call {sums} {function}({operands.format(s=sums, f=factors, total=f'%a{n}')})" for n in count]
    totals = [f"  %s{n} = fadd {sums} %{f's{n - 1}' if n > 1 else 'b0'}, %b{n}" for n in count[1:]]
    loads = [
        f"  %x = load {factors}, ptr %operands, align 2",
        f"  %next = getelementptr i8, ptr %operands, i64 {machine.vector_bytes}",
        f"  %y = load {factors}, ptr %next, align 2",
    ]
    stores = [
        *totals,
        f"  %result = getelementptr i8, ptr %operands, i64 {2 * machine.vector_bytes}",
        f"  store {sums} %s{count[-1]}, ptr %result, align 2",
    ]
    return _program(loads, [*phis, *calls], stores, [f"declare {sums} {function}({parameters})"])


def _loop_of_tiles() -> str:
    """Four tiles of sums, two of each operand, as in a product of 32 rows and columns."""
    kernel = TileKernel(BF16, BLOCK, BLOCK, TILE, Strides(0, 0, 0, 0), adds=False)
    escaped = "".join(f"\\{byte:02X}" for byte in kernel.sizes().tobytes())
    zeros = [f"  call void @llvm.x86.tilezero(i8 {n})" for n in range(_TILE_SUMS)]
    loads = [f"  call void @llvm.x86.tileloadd64(i8 {n}, ptr %operands, i64 64)" for n in range(_TILE_SUMS, 8)]
    products = [f"  call void @llvm.x86.tdpbf16ps(i8 {n}, i8 {4 + n // 2}, i8 {6 + n % 2})" for n in range(_TILE_SUMS)]
    stores = [f"  call void @llvm.x86.tilestored64(i8 {n}, ptr %result, i64 64)" for n in range(_TILE_SUMS)]
    before = ["  call void @llvm.x86.ldtilecfg(ptr @sizes)", *zeros, *loads]
    after = [
        "  %result = getelementptr i8, ptr %operands, i64 1024",
        *stores,
        "  call void @llvm.x86.tilerelease()",
    ]
    globals_ = [
        f'@sizes = private constant [64 x i8] c"{escaped}", align 64',
        "declare void @llvm.x86.ldtilecfg(ptr)",
        "declare void @llvm.x86.tilezero(i8)",
        "declare void @llvm.x86.tileloadd64(i8, ptr, i64)",
        "declare void @llvm.x86.tdpbf16ps(i8, i8, i8)",
        "declare void @llvm.x86.tilestored64(i8, ptr, i64)",
        "declare void @llvm.x86.tilerelease()",
    ]
    return _program(before, products, after, globals_)


def _program(before: list[str], repeated: list[str], after: list[str], globals_: list[str]) -> str:
    """LLVM IR of a function `peak` that runs `before`, repeats some lines, and runs `after`; then `globals_`."""
    lines = [
        "define void @peak(i64 %iterations, ptr %operands) {",
        "entry:",
        *before,
        "  br label %loop",
        "loop:",
        "  %i = phi i64 [0, %entry], [%more, %loop]",
        *repeated,
        "  %more = add i64 %i, 1",
        "  %again = icmp slt i64 %more, %iterations",
        "  br i1 %again, label %loop, label %done",
        "done:",
        *after,
        "  ret void",
        "}",
        *globals_,
    ]
    return "\n".join(lines)


def _chains(machine: Machine) -> int:
    """The number of sums side by side: an instruction takes 4 to 6 cycles, and 2 to 4 begin in each cycle."""
    return machine.registers * 3 // 4
