"""The choice between a warp-specialised program and one in Triton, where a call leaves it open (`emitter="auto"`)."""

from __future__ import annotations

from tilekern.ir.compute import Dot
from tilekern.ir.control import Fold
from tilekern.ir.core import Func
from tilekern.lower.triton.chip import Chip
from tilekern.lower.triton.program import Program

_NARROW = 64
"""Columns of a sum of products up to which Triton's program is faster where a loop has two other products."""


def pays(func: Func, program: Program, chip: Chip) -> bool:
    """True if a warp-specialised program is worth it.

    At least half of the multiprocessors need a thread block, which is alone on its multiprocessor, and whose tiles are
    large. Where they are too few, smaller ones in Triton keep more multiprocessors busy. And no loop may be of a form
    for which the cycle model finds Triton's program faster (record 0069). No GPU has measured this yet:
    `python -m bench.gpu --tune` compares both.

    Args:
      func: the Func that was lowered.
      program: the warp-specialised program.
      chip: the GPU.
    """
    loops = (op for op in func.walk() if isinstance(op, Fold))
    return 2 * program.programs * program.cluster >= chip.cores and not any(map(_is_slower, loops))


def _is_slower(loop: Fold) -> bool:
    """True for three products and one narrow sum, as in attention's query gradient with heads of 64.

    Such products are short, and several small programs of Triton on a multiprocessor hide more of what is between them.
    """
    products = sum(isinstance(op, Dot) for op in loop.body.ops)
    sums = [value.tile.shape[1] for value in loop.results if len(value.tile.shape) == 2]
    return products == 3 and len(sums) == 1 and sums[0] <= _NARROW
