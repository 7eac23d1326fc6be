"""The choice between a warp-specialised program and one in Triton, where a call leaves it open (`emitter="auto"`)."""

from __future__ import annotations

from tilekern.lower.triton.chip import Chip
from tilekern.lower.triton.program import Program


def pays(program: Program, chip: Chip) -> bool:
    """True if at least half of the multiprocessors have a thread block of a warp-specialised program.

    A thread block is alone on its multiprocessor, and its tiles are large. Where they are too few, smaller ones in
    Triton keep more multiprocessors busy. No GPU has measured this yet: `python -m bench.gpu --tune` compares both.
    """
    return 2 * program.programs >= chip.cores
