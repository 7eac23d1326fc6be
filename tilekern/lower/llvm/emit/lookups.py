"""Functions of bytes, looked up in registers.

    f(byte & 15), f(byte >> 4)  →  table[byte & 15], table[byte >> 4]    16 numbers of float32 or bfloat16, one register
    f(byte)                     →  low[byte] | high[byte] << 8           f in bfloat16: the two bytes of 256 numbers

Numbers of 4 bits are unpacked, and numbers of float4_e2m1fn decoded, by 3 to 12 instructions for each; to cast 8 bits
to bfloat16 takes two casts. One instruction looks up 16 numbers of 32 bits in a register, or 32 of 16 bits (AVX-512),
or 64 bytes in a pair of registers (AVX512-VBMI). Which tiles are functions of bytes, `byte_functions` proves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from tilekern.ir.core import Array, Func, Value
from tilekern.ir.types import BF16, F32
from tilekern.lower.llvm import calibration
from tilekern.lower.llvm.byte_functions import ByteFunction, functions_of_bytes
from tilekern.lower.llvm.element_index import Request
from tilekern.lower.llvm.ir_builder import Code
from tilekern.lower.llvm.ir_values import Reg, Type, constant, vector_constant
from tilekern.lower.llvm.runtime.machine import Machine

_FLOAT_LANES = 16
"""Lanes of a vector of float32 that is looked up by 4 bits, and numbers of the table."""

_PAIR_LANES = 32
"""Lanes of a vector of bfloat16 that is looked up by 4 bits."""

BYTE_LANES = 64
"""Lanes of a vector that is looked up by bytes."""


@dataclass(frozen=True)
class Lookup(ABC):
    """A function of the bytes of a tile.

    Attributes:
      leaf: the tile of bytes.
    """

    leaf: Value

    @abstractmethod
    def emit(self, code: Code, x: Reg) -> Reg:
        """The results for a vector of bytes."""


@dataclass(frozen=True)
class OfHalf(Lookup):
    """A function of one half of each byte, the upper one if `high`; `table` is float32[16]."""

    high: bool
    table: Array

    def emit(self, code: Code, x: Reg) -> Reg:
        """The instruction reads 4 bits of each index, and ignores the other bits."""
        return self._of_words(code, code.cast("zext", x, "i32"), 0)

    def of_fours(self, code: Code, x: Reg) -> list[Reg]:
        """The results for `BYTE_LANES` bytes, in four vectors: vector n is of bytes n, n + 4, n + 8, ...

        The bytes are loaded at once, and stay where they are: only the lookups move lanes.
        """
        words = Type("i32", _FLOAT_LANES)
        fours = code.emit(words, f"bitcast {x} to {words}")
        return [self._of_words(code, fours, n) for n in range(BYTE_LANES // _FLOAT_LANES)]

    def _of_words(self, code: Code, words: Reg, place: int) -> Reg:
        """The results for one byte of each word."""
        table = vector_constant(self.table.tolist(), Type("float", _FLOAT_LANES))
        return _permuted(code, "sf", table, _shifted(code, words, 8 * place + 4 * self.high))


@dataclass(frozen=True)
class PairsOfHalf(Lookup):
    """A function of one half of each byte, the upper one if `high`; `bits` is uint16[16], of bfloat16."""

    high: bool
    bits: Array

    def emit(self, code: Code, x: Reg) -> Reg:
        return self._of_words(code, code.cast("zext", x, "i16"), 0)

    def of_fours(self, code: Code, even: Reg, odd: Reg) -> list[Reg]:
        """The results for twice `BYTE_LANES` bytes, in four vectors of pairs of an element of `even` and one of `odd`.

        Vector n is of bytes n, n + 4, n + 8, ... Pairs of bytes are interleaved before they are looked up.
        """
        type = Type("i16", _PAIR_LANES)
        a, b = (code.emit(type, f"bitcast {x} to {type}") for x in (even, odd))
        orders = ([n + side * _PAIR_LANES for n in range(first, _PAIR_LANES, 2) for side in (0, 1)] for first in (0, 1))
        interleaved = [code.shuffle(a, b, order) for order in orders]
        return [self._of_words(code, words, place) for words in interleaved for place in (0, 1)]

    def _of_words(self, code: Code, words: Reg, place: int) -> Reg:
        """The results for one byte of each word. The instruction reads 5 bits of each index: the table stands twice."""
        table = vector_constant(np.tile(self.bits, 2).tolist(), Type("i16", _PAIR_LANES))
        return _permuted(code, "hi", table, _shifted(code, words, 8 * place + 4 * self.high))


def _shifted(code: Code, words: Reg, bits: int) -> Reg:
    return code.binary("lshr", words, bits) if bits else words


def _permuted(code: Code, kind: str, table: Reg, index: Reg) -> Reg:
    """table[index] for each lane, which reads as many bits of an index as number the lanes."""
    name = f"llvm.x86.avx512.permvar.{kind}.512"
    return code.call_external(name, table.type, table, index)


@dataclass(frozen=True)
class PairsOfBytes(Lookup):
    """A bfloat16 function of each byte; `bits` is uint16[256]."""

    bits: Array

    def emit(self, code: Code, x: Reg) -> Reg:
        """The low bytes and the high bytes, put together in turn."""
        (words,) = self._of_bytes(code, x, 1)
        return words

    def of_rows(self, code: Code, even: Reg, odd: Reg) -> list[Reg]:
        """The results for twice `BYTE_LANES` bytes, in four vectors of pairs of an element of `even` and one of `odd`.

        Bytes are interleaved before they are looked up: the results are half as many bytes again.
        """
        halves = [_in_turn(code, even, odd, first, BYTE_LANES // 2) for first in (0, BYTE_LANES // 2)]
        return [words for half in halves for words in self._of_bytes(code, half, 2)]

    def _of_bytes(self, code: Code, x: Reg, vectors: int) -> list[Reg]:
        """The results for a vector of bytes, in so many vectors."""
        low, high = _of_odd(code, self.bits, x) or [_bytes(code, part, x) for part in _parts(self.bits)]
        count = BYTE_LANES // vectors
        words = Type("i16", count)
        return [
            code.emit(words, f"bitcast {_in_turn(code, low, high, first, count)} to {words}")
            for first in range(0, BYTE_LANES, count)
        ]


def _parts(bits: Array) -> tuple[Array, Array]:
    """The low bytes and the high bytes."""
    return bits.astype(np.uint8), (bits >> 8).astype(np.uint8)


def _in_turn(code: Code, a: Reg, b: Reg, first: int, count: int) -> Reg:
    """Elements of a and b in turn, `count` of each, from element `first` on."""
    return code.shuffle(a, b, [n + side * BYTE_LANES for n in range(first, first + count) for side in (0, 1)])


def _of_odd(code: Code, bits: Array, x: Reg) -> list[Reg] | None:
    """The low and the high bytes of a function with f(-x) = -f(x), f(0) = 0, of int8; None for another function.

    The results for |x| are looked up. |-128| is 128, of which the instruction reads 0, as of |0|: there the table holds
    the result for 128, and the result for 0 is set.
    """
    if not (bits[:0:-1][:127] == bits[1:128] ^ 0x8000).all() or bits[0] or bits[128] & 0xFF:
        return None
    low, high = _parts(np.concatenate([bits[128:129] ^ 0x8000, bits[1:128]]))
    size = code.intrinsic_with_flag("llvm.abs", x)
    signed = code.binary("xor", _of_seven_bits(code, high, size), code.binary("and", x, -0x80))
    is_zero = code.compare("icmp eq", x, 0)
    return [_of_seven_bits(code, low, size), code.select(is_zero, constant(0, x.type), signed)]


def _bytes(code: Code, table: Array, x: Reg) -> Reg:
    """table[x], for a table of 256 bytes. The instruction reads 7 bits of each index, not its sign bit."""
    positive, negative = table[:128], table[128:]
    result = _of_seven_bits(code, positive, x)
    if (positive == negative).all():
        return result
    if (positive ^ 0x80 == negative).all():
        return code.binary("xor", result, code.binary("and", x, -0x80))
    return code.select(code.compare("icmp slt", x, 0), _of_seven_bits(code, negative, x), result)


def _of_seven_bits(code: Code, table: Array, x: Reg) -> Reg:
    signed = table.view(np.int8).tolist()
    first, second = (vector_constant(signed[at : at + 64], x.type) for at in (0, 64))
    name = f"llvm.x86.avx512.vpermi2var.qi.{8 * BYTE_LANES}"
    return code.call_external(name, x.type, first, x, second)


class Lookups:
    """The tiles of a Func that are looked up on a machine."""

    def __init__(self, func: Func, machine: Machine) -> None:
        has_room = machine.is_x86 and machine.lanes >= _FLOAT_LANES
        functions = functions_of_bytes(func) if has_room else {}
        halves = {v: _of_half(f) for v, f in functions.items() if v.tile.dtype in (F32, BF16)}
        self._halves = {value: lookup for value, lookup in halves.items() if lookup is not None}
        self._bytes = {
            v: PairsOfBytes(f.leaf, f.results.view(np.uint16))
            for v, f in functions.items()
            if v.tile.dtype == BF16 and machine.has_byte_tables and v not in self._halves
        }

    def of(self, request: Request) -> Lookup | None:
        """The lookup of a vector; None for a vector that is computed."""
        half = self._halves.get(request.value)
        if half is not None and request.lanes == (_PAIR_LANES if isinstance(half, PairsOfHalf) else _FLOAT_LANES):
            return half
        return self._bytes.get(request.value) if request.lanes == BYTE_LANES else None

    def of_half(self, value: Value) -> OfHalf | PairsOfHalf | None:
        """The lookup of a tile of float32 or bfloat16 by halves of bytes; None for a tile that is computed."""
        return self._halves.get(value)

    def of_bytes(self, value: Value) -> PairsOfBytes | None:
        """The lookup of vectors of `BYTE_LANES` elements of a tile; None for a tile that is computed."""
        return self._bytes.get(value)


def _of_half(function: ByteFunction) -> OfHalf | PairsOfHalf | None:
    """The lookup of a function's results; None if both halves of the byte decide, or if computing takes as long."""
    half = function.half()
    if half is None or function.ops < calibration.LOOKUP_OPS:
        return None
    if half.results.dtype == BF16:
        return PairsOfHalf(function.leaf, half.high, half.results.view(np.uint16))
    return OfHalf(function.leaf, half.high, half.results)
