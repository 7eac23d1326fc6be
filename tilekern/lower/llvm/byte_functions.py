"""Functions of bytes: tiles each of whose elements is computed from one byte of another tile, the leaf.

The function may be any ops that are computed lane by lane. It is evaluated for all 256 bytes, which proves on which
bits it depends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from tilekern.ir.compute import Bitcast, Constant, Convert, Select
from tilekern.ir.core import Array, Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.types import BOOL, TileType


@dataclass(frozen=True)
class HalfTable:
    """The results of a function that depends on one half of each byte.

    Attributes:
      results: one for each of the 16 values of the half.
      high: True if the upper half decides.
    """

    results: Array
    high: bool


@dataclass(frozen=True)
class ByteFunction:
    """A function of the bytes of a tile.

    Attributes:
      leaf: the tile of bytes.
      results: one for each of the 256 bytes.
      ops: how many ops compute a lane.
    """

    leaf: Value
    results: Array
    ops: int

    def half(self) -> HalfTable | None:
        """The table of one half of the byte, which is low if no bit decides; None if both halves decide."""
        results = self.results.reshape(16, 16)
        bits = results.view(f"u{results.dtype.itemsize}")
        if (bits == bits[:1]).all():
            return HalfTable(results[0], high=False)
        return HalfTable(results[:, 0], high=True) if (bits == bits[:, :1]).all() else None


def functions_of_bytes(func: Func) -> dict[Value, ByteFunction]:
    """The functions of bytes among the tiles of a Func."""
    functions, splats = dict[Value, ByteFunction](), dict[Value, Array]()
    for op in func.walk():
        for result in op.results:
            _note(result, op, functions, splats)
    return functions


def function_of_bytes(value: Value, definition: Callable[[Value], Op | None]) -> ByteFunction | None:
    """The function of bytes that a tile is; None if it is no such function.

    Args:
      value: the tile.
      definition: the op that defines a value; None for arguments.
    """
    functions, splats, seen = dict[Value, ByteFunction](), dict[Value, Array](), set[Value]()
    # Of hundreds of ops a recursion would overflow Python's stack.
    pending = [value]
    while pending:
        op = definition(pending[-1])
        operands = op.operands if op is not None and _is_computed_by_lanes(op) else ()
        unseen = [x for x in operands if x not in seen]
        if unseen:
            pending += unseen
            continue
        seen.add(at := pending.pop())
        _note(at, op, functions, splats)
    return functions.get(value)


def _is_computed_by_lanes(op: Op) -> bool:
    return isinstance(op, (Elementwise, Select, Convert, Bitcast))


def _note(value: Value, op: Op | None, functions: dict[Value, ByteFunction], splats: dict[Value, Array]) -> None:
    """Note the function of bytes, or the splat, that a value is."""
    if isinstance(op, Constant) and op.array.shape == ():
        splats[value] = op.array
    elif (function := _function(value, op, functions, splats)) is not None:
        functions[value] = function


def _function(
    value: Value, op: Op | None, functions: Mapping[Value, ByteFunction], splats: Mapping[Value, Array]
) -> ByteFunction | None:
    if not isinstance(value.type, TileType):
        return None
    if op is not None and _is_computed_by_lanes(op):
        sources = [functions[v] for v in op.operands if v in functions]
        leaves = {source.leaf for source in sources}
        if len(leaves) == 1 and all(v in functions or v in splats for v in op.operands):
            operands = [functions[v].results if v in functions else np.full(256, splats[v]) for v in op.operands]
            return ByteFunction(leaves.pop(), op.evaluate(*operands), 1 + sum(source.ops for source in sources))
    tile = value.tile
    if tile.shape and tile.dtype.itemsize == 1 and tile.dtype != BOOL:
        return ByteFunction(value, np.arange(256, dtype=np.uint8).view(tile.dtype), 0)
    return None
