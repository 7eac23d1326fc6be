"""Functions of half a byte, looked up in a register.

    f(byte & 15), f(byte >> 4)  →  table[byte & 15], table[byte >> 4]        table: f of 0, ..., 15, float32[16]

Numbers of 4 bits are unpacked, and numbers of float4_e2m1fn decoded, by 3 to 12 instructions for each. A vector of 512
bits has 16 float32, and one instruction looks 16 numbers up in it. The function may be any ops that are computed lane
by lane: it is evaluated for all 256 bytes, which proves on which half of the byte it depends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilekern.ir.compute import Bitcast, Constant, Convert, Select
from tilekern.ir.core import Array, Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.types import F32, TileType, kind_of
from tilekern.lower.llvm import calibration
from tilekern.lower.llvm.element_index import Request
from tilekern.lower.llvm.ir_builder import Code
from tilekern.lower.llvm.ir_values import Reg, Type, vector_constant
from tilekern.lower.llvm.runtime.machine import Machine

_LANES = 16
"""Lanes of the table, the numbers that 4 bits may have."""


@dataclass(frozen=True)
class Lookup:
    """The function of one half of each byte of a tile.

    Attributes:
      leaf: the tile of bytes.
      high: True for the upper half of the byte.
      table: float32[16], the results.
    """

    leaf: Value
    high: bool
    table: Array


@dataclass(frozen=True)
class _Function:
    """A function of the bytes of `leaf`: its results for all 256 bytes, by so many ops for each lane."""

    leaf: Value
    results: Array
    ops: int


class Lookups:
    """The float32 tiles of a Func that are looked up; none on a machine whose vectors have less than 16 float32."""

    def __init__(self, func: Func, machine: Machine) -> None:
        self._of = _lookups(func) if machine.is_x86 and machine.lanes >= _LANES else {}

    def of(self, request: Request) -> Lookup | None:
        """The lookup of a whole vector; None for a vector that is computed."""
        return self._of.get(request.value) if request.lanes == _LANES else None


def _lookups(func: Func) -> dict[Value, Lookup]:
    functions, splats = dict[Value, _Function](), dict[Value, Array]()
    for op in func.walk():
        if isinstance(op, Constant) and op.array.shape == ():
            splats[op.result] = op.array
        elif len(op.results) == 1 and (function := _function(op, functions, splats)) is not None:
            functions[op.result] = function
    tables = ((value, _lookup(function)) for value, function in functions.items() if value.tile.dtype == F32)
    return {value: lookup for value, lookup in tables if lookup is not None}


def _function(op: Op, functions: dict[Value, _Function], splats: dict[Value, Array]) -> _Function | None:
    """The function of bytes that an op computes; None if it computes no such function."""
    if not isinstance(op.result.type, TileType):
        return None
    tile = op.result.tile
    if isinstance(op, (Elementwise, Select, Convert, Bitcast)):
        sources = [functions[v] for v in op.operands if v in functions]
        leaves = {source.leaf for source in sources}
        if len(leaves) == 1 and all(v in functions or v in splats for v in op.operands):
            every = [functions[v].results if v in functions else np.full(256, splats[v]) for v in op.operands]
            return _Function(leaves.pop(), op.evaluate(*every), 1 + sum(source.ops for source in sources))
    if tile.shape and tile.dtype.itemsize == 1 and kind_of(tile.dtype) in ("signed", "unsigned"):
        return _Function(op.result, np.arange(256, dtype=np.uint8).view(tile.dtype), 0)
    return None


def _lookup(function: _Function) -> Lookup | None:
    """The lookup of a function's results; None if both halves of the byte decide, or if computing takes as long."""
    if function.ops < calibration.LOOKUP_OPS:
        return None
    bits = function.results.view(np.uint32).reshape(16, 16)
    results = function.results.reshape(16, 16)
    if (bits == bits[:1]).all():
        return Lookup(function.leaf, high=False, table=results[0])
    return Lookup(function.leaf, high=True, table=results[:, 0]) if (bits == bits[:, :1]).all() else None


def look_up(code: Code, lookup: Lookup, x: Reg) -> Reg:
    """The results for a vector of bytes. The instruction reads 4 bits of each index, and ignores the other bits."""
    index = code.cast("zext", x, "i32")
    index = code.binary("lshr", index, 4) if lookup.high else index
    table = vector_constant(lookup.table.tolist(), Type("float", _LANES))
    vector = table.type
    name = "llvm.x86.avx512.permvar.sf.512"
    code.module.declare(name, vector, [vector, index.type])
    return code.call(name, vector, table, index)
