"""The machine's peak: a loop of independent multiply-adds on full vectors or tiles, with all operands in registers."""

from __future__ import annotations

import ctypes
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import ml_dtypes
import numpy as np

from tilekern.ir.types import BF16
from tilekern.lower.llvm.compile import toolchain
from tilekern.lower.llvm.gemm.tiles import BLOCK, TILE, Strides, TileKernel
from tilekern.lower.llvm.runtime.machine import Machine

DType = Literal["float32", "bfloat16", "int8"]

THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
"""The number of threads of XLA's pool."""

SECONDS = 0.1
"""The time that a call of the loop takes."""

_TILE_SUMS = 4  # tile registers that hold sums

_PER_WORD: dict[DType, int] = {"float32": 1, "bfloat16": 2, "int8": 4}
"""Products that are added up in a lane of 32 bits by one instruction."""


class Peak:
    """The loop, compiled.

    Attributes:
      flops: the operations of a call, on all threads together; a multiply-add counts as two.
    """

    def __init__(self, machine: Machine, dtype: DType, threads: int, seconds: float = SECONDS) -> None:
        llvm = toolchain.llvmlite()
        target = llvm.Target.from_triple(machine.triple)
        options = target.create_target_machine(cpu=machine.cpu, features=machine.features, opt=2, jit=True)
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(loop(machine, dtype)), options)
        self._engine.finalize_object()
        address = self._engine.get_function_address("peak")
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_void_p)(address)
        numbers = np.random.default_rng(0).standard_normal((threads, 1024), np.float32)
        self._operands = numbers.astype(ml_dtypes.bfloat16) if dtype == "bfloat16" else numbers  # bytes have any bits
        self._pool = ThreadPoolExecutor(threads)
        self._iterations = 10_000
        self.seconds()
        self._iterations = max(1, int(self._iterations * seconds / self.seconds()))
        of_iteration = 2 * machine.lanes * _PER_WORD[dtype] * _chains(machine)
        if dtype == "bfloat16" and machine.has_bfloat16_tiles:
            of_iteration = _TILE_SUMS * 2 * 16 * 16 * 32
        self.flops = float(of_iteration * self._iterations * threads)

    def seconds(self) -> float:
        """Make one call, and return the seconds that it took."""
        start = time.perf_counter()
        # ctypes lets go of Python's lock, so the threads run side by side.
        list(self._pool.map(self._run, (row.ctypes.data for row in self._operands)))
        return time.perf_counter() - start

    def _run(self, operands: int) -> None:
        self._function(self._iterations, operands)


def loop(machine: Machine, dtype: DType) -> str:
    """LLVM IR of `void peak(i64 iterations, ptr operands)`; the sums are stored after both operands.

    For bfloat16 the machine must have products of pairs, or of tiles; for int8 the products of four bytes of x86-64.
    """
    if dtype == "bfloat16" and machine.has_bfloat16_tiles:
        return _loop_of_tiles()
    sums, add = (f"<{machine.lanes} x i32>", "add") if dtype == "int8" else (f"<{machine.lanes} x float>", "fadd")
    factors, function = _instruction(machine, dtype)
    if dtype == "float32":
        operands, parameters = "{f} %x, {f} %y, {s} {total}", f"{sums}, {sums}, {sums}"
    else:
        operands, parameters = "{s} {total}, {f} %x, {f} %y", f"{sums}, {factors}, {factors}"
    count = range(_chains(machine))
    phis = [f"  %a{n} = phi {sums} [zeroinitializer, %entry], [%b{n}, %loop]" for n in count]
    calls = [f"  %b{n} = call {sums} {function}({operands.format(s=sums, f=factors, total=f'%a{n}')})" for n in count]
    totals = [f"  %s{n} = {add} {sums} %{f's{n - 1}' if n > 1 else 'b0'}, %b{n}" for n in count[1:]]
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


def _instruction(machine: Machine, dtype: DType) -> tuple[str, str]:
    """The type of the factors, and the intrinsic that multiplies and adds."""
    bits = machine.vector_bytes * 8
    match dtype:
        case "float32":
            return f"<{machine.lanes} x float>", f"@llvm.fma.v{machine.lanes}f32"
        case "bfloat16":
            return f"<{2 * machine.lanes} x bfloat>", f"@llvm.x86.avx512bf16.dpbf16ps.{bits}"
        case "int8":
            return f"<{4 * machine.lanes} x i8>", f"@llvm.x86.avx512.vpdpbusd.{bits}"


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
