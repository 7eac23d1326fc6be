"""Huge pages for large results.

C libraries map memory of this size anew for each result, and unmap it afterwards. The system clears each page when it
is first touched. With pages of 4 KiB this takes several times as long as reading and writing the array once.
"""

from __future__ import annotations

from tilekern.lower.llvm.ir_builder import Code
from tilekern.lower.llvm.ir_values import I32, Reg, constant

# Bytes from which on glibc always maps memory anew: DEFAULT_MMAP_THRESHOLD_MAX in mallopt(3).
_MAPPED = 32 << 20
_HUGE = 2 << 20  # of a huge page on x86-64, and on ARM with pages of 4 KiB
_MADV_HUGEPAGE = 14  # Linux, include/uapi/asm-generic/mman-common.h


def prefer_huge(code: Code, address: Reg, nbytes: Reg) -> None:
    """Ask for huge pages in the part of a buffer that holds whole pages. Systems without huge pages ignore it."""
    if "linux" not in code.module.machine.triple:
        return
    with code.when(code.compare("icmp uge", nbytes, _MAPPED)):
        begin = code.cast("ptrtoint", address, "i64")
        first = code.binary("and", code.binary("add", begin, _HUGE - 1), -_HUGE)
        size = code.binary("sub", code.binary("and", code.binary("add", begin, nbytes), -_HUGE), first)
        page, advice = code.cast("inttoptr", first, "ptr"), constant(_MADV_HUGEPAGE, I32)
        code.call_external("madvise", I32, page, size, advice, attributes="nounwind")
