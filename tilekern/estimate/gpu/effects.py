"""Effects of a warp's instructions on other warps: copies, barriers, and products of tensor memory."""

from __future__ import annotations

import re
from collections.abc import Callable

from tilekern.estimate.gpu.sass import Instruction
from tilekern.estimate.gpu.scalar import Thread

Outcome = tuple[str, "int | str | None", int | None]
"""The kind of an effect, its barrier, and a number."""


def address_of(thread: Thread, operand: str) -> int | str:
    """The address of a barrier; the operand's text if one of its registers is not known."""
    total = 0
    for part in operand.strip("[]").split("+"):
        value = thread.read(part)
        if value is None:
            return operand
        total += value
    return total & 0xFFFFFFFF


def _synchronise(thread: Thread, instruction: Instruction, runs: bool) -> Outcome | None:
    """`wait` for the phase of a parity, `arrive` with bytes that copies will bring, or `init`."""
    operand = next((o for o in instruction.operands if o.startswith("[")), "")
    barrier, suffixes = address_of(thread, operand), instruction.suffixes
    if "EXCH" in suffixes:
        return "init", barrier, None
    if "TRYWAIT" in suffixes or "PHASECHK" in suffixes:
        value = thread.read(instruction.operands[-1])
        return ("wait", barrier, None if value is None else value >> 31) if runs else None
    if "ARRIVE" in suffixes and runs:
        nbytes = 0 if "A1T0" in suffixes else thread.read(instruction.operands[-1]) or 0
        return "expect" if any(s.startswith("A0") for s in suffixes) else "arrive", barrier, nbytes
    return None


def _copy(thread: Thread, instruction: Instruction, runs: bool) -> Outcome | None:
    """A copy by TMA that reports to a barrier, whose address is in the register after the destination's."""
    if not runs:
        return None
    destination = re.match(r"\[U?R(\d+)", instruction.operands[0])
    register = f"UR{int(destination[1]) + 1}" if destination else ""
    value = thread.read(register)
    return "copy", register if value is None else value, "MULTICAST" in instruction.suffixes


def _barrier(thread: Thread, instruction: Instruction, runs: bool) -> Outcome | None:
    """A barrier of a program's warps: its number, and the threads that it waits for."""
    if not runs:
        return None
    number = thread.read(instruction.operands[0]) if instruction.operands else 0
    threads = thread.read(instruction.operands[1]) if len(instruction.operands) > 1 else None
    return "join" if "SYNC" in instruction.suffixes or "RED" in instruction.suffixes else "announce", number, threads


def _product(thread: Thread, instruction: Instruction, runs: bool) -> Outcome | None:
    """A product of tensor memory: operations, by its descriptor (PTX ISA, tcgen05, "Instruction descriptor")."""
    operand = next((o for o in instruction.operands if o.startswith("idesc[")), "")
    value = thread.read(operand.removeprefix("idesc").strip("[]"))
    if not runs or value is None:
        return None
    n, m = (value >> 17 & 63) * 8, (value >> 24 & 31) * 16
    k = 16 if instruction.name == "UTCHMMA" else 32
    return "multiply", None, 2 * m * n * k


def _commit(thread: Thread, instruction: Instruction, runs: bool) -> Outcome | None:
    """The arrival of a barrier when all products before it are computed."""
    return ("commit", address_of(thread, instruction.operands[0]), None) if runs else None


EFFECTS: dict[str, Callable[[Thread, Instruction, bool], Outcome | None]] = {
    "SYNCS": _synchronise,
    "UTMALDG": _copy,
    "BAR": _barrier,
    "UTCHMMA": _product,
    "UTCQMMA": _product,
    "UTCBAR": _commit,
}
