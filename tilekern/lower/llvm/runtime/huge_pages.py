"""What the system is told of memory: that large results should lie in huge pages.

A C library maps large memory anew for each result, and takes it back behind it, so each page of it is cleared when it
is touched first. In pages of 4 KiB that takes several times as long as to read and write an array once.
"""

from __future__ import annotations

from tilekern.lower.llvm.ir_builder import I32, I64, PTR, Code, Reg, constant

# The bytes from which on glibc maps memory anew, whatever was freed before: DEFAULT_MMAP_THRESHOLD_MAX in mallopt(3).
_MAPPED = 32 << 20
_HUGE = 2 << 20  # of a huge page on x86-64, and on ARM with pages of 4 KiB
_MADV_HUGEPAGE = 14  # Linux, include/uapi/asm-generic/mman-common.h


def prefer_huge(code: Code, address: Reg, nbytes: Reg) -> None:
    """Ask for huge pages where they fit whole. On systems that have none, or want none, nothing changes."""
    if "linux" not in code.module.machine.triple:
        return
    code.module.declare("madvise", I32, [PTR, I64, I32], "nounwind")
    with code.when(code.compare("icmp uge", nbytes, _MAPPED)):
        begin = code.cast("ptrtoint", address, "i64")
        first = code.binary("and", code.binary("add", begin, _HUGE - 1), -_HUGE)
        size = code.binary("sub", code.binary("and", code.binary("add", begin, nbytes), -_HUGE), first)
        code.call("madvise", I32, code.cast("inttoptr", first, "ptr"), size, constant(_MADV_HUGEPAGE, I32))
