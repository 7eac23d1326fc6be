"""Values that the threads of a program exchange before its first branch: across a warp, and through shared memory.

`walk` follows the first thread of each warp. The bounds of a loop may be a sum or a maximum of a tile, whose elements
all threads hold: then all threads run the few instructions that the bounds depend on, one instruction after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import reduce

from tilekern.estimate.gpu.rates import WARP
from tilekern.estimate.gpu.rules import evaluate
from tilekern.estimate.gpu.sass import Instruction
from tilekern.estimate.gpu.scalar import MASK, Thread, Value, signed

_EXCHANGES = frozenset(("REDUX", "SHFL", "LDS", "VOTE", "VOTEU", "ELECT"))
"""Operations whose result depends on other threads."""

_STORES = frozenset(("STSM", "STAS", "ATOMS", "LDGSTS", "UTMALDG", "UBLKCP"))
"""Instructions after which shared memory is not known any more: nothing here tells where they store."""

_REDUCE: dict[str, Callable[[int, int], int]] = {
    "AND": lambda a, b: a & b,
    "OR": lambda a, b: a | b,
    "XOR": lambda a, b: a ^ b,
}
_PREDICATES = tuple(f"P{n}" for n in range(7))

Memory = dict[int, Value]
"""Bytes of shared memory by address; a missing byte is not known."""


def is_exchange(instruction: Instruction) -> bool:
    """True if the rules of a single thread do not tell the result: a reduction, or a load of shared memory."""
    return instruction.name in ("REDUX", "LDS") or (instruction.name == "SHFL" and "IDX" not in instruction.suffixes)


def reads_of(instruction: Instruction) -> tuple[str, ...]:
    """The registers that an instruction depends on, with the predicates that it moves to or from a register."""
    return (*instruction.reads, *(_PREDICATES if instruction.name in ("P2R", "R2P") else ()))


def origins(code: Sequence[Instruction], deciding: Collection[int]) -> list[int]:
    """The numbers of some exchanges, and of the instructions that they depend on, in order: liveness, backwards.

    A load of shared memory depends on all stores before it.

    Args:
      code: the instructions before the first branch or loop.
      deciding: numbers of the exchanges that branches depend on.
    """
    live, needed = set[str](), list[int]()
    for n in reversed(range(len(code))):
        instruction = code[n]
        stores = instruction.name == "STS" or instruction.name in _STORES
        if not (n in deciding or live.intersection(instruction.writes) or (stores and "LDS" in live)):
            continue
        needed.append(n)
        if not instruction.guard:
            live.difference_update(instruction.writes)
        live.update(reads_of(instruction), ["LDS"] if instruction.name == "LDS" else [])
    return needed[::-1]


def exchanged(
    instructions: Sequence[Instruction], threads: Callable[[int, int], Thread], warps: int
) -> list[dict[int, tuple[Value, ...]]]:
    """For each warp the values that its first thread gets from other threads, by the address of the instruction.

    Args:
      instructions: the exchanges, and the instructions on which exchanges depend, see `origins`.
      threads: the state of a thread at its start, by the numbers of the warp and of the lane.
      warps: warps of a program.
    """
    if (unknown := _unknown(instructions, threads(0, 0))) is not None:
        return [unknown] * warps
    program = [[threads(warp, lane) for lane in range(WARP)] for warp in range(warps)]
    results: list[dict[int, tuple[Value, ...]]] = [{} for _ in program]
    memory: Memory = {}
    for instruction in instructions:
        if instruction.name in _STORES:
            memory.clear()
        elif instruction.name == "STS":
            for warp in program:
                _store(warp, instruction, memory)
        elif instruction.name in _EXCHANGES:
            for warp, values in zip(program, results, strict=True):
                values[instruction.address] = _exchange(warp, instruction, memory)[0]
        else:
            for warp in program:
                for thread in warp:
                    evaluate(instruction, thread)
    return results


def _unknown(instructions: Sequence[Instruction], thread: Thread) -> dict[int, tuple[Value, ...]] | None:
    """The results of the exchanges if nothing that the first thread passes on is known, else None.

    The bounds of a loop are the same in all threads, so they depend on what this thread passes on, too. To run all
    threads would take 32 times as long for each warp.
    """
    results: dict[int, tuple[Value, ...]] = {}
    memory: Memory = {}
    for instruction in instructions:
        if instruction.name in _STORES:
            memory.clear()
        elif instruction.name == "STS":
            _store([thread], instruction, memory)
            is_skipped = thread.holds(instruction.guard, instruction.negated) is False  # another thread stores
            if is_skipped or any(octet is not None for octet in memory.values()):
                return None
        elif instruction.name in _EXCHANGES:
            passes_on = instruction.name not in ("ELECT", "LDS")
            if instruction.name == "ELECT" or (passes_on and thread.read(instruction.inputs[0]) is not None):
                return None
            values = results[instruction.address] = _passed([thread] * WARP, instruction, memory)[0]
            _receive(thread, instruction, values)
        else:
            evaluate(instruction, thread)
    return results


def _exchange(warp: Sequence[Thread], instruction: Instruction, memory: Memory) -> list[tuple[Value, ...]]:
    """Run an exchange on all threads of a warp: for each thread its results."""
    rows = _passed(warp, instruction, memory)
    for thread, values in zip(warp, rows, strict=True):
        _receive(thread, instruction, values)
    return rows


def _receive(thread: Thread, instruction: Instruction, values: tuple[Value, ...]) -> None:
    """Write what an exchange gives a thread, unless its guard is false."""
    if thread.holds(instruction.guard, instruction.negated) is not False:
        thread.registers.update(dict.fromkeys(instruction.writes))
        for register, value in zip(_places(instruction), values, strict=False):
            thread.write(register, value)


def _passed(warp: Sequence[Thread], instruction: Instruction, memory: Memory) -> list[tuple[Value, ...]]:
    """What an exchange gives each thread of a warp."""
    rows: list[tuple[Value, ...]]
    active = [thread.holds(instruction.guard, instruction.negated) for thread in warp]
    if instruction.name == "LDS":
        rows = [_loaded(thread, instruction, memory) for thread in warp]
    elif None in active:
        rows = [()] * WARP
    elif instruction.name == "ELECT":
        rows = [(int(bool(runs) and not any(active[:lane])),) for lane, runs in enumerate(active)]
    elif instruction.name == "SHFL":
        rows = _shuffled(warp, instruction)
    else:
        values = [t.read(instruction.inputs[0]) for t, runs in zip(warp, active, strict=True) if runs]
        operands = [value for value in values if value is not None]
        rows = [(_combined(operands, instruction) if len(operands) == len(values) else None,)] * WARP
    return rows


def _places(instruction: Instruction) -> Sequence[str]:
    """The registers of an instruction's results: the words of a load, else what the text names."""
    return instruction.writes if instruction.name == "LDS" else instruction.results


