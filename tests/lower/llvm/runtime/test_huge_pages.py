"""Huge pages for large results."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from tests.lower.llvm.fake_xla import FakeXla
from tests.lower.llvm.tasks import handler, through_scratch

pytest.importorskip("llvmlite", reason="needs llvmlite")

HUGE = 2 << 20


def _advised(array: np.ndarray) -> list[tuple[int, int]]:
    """The parts of an array, in bytes from its begin on, for which the system was asked for huge pages."""
    first, last = array.ctypes.data, array.ctypes.data + array.nbytes
    found: list[tuple[int, int]] = []
    for area in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        begin, end = (int(x, 16) for x in area.split()[0].split("-"))
        if " hg" in area.split("VmFlags:")[1] and begin < last and first < end:
            found.append((begin - first, end - first))
    return found


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="needs Linux with huge pages")
@pytest.mark.parametrize(("mebibytes", "large"), [(31, False), (37, True)])
def test_large_results_lie_in_huge_pages(mebibytes: int, large: bool) -> None:
    """The huge pages that fit into the result; the memory around it belongs to somebody else."""
    size = mebibytes << 20
    memory = np.frombuffer(mmap.mmap(-1, size + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.float32)
    start = (-memory.ctypes.data + 4096) % HUGE  # a page behind the begin of a huge one
    y = memory[start // 4 :][: size // 4]
    address = handler(through_scratch(1, 64))
    FakeXla().call(address, [np.ones(1, np.float32)], [y])
    assert y[0] == 1
    assert _advised(y) == ([(HUGE - 4096, size // HUGE * HUGE - 4096)] if large else [])
