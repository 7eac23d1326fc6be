"""The steps of a plan, the memory they use, and what computing a value takes.

A *step* is what the emitter makes one piece of code of; see `plan`.
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
from tilekern.lower.llvm.element_index import Coords, Index, is_virtual, operand_coords, register

_ARITHMETIC = ("add", "sub", "mul", "max", "min", "neg", "abs", "sign", "floor", "ceil", "round_even", "is_finite")
_BITS = ("and", "or", "xor", "not", "shift_left", "shift_right_logical", "shift_right_arithmetic")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")

# What takes one instruction or two.
_FAST = frozenset((*_ARITHMETIC, *_BITS, *_COMPARISONS))


@dataclass(eq=False)
class Buffer:
    """Memory for one tile at a time.

    Attributes:
      nbytes: its size.
      within: the slot that it became a part of.
      offset: where it begins in the scratch memory.
      first: the number of the step that writes it first.
      last: the number of the last step that it must last for.
    """

    nbytes: int
    merged_into: Buffer | None = None
    offset: int = 0
    first_use: int = -1
    last_use: int = -1

    @property
    def root(self) -> Buffer:
        """The slot that this one is now."""
        return self if self.merged_into is None else self.merged_into.root


@dataclass(eq=False)
class Step:
    """One op that has code of its own.

    Attributes:
      op: the op.
      temporary: memory that the code needs beside its results.
      form: how a dot reads its operands.
      init: whether a dot adds its products to what its slot holds.
      keeps: the tiles that are in memory from here on, and where.
      number: its place in the program; `end` behind its regions.
    """

    op: Op
    temporary: Buffer | None = None
    packing: Any = None
    init: bool = False
    produces: list[tuple[Value, Buffer]] = field(default_factory=list[tuple[Value, Buffer]])
    number: int = -1
    end: int = -1


@dataclass(eq=False)
class Map:
    """A tile that is computed into a slot."""

    value: Value
    buffer: Buffer


@dataclass(eq=False)
class LoopNest:
    """One loop nest.

    Attributes:
      space: the sizes of its loops.
      maps, reduces, stores: what it computes; reductions are of the last dim.
      keeps: the tiles that are in memory from here on, and where.
      number: its place in the program.
    """

    space: tuple[int, ...]
    maps: list[Map] = field(default_factory=list[Map])
    reduces: list[Reduce] = field(default_factory=list[Reduce])
    stores: list[Store] = field(default_factory=list[Store])
    produces: list[tuple[Value, Buffer]] = field(default_factory=list[tuple[Value, Buffer]])
    number: int = -1

    @property
    def sources(self) -> list[Value]:
        """What is computed for every lane."""
        stored = [v for op in self.stores for v in (op.value, op.mask) if v is not None]
        return [*(m.value for m in self.maps), *(op.operands[0] for op in self.reduces), *stored]


@dataclass(eq=False)
class BufferCopies:
    """Slots that are copied to others: each (from, to)."""

    moves: list[tuple[Buffer, Buffer]]
    produces: tuple[()] = ()
    number: int = -1


AnyStep = Step | LoopNest | BufferCopies


@dataclass
class Plan:
    """The steps of every block, and the slots.

    Attributes:
      steps: of each block.
      enters: the tiles that are in memory where a block begins, and not before.
      carried: the slots of the carries of each loop and of the results of each switch; None for scalars.
      scratch: the bytes of all slots.
    """

    steps: dict[Block, list[AnyStep]] = field(default_factory=dict[Block, "list[AnyStep]"])
    live_in: dict[Block, list[tuple[Value, Buffer]]] = field(default_factory=dict[Block, "list[tuple[Value, Buffer]]"])
    carry_buffers: dict[Op, list[Buffer | None]] = field(default_factory=dict[Op, "list[Buffer | None]"])
    scratch: int = 0


@dataclass
class FusedExpression:
    """What computing some values takes.

    Attributes:
      leaves: scalars and kept tiles that are read; whether the lane that is computed is the only one read.
      inner: the virtual tiles on the way, each once.
    """

    leaves: dict[Value, bool] = field(default_factory=dict[Value, bool])
    inner: dict[Value, bool] = field(default_factory=dict[Value, bool])


def symbolic_start(value: Value, most: int) -> Index:
    """A start of a dynamic slice, where only its name matters."""
    return register(f"start {id(value)} {most}")


class Expressions:
    """Finds closures.

    Attributes:
      definition: the op of each value.
      slots: of the tiles that are in memory at present.
    """

    def __init__(self, func: Func) -> None:
        self.definition = definitions(func)
        self.buffers: dict[Value, Buffer] = {}

    @contextmanager
    def inside(self, live_in: Iterable[tuple[Value, Buffer]]) -> Generator[None]:
        """A block, in which more tiles are in memory; those that come to be so inside are forgotten at its end."""
        outer = dict(self.buffers)
        self.buffers.update(live_in)
        yield
        self.buffers.clear()
        self.buffers.update(outer)

    def is_available(self, value: Value) -> bool:
        """Whether a value is in a register or in memory already."""
        return not value.tile.shape or value in self.buffers

    def of(self, space: tuple[int, ...], values: Iterable[Value]) -> FusedExpression:
        """The closure of values that are computed for each lane of a space."""
        here = tuple(register(f"d{d}") for d in range(len(space)))
        found, seen = FusedExpression(), set[tuple[Value, Coords]]()
        for value in values:
            self._visit(value, here[: len(value.tile.shape)], here, found, seen)
        return found

    def _visit(
        self, value: Value, coords: Coords, here: Coords, found: FusedExpression, seen: set[tuple[Value, Coords]]
    ) -> None:
        if (value, coords) in seen:
            return
        seen.add((value, coords))
        if self.is_available(value):
            found.leaves[value] = coords == here and found.leaves.get(value, True)
            return
        found.inner[value] = coords == here and found.inner.get(value, True)
        op = self.definition[value]
        for operand in op.operands:
            if isinstance(operand.type, TileType) and not operand.tile.shape:
                found.leaves.setdefault(operand, True)
        for operand, where in operand_coords(op, coords, symbolic_start):
            self._visit(operand, where, here, found, seen)

    def cost(self, value: Value) -> int:
        """The instructions, roughly, that an element of a tile takes."""
        return sum(_cost(self.definition[v]) for v in self.of(value.tile.shape, [value]).inner)


def _cost(op: Op) -> int:
    match op:
        case Elementwise():
            return 1 if op.function in _FAST else 12
        case Select() | Convert() | Bitcast():
            return 1
        case Load():
            gathers = sum(d.kind in ("gather", "along") for d in op.access.dims)
            return 4 * gathers + (not op.access.in_bounds) + op.masked
        case Transpose():
            return 0 if op.permutation[-1:] == (len(op.permutation) - 1,) else 4
        case _:
            return 0


def is_addressable(value: Value, expressions: Expressions) -> bool:
    """Whether a tile lies in memory, with its elements at fixed distances."""
    if expressions.is_available(value):
        return True
    op = expressions.definition[value]
    if isinstance(op, Reshape) and is_virtual(op):
        return is_addressable(op.operands[0], expressions)
    if not isinstance(op, Load) or not is_virtual(op) or op.masked:
        return False
    return op.access.in_bounds and not any(d.kind == "gather" for d in op.access.dims)
