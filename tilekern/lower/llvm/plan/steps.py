"""Data of a plan: steps, their buffers, and the fused expressions that they compute.

A *step* is a unit of emitted code: an op, a loop nest, or copies of buffers. See `loop_fusion`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tilekern.ir.compute import Bitcast, Convert, Reduce, Select
from tilekern.ir.core import Block, Func, Op, Value, definitions
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Load, Store
from tilekern.ir.shape import Reshape, Transpose
from tilekern.ir.types import TileType
from tilekern.lower.llvm import calibration
from tilekern.lower.llvm.element_index import ElementMap, Index, is_virtual, operand_coords, register

_ARITHMETIC = ("add", "sub", "mul", "max", "min", "neg", "abs", "sign", "floor", "ceil", "round_even", "is_finite")
_BITS = ("and", "or", "xor", "not", "shift_left", "shift_right_logical", "shift_right_arithmetic")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")

# Functions of one or two instructions.
_FAST = frozenset((*_ARITHMETIC, *_BITS, *_COMPARISONS))


@dataclass(eq=False)
class Buffer:
    """Memory for one tile at a time.

    Attributes:
      nbytes: its size.
      merged_into: the buffer that it was coalesced with.
      offset: its first byte in the scratch memory.
      first_use: the number of the first step that writes it.
      last_use: the number of the last step of its live range.
    """

    nbytes: int
    merged_into: Buffer | None = None
    offset: int = 0
    first_use: int = -1
    last_use: int = -1

    @property
    def root(self) -> Buffer:
        """The buffer that this one was coalesced with in the end."""
        return self if self.merged_into is None else self.merged_into.root


@dataclass(eq=False)
class Step:
    """An op that is no part of a loop nest.

    Attributes:
      op: the op.
      temporary: memory that the op needs besides its results.
      packing: the operands that a dot packs; None for a dot of few rows, and for other ops.
      accumulates: True if a dot adds its products to the values in its buffer.
      produces: the tiles that the step leaves in memory, with their buffers.
      number: its position in the program.
      end: the position of its end, after its regions.
    """

    op: Op
    temporary: Buffer | None = None
    packing: Any = None
    accumulates: bool = False
    produces: list[tuple[Value, Buffer]] = field(default_factory=list[tuple[Value, Buffer]])
    number: int = -1
    end: int = -1


@dataclass(eq=False)
class Map:
    """A tile that is computed elementwise into a buffer."""

    value: Value
    buffer: Buffer


@dataclass(eq=False)
class LoopNest:
    """Loops over one iteration space, in which several results are computed.

    Attributes:
      space: the extents of the loops.
      maps: the tiles that it computes into buffers.
      reduces: the reductions of the last dim.
      stores: the stores to arrays.
      produces: the tiles that the nest leaves in memory, with their buffers.
      number: its position in the program.
    """

    space: tuple[int, ...]
    maps: list[Map] = field(default_factory=list[Map])
    reduces: list[Reduce] = field(default_factory=list[Reduce])
    stores: list[Store] = field(default_factory=list[Store])
    produces: list[tuple[Value, Buffer]] = field(default_factory=list[tuple[Value, Buffer]])
    number: int = -1

    @property
    def sources(self) -> list[Value]:
        """The values that are computed for each lane."""
        stored = [v for op in self.stores for v in (op.value, op.mask) if v is not None]
        return [*(m.value for m in self.maps), *(op.operands[0] for op in self.reduces), *stored]


@dataclass(eq=False)
class BufferCopies:
    """Copies between buffers, each (source, target)."""

    moves: list[tuple[Buffer, Buffer]]
    produces: tuple[()] = ()
    number: int = -1


AnyStep = Step | LoopNest | BufferCopies


@dataclass
class Plan:
    """The steps and buffers of a Func.

    Attributes:
      steps: the steps of each block.
      live_in: the arguments of each block that are in memory, with their buffers.
      carry_buffers: the buffers of the carries of each loop, and of the results of each switch; None for a scalar.
      scratch: the bytes of all buffers.
    """

    steps: dict[Block, list[AnyStep]] = field(default_factory=dict[Block, "list[AnyStep]"])
    live_in: dict[Block, list[tuple[Value, Buffer]]] = field(default_factory=dict[Block, "list[tuple[Value, Buffer]]"])
    carry_buffers: dict[Op, list[Buffer | None]] = field(default_factory=dict[Op, "list[Buffer | None]"])
    scratch: int = 0


@dataclass
class FusedExpression:
    """The ops that are fused into the computation of some values.

    Attributes:
      leaves: the scalars and the tiles in memory that are read. True for a tile of the shape of the iteration space of
        which each lane reads only the element in its place.
      inner: the virtual tiles that are computed, each once; True as for `leaves`.
    """

    leaves: dict[Value, bool] = field(default_factory=dict[Value, bool])
    inner: dict[Value, bool] = field(default_factory=dict[Value, bool])


def symbolic_start(value: Value, most: int) -> Index:
    """A name for the clamped start of a dynamic slice."""
    return register(f"start {id(value)} {most}")


class Expressions:
    """Fused expressions of values, given the tiles that are in memory.

    Attributes:
      definition: the op that defines each value.
      buffers: the buffers of the tiles that are in memory at present.
    """

    def __init__(self, func: Func) -> None:
        self.definition = definitions(func)
        self.buffers: dict[Value, Buffer] = {}

    @contextmanager
    def inside(self, live_in: Iterable[tuple[Value, Buffer]]) -> Generator[None]:
        """Enter a block, where more tiles are in memory. Tiles that the block adds are forgotten at its end."""
        outer = dict(self.buffers)
        self.buffers.update(live_in)
        yield
        self.buffers.clear()
        self.buffers.update(outer)

    def is_available(self, value: Value) -> bool:
        """True if a value is in a register or in memory already."""
        return not value.tile.shape or value in self.buffers

    def of(self, space: tuple[int, ...], values: Iterable[Value]) -> FusedExpression:
        """The fused expression of values that are computed for each lane of an iteration space."""
        fused, seen = FusedExpression(), set[tuple[Value, ElementMap]]()
        # Of hundreds of fused ops a recursion would overflow Python's stack.
        pending = [(value, ElementMap.over(space, len(value.tile.shape))) for value in reversed(list(values))]
        while pending:
            read = pending.pop()
            if read not in seen:
                seen.add(read)
                pending += reversed(self._visit(*read, fused))
        return fused

    def _visit(self, value: Value, elements: ElementMap, fused: FusedExpression) -> list[tuple[Value, ElementMap]]:
        """Note a value that an expression reads; the operands of which it is computed, and their elements."""
        own = elements.is_identity_of(value.tile.shape)
        if self.is_available(value):
            fused.leaves[value] = own and fused.leaves.get(value, True)
            return []
        fused.inner[value] = own and fused.inner.get(value, True)
        op = self.definition[value]
        for operand in op.operands:
            if isinstance(operand.type, TileType) and not operand.tile.shape:
                fused.leaves.setdefault(operand, True)
        return [(x, elements.to(coords)) for x, coords in operand_coords(op, elements.coords, symbolic_start)]

    def cost(self, value: Value) -> int:
        """Estimated instructions for one element of a tile."""
        return sum(_cost(self.definition[v]) for v in self.of(value.tile.shape, [value]).inner)


def _cost(op: Op) -> int:
    match op:
        case Elementwise():
            return 1 if op.function in _FAST else calibration.FUNCTION_COST
        case Select() | Convert() | Bitcast():
            return 1
        case Load():
            gathers = sum(d.kind in ("gather", "along") for d in op.access.dims)
            return calibration.GATHER_COST * gathers + (not op.access.in_bounds) + op.masked
        case Transpose():
            return 0 if op.permutation[-1:] == (len(op.permutation) - 1,) else calibration.GATHER_COST
        case _:
            return 0


def is_addressable(value: Value, expressions: Expressions) -> bool:
    """True if a tile is in memory with constant strides: in a buffer, or in an array that is loaded in bounds."""
    if expressions.is_available(value):
        return True
    op = expressions.definition[value]
    if isinstance(op, Reshape) and is_virtual(op):
        return is_addressable(op.operands[0], expressions)
    if not isinstance(op, Load) or not is_virtual(op) or op.masked:
        return False
    return op.access.in_bounds and not any(d.kind == "gather" for d in op.access.dims)
