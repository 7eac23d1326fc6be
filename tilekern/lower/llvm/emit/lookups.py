"""Functions of bytes, looked up in registers.

    f(byte & 15), f(byte >> 4)  →  table[byte & 15], table[byte >> 4]    f in float32: 16 numbers, one register
    f(byte)                     →  low[byte] | high[byte] << 8           f in bfloat16: the two bytes of 256 numbers

Numbers of 4 bits are unpacked, and numbers of float4_e2m1fn decoded, by 3 to 12 instructions for each; to cast 8 bits
to bfloat16 takes two casts. One instruction looks 16 numbers up in a register (AVX-512), or 64 bytes in a pair of
registers (AVX512-VBMI). The function may be any ops that are computed lane by lane: it is evaluated for all 256 bytes,
which proves on which bits it depends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from tilekern.ir.compute import Bitcast, Constant, Convert, Select
from tilekern.ir.core import Array, Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.types import BF16, BOOL, F32, TileType
from tilekern.lower.llvm import calibration
from tilekern.lower.llvm.element_index import Request
from tilekern.lower.llvm.ir_builder import Code
from tilekern.lower.llvm.ir_values import Reg, Type, vector_constant
from tilekern.lower.llvm.runtime.machine import Machine

_HALF_LANES = 16
"""Lanes of a vector that is looked up by 4 bits, and numbers of the table."""

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
    """A float32 function of one half of each byte, the upper one if `high`; `table` is float32[16]."""

    high: bool
    table: Array

    def emit(self, code: Code, x: Reg) -> Reg:
        """The instruction reads 4 bits of each index, and ignores the other bits."""
        return self._of_words(code, code.cast("zext", x, "i32"), 0)

    def of_fours(self, code: Code, x: Reg) -> list[Reg]:
        """The results for `BYTE_LANES` bytes, in four vectors: vector n is of bytes n, n + 4, n + 8, ...

        The bytes are loaded at once, and stay where they are: only the lookups move lanes.
        """
        words = Type("i32", _HALF_LANES)
        fours = code.emit(words, f"bitcast {x} to {words}")
        return [self._of_words(code, fours, n) for n in range(BYTE_LANES // _HALF_LANES)]

    def _of_words(self, code: Code, words: Reg, place: int) -> Reg:
        """The results for one byte of each word."""
        shift = 8 * place + 4 * self.high
        index = code.binary("lshr", words, shift) if shift else words
        table = vector_constant(self.table.tolist(), Type("float", _HALF_LANES))
        name = "llvm.x86.avx512.permvar.sf.512"
        code.module.declare(name, table.type, [table.type, index.type])
        return code.call(name, table.type, table, index)


@dataclass(frozen=True)
class _OfByte(Lookup):
    """A bfloat16 function of each byte; `bits` is uint16[256]."""

    bits: Array

    def emit(self, code: Code, x: Reg) -> Reg:
        """The low bytes and the high bytes, put together in turn."""
        low, high = (_bytes(code, (self.bits >> shift).astype(np.uint8), x) for shift in (0, 8))
        order = [n + side * BYTE_LANES for n in range(BYTE_LANES) for side in (0, 1)]
        words = Type("i16", BYTE_LANES)
        return code.emit(words, f"bitcast {code.shuffle(low, high, order)} to {words}")


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
    code.module.declare(name, x.type, [x.type, x.type, x.type])
    return code.call(name, x.type, first, x, second)


class Lookups:
    """The tiles of a Func that are looked up on a machine."""

    def __init__(self, func: Func, machine: Machine) -> None:
        has_room = machine.is_x86 and machine.lanes >= _HALF_LANES
        functions = _functions(func) if has_room else {}
        halves = {v: _of_half(f) for v, f in functions.items() if v.tile.dtype == F32}
        self._halves = {value: lookup for value, lookup in halves.items() if lookup is not None}
        self._bytes = {
            v: _OfByte(f.leaf, f.results.view(np.uint16))
            for v, f in functions.items()
            if v.tile.dtype == BF16 and machine.has_byte_tables
        }

    def of(self, request: Request) -> Lookup | None:
        """The lookup of a vector; None for a vector that is computed."""
        if request.lanes == _HALF_LANES:
            return self._halves.get(request.value)
        return self._bytes.get(request.value) if request.lanes == BYTE_LANES else None

    def of_half(self, value: Value) -> OfHalf | None:
        """The lookup of a float32 tile; None for a tile that is computed."""
        return self._halves.get(value)

    def are_of_bytes(self, value: Value) -> bool:
        """True if vectors of `BYTE_LANES` elements of a tile are looked up."""
        return value in self._bytes


# --- proofs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Function:
    """A function of the bytes of `leaf`: its results for all 256 bytes, by so many ops for each lane."""

    leaf: Value
    results: Array
    ops: int


def _functions(func: Func) -> dict[Value, _Function]:
    functions, splats = dict[Value, _Function](), dict[Value, Array]()
    for op in func.walk():
        if isinstance(op, Constant) and op.array.shape == ():
            splats[op.result] = op.array
        elif len(op.results) == 1 and (function := _function(op, functions, splats)) is not None:
            functions[op.result] = function
    return functions


def _function(op: Op, functions: dict[Value, _Function], splats: dict[Value, Array]) -> _Function | None:
    """The function of bytes that an op computes; None if it computes no such function."""
    if not isinstance(op.result.type, TileType):
        return None
    tile = op.result.tile
    if isinstance(op, (Elementwise, Select, Convert, Bitcast)):
        sources = [functions[v] for v in op.operands if v in functions]
        leaves = {source.leaf for source in sources}
        if len(leaves) == 1 and all(v in functions or v in splats for v in op.operands):
            operands = [functions[v].results if v in functions else np.full(256, splats[v]) for v in op.operands]
            return _Function(leaves.pop(), op.evaluate(*operands), 1 + sum(source.ops for source in sources))
    if tile.shape and tile.dtype.itemsize == 1 and tile.dtype != BOOL:
        return _Function(op.result, np.arange(256, dtype=np.uint8).view(tile.dtype), 0)
    return None


def _of_half(function: _Function) -> OfHalf | None:
    """The lookup of a function's results; None if both halves of the byte decide, or if computing takes as long."""
    if function.ops < calibration.LOOKUP_OPS:
        return None
    bits = function.results.view(np.uint32).reshape(16, 16)
    results = function.results.reshape(16, 16)
    if (bits == bits[:1]).all():
        return OfHalf(function.leaf, high=False, table=results[0])
    return OfHalf(function.leaf, high=True, table=results[:, 0]) if (bits == bits[:, :1]).all() else None
