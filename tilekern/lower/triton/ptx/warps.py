"""Instructions among the threads of a warp. Semantics: PTX ISA 9.0, section 9.7.9 (`shfl`) and 9.7.13."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilekern.ir.core import Array
from tilekern.lower.triton.ptx.arithmetic import dtype_of, last_type, value
from tilekern.lower.triton.ptx.machine import WARP, Execute, Machine
from tilekern.lower.triton.ptx.parse import Instruction, PtxError, Register

_REDUCTIONS: dict[str, Any] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def _shuffle(machine: Machine, instruction: Instruction, ids: Array) -> None:
    """`shfl.sync`: a register of another thread of the warp."""
    into, *operands = instruction.operands
    holds = operands.pop(0) if len(operands) == 5 else None
    source, by, clamp, _ = operands
    distance, c = (machine.read(v, ids, 32).astype(np.int64) for v in (by, clamp))
    lane = machine.lane[ids]
    mask, limit = c >> 8 & 31, c & 31
    most = lane & mask | limit & ~mask
    least = lane & mask
    match instruction.modifiers[1]:
        case "up":
            chosen = lane - distance
            inside = chosen >= most
        case "down":
            chosen = lane + distance
            inside = chosen <= most
        case "bfly":
            chosen = lane ^ distance
            inside = chosen <= most
        case _:
            chosen = least | distance & ~mask
            inside = chosen <= most
    chosen = np.where(inside, chosen, lane)
    if isinstance(source, Register):
        thread = ids - lane + chosen
        if ids is not machine.all and not np.isin(thread, ids).all():
            raise PtxError("a thread reads a register of a thread that takes no part")
        machine_values = machine.registers[source.name][thread]
    else:
        machine_values = machine.read(source, ids, 32)
    machine.write(into, ids, machine_values)
    if holds is not None:
        machine.write(holds, ids, inside)


def _elect(machine: Machine, instruction: Instruction, ids: Array) -> None:
    """`elect.sync`: one thread of each warp."""
    into, holds, _ = instruction.operands
    warps = ids // WARP
    first = np.r_[True, warps[1:] != warps[:-1]]
    machine.write(holds, ids, first)
    starts = np.maximum.accumulate(np.where(first, np.arange(len(ids)), 0))
    machine.write(into, ids, machine.lane[ids][starts].astype(np.uint32))


def _vote(machine: Machine, instruction: Instruction, ids: Array) -> None:
    """`vote.sync`: whether a predicate holds in all threads of the warp, or in any; or one bit of each."""
    into, source, _ = instruction.operands
    holds, warps = machine.read(source, ids, 1), ids // WARP
    counts = np.bincount(warps, minlength=warps.max() + 1)
    trues = np.bincount(warps, holds, minlength=warps.max() + 1)
    match instruction.modifiers[1]:
        case "all":
            machine.write(into, ids, (trues == counts)[warps])
        case "any":
            machine.write(into, ids, (trues > 0)[warps])
        case "ballot":
            bits = np.bincount(warps, np.where(holds, 2.0 ** machine.lane[ids], 0), minlength=warps.max() + 1)
            machine.write(into, ids, bits.astype(np.uint64).astype(np.uint32)[warps])
        case kind:
            raise PtxError(f"vote.{kind} is not known")


def _reduce(machine: Machine, instruction: Instruction, ids: Array) -> None:
    """`redux.sync`: a reduction over the threads of the warp."""
    into, source, _ = instruction.operands
    dtype = dtype_of(last_type(instruction))
    values, warps = value(machine, source, ids, dtype), ids // WARP
    starts = np.flatnonzero(np.r_[True, warps[1:] != warps[:-1]])
    totals = _REDUCTIONS[instruction.modifiers[1]].reduceat(values, starts).astype(dtype)
    machine.write(into, ids, np.repeat(totals, np.diff(np.r_[starts, len(ids)])))


def _active(machine: Machine, instruction: Instruction, ids: Array) -> None:
    """`activemask`: a bit for each thread of the warp that runs the instruction."""
    warps = ids // WARP
    masks = np.bincount(warps, 2.0 ** machine.lane[ids], minlength=warps.max() + 1)
    machine.write(instruction.operands[0], ids, masks.astype(np.uint64).astype(np.uint32)[warps])


TABLE: dict[str, Execute] = {
    "shfl": _shuffle,
    "elect": _elect,
    "vote": _vote,
    "redux": _reduce,
    "activemask": _active,
}
