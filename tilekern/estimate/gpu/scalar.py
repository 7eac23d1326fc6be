"""Evaluation of the instructions that decide control flow: integers, predicates and addresses of one thread.

A value is an integer of 32 bits, or 0 or 1 for a predicate. It is None if it is not known: an argument or a value from
memory that nobody gave, or the result of an operation that is not evaluated here.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

MASK = 0xFFFFFFFF
Value = int | None
Bytes = tuple[Value, Value, Value, Value]
"""A word of which some bytes are known, the lowest one first: assemblers keep 16 bits in half a register."""

Registers = dict[str, "Value | Bytes"]
_OPERAND = re.compile(r"([-~!]?)(\|?)(U?(?:R|P)(?:\d+|Z|T)|SRZ)\|?(\.\w+)*$")
_CONSTANT = re.compile(r"(-?)c\[0x([0-9a-f]+)\]\s*\[(U?R\w+\+?)?(?:0x([0-9a-f]+))?\]$")


class Thread:
    """The state of the first thread of a warp.

    Attributes:
      registers: values by name. A register that was never written may hold anything, and reads as 0: compilers keep
        predicates as single bits of such a register.
      constants: words of the constant bank 0, by byte offset.
      special: special registers by name.
      memory: contents of global memory, by the address of their first byte.
      exchanged: by the address of an instruction the values that it gets from other threads, see `lanes`.
    """

    def __init__(
        self, constants: Mapping[int, int], special: Mapping[str, int], memory: Mapping[int, bytes] | None = None
    ) -> None:
        self.registers: Registers = {}
        self.constants, self.special, self.memory = constants, special, memory or {}
        self.exchanged: Mapping[int, tuple[Value, ...]] = {}

    def load(self, address: int, nbytes: int) -> bytes | None:
        """Bytes of global memory; None if a byte is not known."""
        for first, contents in self.memory.items():
            if first <= address and address + nbytes <= first + len(contents):
                return contents[address - first : address - first + nbytes]
        return None

    def read(self, operand: str) -> Value:
        """The value of an operand; None if it is not known."""
        kind, sign, content = _parsed(operand)
        if kind == "literal":
            return content
        value = self.registers.get(content, 0) if kind == "register" else self.constants.get(content)
        if isinstance(value, tuple):
            return None
        if value is None or not sign:
            return value
        return {"-": -value & MASK, "~": ~value & MASK, "!": int(not value)}[sign]

    def bytes_of(self, operand: str) -> Bytes:
        """The bytes of an operand, the lowest one first."""
        held = self.registers.get(operand)
        if isinstance(held, tuple):
            return held
        if (value := self.read(operand)) is None:
            return None, None, None, None
        return value & 255, value >> 8 & 255, value >> 16 & 255, value >> 24 & 255

    def pair(self, operand: str) -> tuple[Value, Value]:
        """The low and the high word of an operand of 64 bits; None for a word that is not known."""
        if match := re.match(r"(U?R)(\d+)$", operand):
            return self.read(operand), self.read(f"{match[1]}{int(match[2]) + 1}")
        if match := _CONSTANT.match(operand):
            return self.read(operand), self.constants.get(int(match[4] or "0", 16) + 4)
        value = self.read(operand)
        return value, value if value is None else 0

    def write(self, operand: str, value: Value | Bytes) -> None:
        """Set a register."""
        if not operand.endswith(("RZ", "PT")):
            self.registers[operand] = value & MASK if isinstance(value, int) else value

    def holds(self, guard: str, negated: bool) -> bool | None:
        """The truth of a guard; None if it is not known."""
        if not guard:
            return True
        value = self.read(guard)
        return None if value is None else bool(value) != negated


@lru_cache(4096)
def _parsed(operand: str) -> tuple[str, str, Any]:
    """An operand as ("register", sign, name), ("constant", sign, offset) or ("literal", "", value)."""
    if match := _OPERAND.match(operand):
        sign, absolute, name, suffix = match.groups()
        if absolute or suffix not in (None, ".64"):
            return "literal", "", None
        if not name.endswith(("Z", "T")):
            return "register", sign, name
        value = int(name.endswith("T"))
        return "literal", "", int(not value) if sign == "!" else MASK if sign == "~" else value
    if match := _CONSTANT.match(operand):
        is_direct = not match[2].strip("0") and not match[3]
        return ("constant", match[1], int(match[4] or "0", 16)) if is_direct else ("literal", "", None)
    return "literal", "", _literal(operand)


def _literal(operand: str) -> Value:
    if re.fullmatch(r"-?0x[0-9a-f]+", operand):
        return int(operand, 16) & MASK
    if re.fullmatch(r"-?\d+", operand):
        return int(operand) & MASK
    try:
        return bits(float(operand))
    except ValueError:
        return None


def bits(value: float) -> int:
    """The 32 bits of a number as float32; of infinity if it is too large."""
    try:
        return int.from_bytes(struct.pack("<f", value), "little")
    except OverflowError:
        return bits(math.inf)


def number(value: int) -> float:
    """The float32 that 32 bits stand for."""
    return struct.unpack("<f", value.to_bytes(4, "little"))[0]


def signed(value: int) -> int:
    """32 bits as a signed integer."""
    return value - (1 << 32) if value >> 31 else value
