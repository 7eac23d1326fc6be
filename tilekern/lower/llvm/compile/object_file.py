"""Functions and lines of an object file: ELF of 64 bits, and the table of lines of DWARF 4.

System V ABI, chapter 4 (sections, symbols, relocations); DWARF Debugging Information Format, version 4, section 6.2.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

_FUNCTION, _SYMBOL_TABLE, _RELOCATIONS = 2, 2, 4  # the types of a symbol and of sections
_EXTENDED, _END_SEQUENCE, _SET_ADDRESS = 0, 1, 2  # opcodes of a program of lines, sections 6.2.5.2 and 6.2.5.3


@dataclass(frozen=True)
class Symbol:
    """A function: its name, its section, its offset there and its size in bytes."""

    name: str
    section: int
    start: int
    size: int


@dataclass(frozen=True)
class Line:
    """The place of the code from an offset of a section to the next `Line`. `number` is 0 where no line is known."""

    section: int
    start: int
    directory: str
    file: str
    number: int


def is_elf(code: bytes) -> bool:
    """True for an object file of the format ELF, of 64 bits, with numbers whose least byte comes first."""
    return code.startswith(b"\x7fELF\x02\x01")


class ObjectFile:
    """An object file.

    Attributes:
      code: its bytes.
      machine: the number of its instruction set, `e_machine`.
    """

    def __init__(self, code: bytes) -> None:
        assert is_elf(code)
        self.code = code
        (self.machine,) = struct.unpack_from("<H", code, 18)

    @cached_property
    def _headers(self) -> list[tuple[Any, ...]]:
        at, size, count = (*struct.unpack_from("<Q", self.code, 40), *struct.unpack_from("<HH", self.code, 58))
        return [struct.unpack_from("<IIQQQQIIQQ", self.code, at + number * size) for number in range(count)]

    def _name(self, number: int) -> str:
        (names,) = struct.unpack_from("<H", self.code, 62)
        return self._text(self._headers[names][4] + self._headers[number][0])

    def _text(self, at: int) -> str:
        return self.code[at : self.code.index(b"\0", at)].decode("utf-8", "replace")

    @cached_property
    def _symbols(self) -> list[tuple[str, int, int, int, int]]:
        """Name, type, section, offset and size of each symbol."""
        symbols: list[tuple[str, int, int, int, int]] = []
        for header in self._headers:
            if header[1] == _SYMBOL_TABLE:
                names: int = header[6]
                names_at = self._headers[names][4]
                for at in range(header[4], header[4] + header[5], 24):
                    name_at, kind, _, section, value, size = struct.unpack_from("<IBBHQQ", self.code, at)
                    symbols.append((self._text(names_at + name_at), kind & 15, section, value, size))
        return symbols

    @property
    def functions(self) -> list[Symbol]:
        """The functions."""
        return [Symbol(name, *place) for name, kind, *place in self._symbols if kind == _FUNCTION]

    def bytes_of(self, function: Symbol) -> bytes:
        """The machine code of a function, before the linker changes addresses."""
        begin = self._headers[function.section][4] + function.start
        return self.code[begin : begin + function.size]

    @cached_property
    def lines(self) -> list[Line]:
        """The places of the code, in the order of the table of lines; empty without debug information."""
        tables = [n for n, header in enumerate(self._headers) if self._name(n) == ".debug_line" and header[1] == 1]
        return [line for number in tables for line in self._lines_of(number)]

    def _lines_of(self, number: int) -> Iterator[Line]:
        start, size = self._headers[number][4:6]
        addresses = {
            offset: (self._symbols[info >> 32][2], self._symbols[info >> 32][3] + addend)
            for header in self._headers
            if header[1] == _RELOCATIONS and header[7] == number
            for offset, info, addend in struct.iter_unpack("<QQq", self.code[header[4] : header[4] + header[5]])
        }
        table, at = self.code[start : start + size], 0
        while at < len(table):
            (length,) = struct.unpack_from("<I", table, at)
            yield from _Unit(table, at, addresses).run(at + 4 + length)
            at += 4 + length


class _Unit:
    """The program of lines of one unit: a machine with registers, whose rows are places of code."""

    def __init__(self, table: bytes, at: int, addresses: dict[int, tuple[int, int]]) -> None:
        self._table, self._addresses = table, addresses
        version, header = struct.unpack_from("<HI", table, at + 4)
        assert version == 4, version
        self._begin = at + 10 + header
        self._unit, _, _, self._base, self._range, self._first = struct.unpack_from("<BBBbBB", table, at + 10)
        self._at = at + 16
        self._operands = [0, *table[self._at : self._at + self._first - 1]]  # how many, of each opcode
        self._at += self._first - 1
        directories = ["", *self._directories()]
        self._files = [("", ""), *((directories[folder], name) for name, folder in self._file_names())]

    def _directories(self) -> Iterator[str]:
        while name := self._string():
            yield name

    def _file_names(self) -> Iterator[tuple[str, int]]:
        while name := self._string():
            directory, _, _ = self._unsigned(), self._unsigned(), self._unsigned()
            yield name, directory

    def _string(self) -> str:
        end = self._table.index(b"\0", self._at)
        text, self._at = self._table[self._at : end].decode("utf-8", "replace"), end + 1
        return text

    def _unsigned(self) -> int:
        """A number in LEB128, section 7.6."""
        value = shift = 0
        while True:
            byte = self._table[self._at]
            self._at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def _signed(self) -> int:
        begin = self._at
        value = self._unsigned()
        bits = 7 * (self._at - begin)
        return value - (1 << bits) if value >> (bits - 1) else value

    def run(self, end: int) -> Iterator[Line]:
        """The rows of the program, which ends at an offset of the table."""
        self._at, self._section, self._pc, self._file, self._number = self._begin, 0, 0, 1, 1
        while self._at < end:
            opcode = self._table[self._at]
            self._at += 1
            if self._step(opcode):
                directory, file = self._files[self._file]
                yield Line(self._section, self._pc, directory, file, self._number)
            elif opcode == _EXTENDED and self._ended:
                yield Line(self._section, self._pc, "", "", 0)
                self._pc, self._file, self._number = 0, 1, 1

    def _step(self, opcode: int) -> bool:
        """Run one opcode; True if it appends a row."""
        self._ended = False
        if opcode >= self._first:
            self._pc += (opcode - self._first) // self._range * self._unit
            self._number += self._base + (opcode - self._first) % self._range
            return True
        match opcode:
            case 0:  # extended
                self._extended()
            case 1:  # copy
                return True
            case 2:  # advance_pc
                self._pc += self._unsigned() * self._unit
            case 3:  # advance_line
                self._number += self._signed()
            case 4:  # set_file
                self._file = self._unsigned()
            case 8:  # const_add_pc
                self._pc += (255 - self._first) // self._range * self._unit
            case 9:  # fixed_advance_pc
                self._pc += struct.unpack_from("<H", self._table, self._at)[0]
                self._at += 2
            case _:
                for _ in range(self._operands[opcode]):
                    self._unsigned()
        return False

    def _extended(self) -> None:
        size = self._unsigned()
        opcode, following = self._table[self._at], self._at + size
        if opcode == _SET_ADDRESS:
            self._section, self._pc = self._addresses[self._at + 1]
        self._ended = opcode == _END_SEQUENCE
        self._at = following
