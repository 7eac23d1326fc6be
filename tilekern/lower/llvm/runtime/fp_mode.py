"""Modes of the CPU: IEEE 754 arithmetic for the duration of tasks, and a hint for loops that wait."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from tilekern.lower.llvm.ir_builder import Code
from tilekern.lower.llvm.ir_values import I32, I64, VOID, constant


@contextmanager
def ieee_mode(code: Code) -> Generator[None]:
    """Run the code that is emitted inside with subnormals, rounding to nearest, and without traps."""
    if code.module.machine.is_x86:
        save, load = "llvm.x86.sse.stmxcsr", "llvm.x86.sse.ldmxcsr"
        saved, mode = code.alloca(I32), code.alloca(I32)
        code.call_external(save, VOID, saved)
        code.store(constant(0x1F80, I32), mode)  # Intel's manual, volume 1, 10.2.3: the value after a reset
        code.call_external(load, VOID, mode)
        yield
        code.call_external(load, VOID, saved)
    else:
        before = code.call_external("llvm.aarch64.get.fpcr", I64)
        code.call_external("llvm.aarch64.set.fpcr", VOID, constant(0, I64))
        yield
        code.call_external("llvm.aarch64.set.fpcr", VOID, before)


def pause(code: Code) -> None:
    """Tell the CPU that the present loop only waits."""
    if code.module.machine.is_x86:
        code.call_external("llvm.x86.sse2.pause", VOID)
    else:
        code.call_external("llvm.aarch64.hint", VOID, constant(1, I32))  # yield