def _combined(values: list[int], instruction: Instruction) -> Value:
    """The result of a vote or of a reduction across a warp; None if it is not modelled."""
    suffixes = instruction.suffixes
    if not values:
        return None
    if instruction.name in ("VOTE", "VOTEU"):
        is_predicate = instruction.results[0].startswith(("P", "UP"))
        combine = any if "ANY" in suffixes else all if "ALL" in suffixes else None
        return int(combine(values)) if is_predicate and combine else None
    if "SUM" in suffixes:
        return sum(values) & MASK
    key = signed if "S32" in suffixes else int
    if "MIN" in suffixes or "MAX" in suffixes:
        return (min if "MIN" in suffixes else max)(values, key=key)
    operation = next((_REDUCE[suffix] for suffix in suffixes if suffix in _REDUCE), None)
    return None if operation is None else reduce(operation, values)


def _shuffled(warp: Sequence[Thread], instruction: Instruction) -> list[tuple[Value, ...]]:
    """For each thread True if the lane that it reads exists, and that lane's value, or its own; see PTX ISA, shfl."""
    value, by, clamp = instruction.inputs[:3]
    (mode,) = {"BFLY", "IDX", "UP", "DOWN"}.intersection(instruction.suffixes)
    rows: list[tuple[Value, ...]] = []
    for lane, thread in enumerate(warp):
        offset = thread.read(by)
        if offset is None or thread.read(clamp) != (0 if mode == "UP" else WARP - 1):  # lanes of a part of the warp
            rows.append((None, None))
            continue
        source = {"BFLY": lane ^ offset, "IDX": offset % WARP, "UP": lane - offset, "DOWN": lane + offset}[mode]
        exists = 0 <= source < WARP
        rows.append((int(exists), warp[source if exists else lane].read(value)))
    return rows


# --- shared memory ----------------------------------------------------------------------------------------------------


def _width(instruction: Instruction) -> int:
    """Bytes that an access of shared memory moves."""
    suffixes = instruction.suffixes
    return next((int(s[-2:].lstrip("US")) // 8 for s in suffixes if s in ("U8", "S8", "U16", "S16")), 0) or next(
        (int(s) // 8 for s in suffixes if s in ("64", "128")), 4
    )


def _address(thread: Thread, operand: str) -> Value:
    parts = [thread.read(part.partition(".X")[0]) for part in operand.strip("[]").split("+")]
    return None if None in parts or ".X" in operand else sum(part or 0 for part in parts) & MASK


def _store(warp: Sequence[Thread], instruction: Instruction, memory: Memory) -> None:
    place, source = instruction.inputs
    for thread in warp:
        runs, first = thread.holds(instruction.guard, instruction.negated), _address(thread, place)
        if runs is False:
            continue
        if runs is None or first is None:
            memory.clear()
            return
        registers = [source] if not source.startswith("R") or source == "RZ" else _following(source)
        for n in range(_width(instruction)):
            memory[first + n] = thread.bytes_of(registers[min(n // 4, len(registers) - 1)])[n % 4]


def _following(register: str) -> list[str]:
    return [f"R{int(register[1:]) + n}" for n in range(4)]


def _loaded(thread: Thread, instruction: Instruction, memory: Memory) -> tuple[Value, ...]:
    """The words that a thread loads."""
    first, width = _address(thread, instruction.inputs[0]), _width(instruction)
    if first is None:
        return ()
    contents = [memory.get(first + n) for n in range(width)]
    words: list[Value] = []
    for n in range(0, width, 4):
        octets = [octet for octet in contents[n : n + 4] if octet is not None]
        is_signed = any(s in ("S8", "S16") for s in instruction.suffixes)
        number = int.from_bytes(octets, "little", signed=is_signed) & MASK
        words.append(number if len(octets) == min(4, width - n) else None)
    return tuple(words)
