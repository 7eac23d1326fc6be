"""Registers that a thread needs at once, estimated before NVIDIA's assembler allocates them, and a warning of too many.

Two kinds of programs make ptxas fall back to 32 registers, spill nearly all values, and take minutes for long blocks:

- Loads of one block without a loop, as a Python `for` over taps unrolls to. ptxas moves all these loads to the front.
- Products of float32 in full precision. Triton holds, of all the elements that are contracted, the rows and the columns
  of a thread's results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from math import prod, sqrt

from tilekern.ir.compute import Dot
from tilekern.ir.core import Block, Func, Op, Value, cdiv
from tilekern.ir.memory import Load
from tilekern.ir.shape import Transpose
from tilekern.ir.types import F32
from tilekern.lower.sizes import warn_of_large_program
from tilekern.lower.triton.calibration import SPILLED_LOADS, SPILLED_OPERANDS
from tilekern.lower.triton.chip import Chip
from tilekern.lower.triton.vendor import NVIDIA
from tilekern.source import Loc


def warn_of_spills(func: Func, chip: Chip, warps: int, copies: Collection[Op]) -> None:
    """Issue a `LargeProgramWarning` at the line that most registers are for, if ptxas will surely spill.

    Args:
      func: the legal Func.
      chip: the GPU.
      warps: the warps of a program.
      copies: the loads that the Tensor Memory Accelerator does.
    """
    if chip.vendor is not NVIDIA:
        return
    threads, limit = warps * chip.vendor.lanes, chip.registers_per_thread
    for block in (func.body, *(region for op in func.walk() for region in op.regions)):
        lines = _loaded(block, threads, copies)
        if lines.total() > SPILLED_LOADS * limit:
            fix = "loop with tk.fold(tk.serial(n), ...), not Python's for; take smaller blocks, or more num_warps"
            _warn(func, chip, lines.total(), "the tiles that it loads without a loop", lines.most_common(1)[0][0], fix)
            return
    dots = {op: _operands(op, threads) for op in func.walk() if isinstance(op, Dot)}
    largest = max(dots, key=dots.__getitem__, default=None)
    if largest is not None and dots[largest] > SPILLED_OPERANDS * limit:
        fix = "contract 32 elements at a time, in tk.fold(tk.serial(n, 32), ...); take smaller blocks, or bfloat16"
        _warn(func, chip, dots[largest], "the operands of a product of float32", largest.loc, fix)


def _warn(func: Func, chip: Chip, registers: int, purpose: str, loc: Loc, fix: str) -> None:
    message = (
        f"{func.name} needs about {registers} registers of each thread of {chip.name} for {purpose}, most of them for "
        f"this line. There are {chip.registers_per_thread}: the others spill to memory, and compiling it may take "
        f"minutes.\n  fix: {fix}"
    )
    warn_of_large_program(message, loc)


def _loaded(block: Block, threads: int, copies: Collection[Op]) -> Counter[Loc]:
    """The registers of a thread for the tiles that a block loads, by line; tiles for dots alone go to shared memory."""
    users = dict[Value, list[Op]]()
    for op in block.walk():
        for value in op.operands:
            users.setdefault(value, []).append(op)
    lines = Counter[Loc]()
    loads = (op for op in block.ops if isinstance(op, Load) and op.access.shape and op not in copies)
    for op in loads:
        if not all(isinstance(user, Dot) for user in _final_users(op.result, users)):
            lines[op.loc] += cdiv(op.result.tile.nbytes, 4 * threads)
    return lines


def _final_users(value: Value, users: dict[Value, list[Op]]) -> Iterator[Op]:
    """The ops that use a value or its transpose."""
    for user in users.get(value, ()):
        if isinstance(user, Transpose):
            yield from _final_users(user.result, users)
        else:
            yield user


def _operands(op: Dot, threads: int) -> int:
    """The registers of a thread for the operands of a product that no matrix unit computes; 0 for other products.

    Of a result of m × n elements a thread has a square of m · n / threads, and for each row and column of it all
    elements that are contracted.
    """
    tile = op.operands[0].tile
    if tile.dtype != F32 or op.precision != "ieee":
        return 0
    depth = prod(tile.shape[d] for d in op.contract[0])
    return round(2 * depth * sqrt(op.result.tile.size / threads))
