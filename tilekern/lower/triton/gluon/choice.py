"""The choice between a warp-specialised and a Triton program, where a call leaves it open (`emitter="auto"`)."""

from __future__ import annotations

from math import prod

from tilekern.ir.compute import Dot
from tilekern.ir.control import Fold
from tilekern.ir.core import Func
from tilekern.ir.memory import Load
from tilekern.lower.triton.chip import Chip
from tilekern.lower.triton.program import Program

_NARROW = 64
"""Columns of a sum of products up to which Triton's program is faster where a loop has two other products."""

_PLACES = 3
"""Places of a ring from which on copies run beside a product."""

_FEW = 12
"""Programs of a warpgroup, for each multiprocessor, that balance a grid of Triton whose programs become shorter."""


def pays(func: Func, program: Program, chip: Chip) -> bool:
    """True if a warp-specialised program is worth it.

    At least half of the multiprocessors need a thread block, which is alone on its multiprocessor, and whose tiles are
    large. Where blocks are too few, Triton's smaller blocks keep more multiprocessors busy. And no loop may be of a
    form for which the cycle model finds Triton's program faster (record 0069). `python -m bench.gpu` times both on a
    GPU.

    Args:
      func: the Func that was lowered.
      program: the warp-specialised program.
      chip: the GPU.
    """
    loops = [op for op in func.walk() if isinstance(op, Fold)]
    if 2 * program.programs * program.cluster < chip.cores or any(_waits_for_copies(loop, program) for loop in loops):
        return False
    return _is_short_of_work(func, chip) or not any(map(_hides_less, loops))


def _waits_for_copies(loop: Fold, program: Program) -> bool:
    """True for one product and two places in its ring: a product holds one place, and a copy begins when it ends.

    Two results may leave shared memory for no more than two places.
    """
    return _products(loop) == 1 and program.num_stages < _PLACES


def _hides_less(loop: Fold) -> bool:
    """True for three products and one narrow sum, as in attention's query gradient with heads of 64.

    Such products are short, and several small programs of Triton on a multiprocessor hide more of the work between.
    With masks of loads Triton's program needs more registers, and is alone on its multiprocessor.
    """
    sums = [value.tile.shape[1] for value in loop.results if len(value.tile.shape) == 2]
    masked = any(isinstance(op, Load) and op.masked for op in loop.body.ops)
    return _products(loop) == 3 and len(sums) == 1 and sums[0] <= _NARROW and not masked


def _is_short_of_work(func: Func, chip: Chip) -> bool:
    """True for few programs along an axis where they become shorter, as with causal masks.

    The last programs of Triton's grid then end late; Gluon's programs share the work evenly.
    """
    falls = any(axis.descending and axis.tiles > 1 for axis in func.axes)
    return falls and prod(axis.tiles for axis in func.axes) < _FEW * chip.cores


def _products(loop: Fold) -> int:
    return sum(isinstance(op, Dot) for op in loop.body.ops)
