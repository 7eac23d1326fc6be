"""The structure of the block IR: values, ops, blocks and functions.

Typed SSA in frozen dataclasses. A `Value` is compared by identity. An `Op` computes the types of its results from its
operands and attributes (`infer`) when it is made, so an ill-typed op cannot exist; `verify` runs the rule again. A
`Block` is a list of ops with arguments and results; it may use any value of the blocks around it. A `Func` is one
program of a grid: its body's arguments are the program's index along each axis.

Adding an op: a class here in `ir/` (or a row of the elementwise table) with its type rule and its NumPy meaning, one
lowering rule for each backend, and tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, replace
from typing import Any, ClassVar, Self

import numpy as np

from tilekern.errors import VerifyError
from tilekern.ir.records import record
from tilekern.ir.types import INDEX, RefType, TileType, Type
from tilekern.source import UNKNOWN, Loc

Array = np.ndarray[Any, np.dtype[Any]]


@record(eq=False)
class Value:
    """An SSA value; `name` is a hint for printing, not an identity."""

    type: Type
    name: str = ""

    @property
    def tile(self) -> TileType:
        """The type of a value that is a tile."""
        if not isinstance(self.type, TileType):
            raise VerifyError(f"expected a tile, got {self.type}")
        return self.type

    @property
    def ref(self) -> RefType:
        """The type of a value that is a ref."""
        if not isinstance(self.type, RefType):
            raise VerifyError(f"expected a ref, got {self.type}")
        return self.type


@record(eq=False)
class Block:
    """Ops in order, the arguments they may use, and the values the block yields."""

    args: tuple[Value, ...]
    ops: tuple[Op, ...]
    results: tuple[Value, ...]

    def walk(self) -> Iterator[Op]:
        """Every op of the block and of the blocks inside it, in program order."""
        for op in self.ops:
            yield from op.walk()


@record(eq=False, kw_only=True)
class Op:
    """Base of all ops. Subclasses add attributes as fields, and define types in `infer` and meaning in `evaluate`.

    Attributes:
      operands: the values the op uses; ops with regions may use more inside them.
      regions: nested blocks.
      hint: a name for the results in print.
      loc: the user's line.
      results: the values that the op defines, of the types that `infer()` returns.
    """

    name: ClassVar[str] = ""
    pure: ClassVar[bool] = True  # neither reads nor writes memory, and always ends

    operands: tuple[Value, ...] = ()
    regions: tuple[Block, ...] = ()
    hint: str = ""
    loc: Loc = UNKNOWN
    results: tuple[Value, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "results", tuple(Value(t, self.hint) for t in self.infer()))

    def infer(self) -> tuple[TileType, ...]:
        """The types of the results; raises `VerifyError` where the operands or attributes do not fit."""
        raise NotImplementedError

    def evaluate(self, *operands: Array) -> Array:
        """The result on NumPy arrays: the meaning of a pure op with one result and no region."""
        raise NotImplementedError(self.name)

    @property
    def result(self) -> Value:
        """The only result."""
        (value,) = self.results
        return value

    def copy(self, operands: tuple[Value, ...] | None = None, regions: tuple[Block, ...] | None = None) -> Self:
        """The same op on other operands or regions, with fresh results."""
        operands = self.operands if operands is None else operands
        regions = self.regions if regions is None else regions
        if not (_same_types(operands, self.operands) and _same_signatures(regions, self.regions)):
            return replace(self, operands=operands, regions=regions)
        # `infer` depends on attributes and these types alone, so the results have the types that they had.
        copy = object.__new__(type(self))
        results = tuple([Value(v.type, v.name) for v in self.results])
        copy.__dict__.update(self.__dict__, operands=operands, regions=regions, results=results)
        return copy

    def walk(self) -> Iterator[Op]:
        """The op, and every op of the blocks inside it, in program order."""
        yield self
        for region in self.regions:
            yield from region.walk()

    def uses(self) -> Iterator[Value]:
        """The values that the op and all ops inside it use, once for each use; a block uses the values it yields."""
        for op in self.walk():
            yield from op.operands
            for region in op.regions:
                yield from region.results

    def tiles(self, count: int | None = None) -> tuple[TileType, ...]:
        """The types of the operands, which must all be tiles; if `count` is given, there must be as many."""
        actual = len(self.operands)
        require(count in (None, actual), f"{self.name} takes {count} operands, got {actual}")
        return tuple(v.tile for v in self.operands)


def unknown_op(op: Op, module: str) -> AssertionError:
    """The error of an analysis for a class of op that it has no rule for: a bug of the compiler.

    Args:
      op: the op.
      module: `__name__` of the analysis, to find the place for the rule.
    """
    return AssertionError(f"{module} has no rule for the op {op.name}: see CONTRIBUTING.md, Adding an op")


def _same_types(left: tuple[Value, ...], right: tuple[Value, ...]) -> bool:
    """True if both tuples have equally many values, which pairwise have the same types."""
    if len(left) != len(right):
        return False
    return all(a is b or a.type is b.type or a.type == b.type for a, b in zip(left, right, strict=True))


def _same_signatures(left: tuple[Block, ...], right: tuple[Block, ...]) -> bool:
    """True if both tuples have equally many blocks, which pairwise take and yield values of the same types."""
    if len(left) != len(right):
        return False
    pairs = zip(left, right, strict=True)
    return all(a is b or (_same_types(a.args, b.args) and _same_types(a.results, b.results)) for a, b in pairs)


def require(condition: bool, message: str) -> None:
    """Raise `VerifyError(message)` unless `condition`."""
    if not condition:
        raise VerifyError(message)


def require_dims(dims: tuple[int, ...], tile: TileType) -> None:
    """Raise `VerifyError` unless `dims` are different dims of `tile`."""
    inside = all(0 <= d < len(tile.shape) for d in dims)
    require(inside and len(set(dims)) == len(dims), f"{dims} are not different dims of {tile}")


def cdiv(a: int, b: int) -> int:
    """a / b rounded up, for non-negative a and positive b."""
    return -(-a // b)


def round_up(n: int, multiple: int) -> int:
    """The least multiple that is no smaller than non-negative n."""
    return cdiv(n, multiple) * multiple


@record
class Axis:
    """`extent` elements cut into tiles of `block`; the last tile may reach past the end.

    The order in which the programs of a grid start is a hint, without influence on results: a `descending` axis starts
    with its last tile; `group` tiles of an axis run before the next axis advances by one tile.
    """

    name: str
    extent: int
    block: int = 1
    descending: bool = False
    group: int = 0

    @property
    def tiles(self) -> int:
        """The number of tiles."""
        return cdiv(self.extent, self.block)

    @property
    def full_tiles(self) -> int:
        """The number of tiles that lie wholly inside the extent."""
        return self.extent // self.block

    def first_tile(self, start: int) -> int:
        """The first tile of a fold from an element, which is clamped to the extent."""
        return min(max(start, 0), self.extent) // self.block

    def end_tile(self, stop: int) -> int:
        """The tile behind the last tile of a fold up to an element, which is clamped to the extent."""
        return cdiv(min(max(stop, 0), self.extent), self.block)


@record(eq=False)
class Func:
    """A grid of programs over arrays.

    Attributes:
      name: the name of the user's function.
      params: the refs, inputs before outputs.
      axes: the grid; there is one program for each combination of tile indices.
      body: the ops of one program; its arguments are the program's tile index along each axis, int32.
      loc: the place of the user's function.
    """

    name: str
    params: tuple[Value, ...]
    axes: tuple[Axis, ...]
    body: Block
    loc: Loc = UNKNOWN

    # Set by `tilekern.ir.text`, which knows the syntax of every op and so is above this module.
    to_text: ClassVar[Callable[[Func], str]]

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The params that have a value before the programs run."""
        return tuple(p for p in self.params if p.ref.role in ("in", "inout"))

    @property
    def outputs(self) -> tuple[Value, ...]:
        """The params that programs write to; params that are inputs, too, come first."""
        return tuple(p for p in self.params if p.ref.role != "in")

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of programs along each axis."""
        return tuple(axis.tiles for axis in self.axes)

    def walk(self) -> Iterator[Op]:
        """Every op, in program order."""
        return self.body.walk()

    def __str__(self) -> str:
        return Func.to_text(self)


def index_value(name: str) -> Value:
    """A fresh block argument that is a position along an axis."""
    return Value(INDEX, name)


def definitions(func: Func) -> Mapping[Value, Op]:
    """Maps each value to the op that defines it; block arguments and params are left out."""
    return {result: op for op in func.walk() for result in op.results}


class Builder:
    """Collects ops in program order; `block` opens a nested block."""

    def __init__(self) -> None:
        self._ops: list[Op] = []

    def add(self, op: Op) -> tuple[Value, ...]:
        """Append an op and return its results."""
        self._ops.append(op)
        return op.results

    def one(self, op: Op) -> Value:
        """Append an op with one result and return the result."""
        self._ops.append(op)
        return op.result

    def block(self, args: tuple[Value, ...], body: Callable[..., tuple[Value, ...]]) -> Block:
        """The block of the ops that `body(*args)` appends; the values that it returns are the block's results."""
        outer, self._ops = self._ops, []
        try:
            results = body(*args)
            return Block(args, tuple(self._ops), results)
        finally:
            self._ops = outer
