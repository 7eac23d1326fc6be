"""Random loads and stores: affine, ragged, with halos, gathered, masked, filled; stores read back and redone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from tilekern.ir.core import Axis, Value, index_value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Access, Atomic, AtomicKind, Dim, Load, Position, Store, Term
from tilekern.ir.shape import Broadcast, Iota
from tilekern.ir.types import BOOL, I32, INDEX, DType, RefType, Role, TileType, kind_of
from tilekern.testing.programs import facts
from tilekern.testing.programs.facts import Fact, union
from tilekern.testing.programs.places import Places
from tilekern.testing.programs.values import LARGEST, Choose, numbers

BLOCKS = (1, 2, 4, 8, 3, 5)
# Of programs of few ops, whose tiles may be wider than vectors.
_WIDE = (4, 8, 16, 2, 32, 3, 5, 1)
_TRIES = 30  # of an access of few enough elements


@dataclass(frozen=True)
class Counter:
    """A value that counts the tiles of an axis.

    Attributes:
      whole: it takes every value from 0 on, so that programs and iterations can share an output out among them.
      offset: what to add to have it start from 0.
    """

    value: Value
    axis: Axis
    whole: bool = True
    offset: int = 0


@dataclass(frozen=True)
class Place:
    """Elements of an output that a program has stored.

    Attributes:
      positions: the operands of the access.
      counters: the folds inside which it was stored, which are over; to be replaced by counters of other folds.
    """

    output: Value
    access: Access
    positions: tuple[Value, ...]
    counters: tuple[Counter, ...] = ()


class Memory(Places):
    """Makes loads and stores.

    Attributes:
      seed: of the arrays; odd seeds give arrays with NaN and infinities.
      free: counters of the grid that ops may compute with.
      counters: of the grid and of the folds around the current block, as far as they are visible.
      covering: the folds around the current block, if all their iterations run it; else None.
      places: what the program has certainly stored before.
    """

    def __init__(self, choose: Choose, features: Sequence[str], dtypes: Sequence[DType]) -> None:
        super().__init__(choose, features, dtypes)
        self.seed = self.upto(63)
        self.axes = tuple(self.axis(name) for name in "ij"[: self.pick([1, 2, 0, 1, 2])])
        self.grid = tuple(Counter(index_value(a.name), a) for a in self.axes)
        self.sizes = [*(a.block for a in self.axes), self.pick(self._blocks), self.pick(self._blocks)]
        self.inputs = [self._input(f"x{n}") for n in range(1 + self.upto(2))]
        self.outputs: list[Value] = []
        self.free = self.grid
        self.counters = list(self.free)
        self.covering: tuple[Counter, ...] | None = ()
        self.places: list[Place] = []
        # How often at most an op of the current block runs, in all programs.
        self.repeats = prod(a.tiles for a in self.axes)

    @property
    def _blocks(self) -> tuple[int, ...]:
        return _WIDE if self.small else BLOCKS

    def axis(self, name: str) -> Axis:
        """An axis of a few tiles, often with a ragged last one; seldom of none."""
        block = self.pick(self._blocks)
        if self.chance(31):
            return Axis(name, 0, block)
        tail = self.upto(block - 1) if self.upto(1) else 0
        full = self.pick([2, 1, 3, 0]) if tail else self.pick([2, 1, 3])
        descending, group = (bool(self.upto(1)), 2 * self.upto(1)) if self.chance(3) else (False, 0)
        return Axis(name, full * block + tail, block, descending=descending, group=group)

    def _input(self, name: str) -> Value:
        """An array, whose dims have the lengths of tiles or axes, or nearly."""
        lengths = [*self.sizes, *(a.extent for a in self.axes), 13]
        shape = tuple(max(0, self.pick(lengths) + self.pick([0, 0, 1, -1])) for _ in range(self.pick([1, 2, 3, 2, 0])))
        value = Value(RefType(shape, self.pick((*self.dtypes[:2], *self.dtypes)), "in"), name)
        self.facts[value] = self._given(value.ref.dtype)
        return value

    # --- loads ---

    def source(self, tile: TileType) -> Value:
        """A value of memory, if an input has enough dims, or a constant."""
        refs = [r for r in self.inputs if r.ref.dtype == tile.dtype and len(r.ref.shape) >= len(tile.shape)]
        if not refs or tile.size > LARGEST or self.chance(3):
            return self.constant(tile)
        return self._load(self.pick(refs), tile.shape)

    def load(self) -> Value:
        """The tile of a random access."""
        ref = self.pick(self.inputs)
        return self._load(ref, None)

    def _load(self, ref: Value, shape: tuple[int, ...] | None) -> Value:
        """A load; `shape` says what it loads along its first dims, the others are indices."""
        operands: list[Value] = []
        tile_sizes = (
            None if shape is None else [(size,) for size in (*shape, *[None] * (len(ref.ref.shape) - len(shape)))]
        )
        extents = self._seen(ref.ref.shape) if shape is None else ref.ref.shape
        for _ in range(_TRIES):
            dims = list[Dim]()
            for n, length in enumerate(extents):
                gathers = [dim.size for dim in dims if dim.kind == "gather"]
                dims.append(self._dim(length, operands, None if tile_sizes is None else tile_sizes[n], gathers[-1:]))
            dims = self._together(dims) if shape is None else dims
            access = Access(tuple(dims), None if extents == ref.ref.shape else extents)
            if prod(access.shape) <= LARGEST:
                break
            operands.clear()
        else:  # choices that a shrinker left out are zeros, which make the same access each time
            access = Access(tuple(Dim("index", Position(), 1) for _ in ref.ref.shape))
        return self._read(ref, access, tuple(operands))

    def _seen(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in which an access sees an array; no choice is spent on it, so that other programs stay."""
        way = (self.seed + len(self.facts)) % 7
        if way == 0 and len(shape) > 1:
            return (shape[0] * shape[1], *shape[2:])
        *outer, last = shape or (1,)
        if way == 1 and 0 < len(shape) < 3 and last % 2 == 0:
            return (*outer, last // 2, 2)
        return (1, *shape) if way == 2 and len(shape) < 3 else shape

    def _together(self, dims: Sequence[Dim]) -> list[Dim]:
        """The dims, of index vectors of the same size some together."""
        joined: list[Dim] = []
        last: Dim | None = None
        for dim in dims:
            goes = last is not None and dim.kind == "gather" and dim.size == last.size and self.seed % 4
            joined.append(replace(dim, kind="along") if goes else dim)
            last = dim if dim.kind == "gather" and not goes else last
        return joined

    def _read(self, ref: Value, access: Access, positions: tuple[Value, ...]) -> Value:
        mask = self.value(TileType(access.shape, BOOL)) if "mask" in self.features and self.chance(2) else None
        filler = self.value(TileType((), ref.ref.dtype)) if self.chance(2) else None
        fill = () if filler is None else (filler,)
        operands = (ref, *positions, *(() if mask is None else (mask,)), *fill)
        op = Load(operands=operands, access=access, masked=mask is not None, filled=filler is not None)
        return self.emit(op, union(*self.fact(ref, *fill), *(() if fill else (Fact(0),))))

    def _dim(
        self, length: int, operands: list[Value], allowed: tuple[int | None] | None, gathers: Sequence[int] = ()
    ) -> Dim:
        """The access along one dim: by `allowed[0]` lanes, or as an index where that is None, or in any way.

        The index vector has the length of the vectors in `gathers`, so that all can index one load.
        """
        size = self.pick(self.sizes) if allowed is None else allowed[0]
        kinds: list[Literal["block", "index", "gather"]] = ["block", "block", "gather"]
        if "gather" not in self.features:
            kinds.pop()
        kind = "index" if size is None or (allowed is None and self.chance(3)) else self.pick(kinds)
        if kind == "gather" and allowed is None and gathers:
            size = gathers[-1]
        if kind == "block" and self.chance(3) and allowed in (None, (length,)) and 0 < length <= 16:
            return Dim("block", Position(), length, in_bounds=not self.upto(1))
        terms: list[tuple[Value, int]] = []
        if kind == "gather":
            assert size is not None
            terms.append((self.position(max(length, 1), (size,)), self.pick([1, 1, 2, -1])))
        if self.counters and self.upto(3):
            counter = self.pick(self.counters[::-1])
            block = counter.axis.block
            terms.append((counter.value, self.pick([block, size or 1, 1, 2 * block, -1, 0])))
        elif self.upto(1):
            terms.append((self.position(max(length, 1)), self.pick([1, 1, size or 1, -1])))
        if self.chance(4):
            terms.append((self.position(), self.pick([1, 2, -1])))
        elif kind != "gather" and self.chance(15):
            # Far outside: the product does not fit int32.
            terms = [(self.number(self.pick([2**31 - 1, -(2**31), 2**29]), INDEX), self.pick([1, 8, -8, 3]))]
        const = self.pick([0, 0, 0, 1, -1, -3, 2])
        start = len(operands)
        operands += [v for v, _ in terms]
        position = Position(tuple(Term(start + n, s, *self._digit()) for n, (_, s) in enumerate(terms)), const)
        return Dim(kind, position, 1 if kind == "index" else size or 1)

    def _digit(self) -> tuple[int, int]:
        """The divisor and the modulus of a term: mostly the whole number."""
        return (self.pick([1, 2, 3]), self.pick([0, 2, 3])) if "digits" in self.features and self.chance(5) else (1, 0)

    def arithmetic(self) -> None:
        """A position made of another one step by step, and perhaps the positions of lanes, and which are inside."""
        y = self.position()
        for _ in range(1 + self.upto(2)):
            x, c = y, self.pick([2, 3, 1, 4, 8])
            most, function = self.facts[x].bound, self.pick(["add", "mul", "sub", "div", "rem"])
            bound = {"add": most + c, "sub": most + c, "mul": most * c, "rem": min(c, most)}.get(function, most)
            y = self.ew(function, x, self.number(c, INDEX))
            self.facts[y] = Fact(bound)
        if self.upto(1):
            self._lanes(y)

    def _lanes(self, start: Value) -> None:
        tile = TileType((self.pick(self.sizes),), I32)
        first = self.emit(Broadcast(operands=(start,), shape=tile.shape, dims=()), self.facts[start], visible=False)
        lanes = self.ew("add", first, self.emit(Iota(shape=tile.shape, dtype=I32, dim=0), Fact(max(tile.shape))))
        if self.upto(1):
            self.ew(self.pick(facts.COMPARISONS), lanes, self.number(self.upto(13), tile))

    # --- stores ---

    def store(self) -> None:
        """Store a value to an output of its own, shared out among all programs and iterations."""
        if self.covering is not None:
            self.store_value(self.any())

    def store_value(self, value: Value) -> None:
        """Store a value to an output of its own, shared out among all programs."""
        assert self.covering is not None
        place = self.place(value.tile, self.covering)
        self.facts[place.output] = self.facts[value]
        self._write(place, value)

    def place(self, tile: TileType, covering: tuple[Counter, ...], role: Role = "out") -> Place:
        """A new output with a place for a tile of each program and iteration, and the access to that place.

        A dim of the tile that is as long as the block of a counter's axis holds that axis, without lanes behind its
        extent; other counters are indices.
        """
        counters = [*self.grid, *covering]
        entries: list[tuple[int, Dim, Value | None]] = []
        for size in tile.shape:
            counter = self._along(counters, size)
            if counter is not None:
                counters.remove(counter)
                entries.append((counter.axis.extent, *self._own_tile(counter)))
            else:
                entries.append((size, Dim("block", Position(), size, in_bounds=not self.upto(1)), None))
        for counter in counters:
            for entry in self._own_index(counter):
                entries.insert(self.upto(len(entries)), entry)
        output = self._output(tuple(length for length, _, _ in entries), tile.dtype, role)
        positions: list[Value] = []
        dims: list[Dim] = []
        for _, dim, value in entries:
            terms = tuple(replace(t, operand=len(positions)) for t in dim.position.terms)
            dims.append(replace(dim, position=replace(dim.position, terms=terms)))
            positions += [value] if value is not None else []
        # Every position has one term, so the operands are in the order of the dims; the value's dims are too.
        place = Place(output, Access(tuple(dims)), tuple(positions))
        assert place.access.shape == tile.shape
        self.places.append(place)
        return place

    def _along(self, counters: Sequence[Counter], size: int) -> Counter | None:
        """The counter of the tiles that lie along a dim of an output; None if no counter moves along the dim."""
        matching = [c for c in counters if c.axis.block == size and not c.offset]
        return self.pick(matching) if matching and self.upto(2) else None

    def _output(self, shape: tuple[int, ...], dtype: DType, role: Role) -> Value:
        output = Value(RefType(shape, dtype, role), f"o{len(self.outputs)}")
        self.outputs.append(output)
        return output

    def _own_index(self, counter: Counter) -> list[tuple[int, Dim, Value]]:
        """The dims by which an output counts the tiles of an axis: one, or the two digits of the index."""
        tiles = counter.axis.tiles
        if "digits" in self.features and tiles > 0 and tiles % 2 == 0 and not counter.offset and self.chance(3):
            digits = (tiles // 2, Term(0, 1, 2)), (2, Term(0, 1, 1, 2))
            return [(length, Dim("index", Position((term,))), counter.value) for length, term in digits]
        return [(tiles, Dim("index", Position((Term(0, 1),), counter.offset)), counter.value)]

    def _own_tile(self, counter: Counter) -> tuple[Dim, Value]:
        """The tile of an axis: its index times the block, as the access says or as ops say, in order or gathered."""
        block, way = counter.axis.block, self.upto(5)
        if way < 4:
            return Dim("block", Position((Term(0, block),)), block), counter.value
        start = self.ew("mul", counter.value, self.number(block, INDEX))
        if way == 4 or "scatter" not in self.features:
            return Dim("block", Position((Term(0, 1),)), block), start
        lanes = self.emit(Iota(shape=(block,), dtype=I32, dim=0), Fact(block))
        backward = self.ew("sub", self.number(block - 1, lanes.tile), lanes)
        first = self.emit(Broadcast(operands=(start,), shape=(block,), dims=()), self.facts[start])
        return Dim("gather", Position((Term(0, 1),)), block), self.ew("add", first, self.pick([lanes, backward]))

    def _write(self, place: Place, value: Value) -> None:
        """A store, at once or in two parts with complementary masks."""
        tile = TileType(place.access.shape, BOOL)
        way = self.upto(6) if "mask" in self.features else 0
        if way < 5:
            self._add_store(place, value)
        elif way == 5:
            self._add_store(place, value, self.number(1, tile))
        else:
            mask = self.value(tile)
            self._add_store(place, value, mask)
            other = self.value(value.tile) if "mask" in self.features else value
            if not self.facts[other].within(self.facts[place.output]):
                other = value
            self._add_store(place, other, self.emit(Elementwise(function="not", operands=(mask,)), Fact(1)))

    def _add_store(self, place: Place, value: Value, mask: Value | None = None) -> None:
        operands = (place.output, value, *place.positions, *(() if mask is None else (mask,)))
        self.use(operands)
        self.builder.add(Store(operands=operands, access=place.access, masked=mask is not None))

    # --- outputs that need not be stored to ---

    def partial(self) -> None:
        """An output that starts as zeros or as an input; perhaps the program stores to its place."""
        role: Role = self.pick(["zeros", "inout"])
        tile = self.any().tile
        place = self.place(tile, (), role)
        self.facts[place.output] = self._given(tile.dtype) if role == "inout" else exact_numbers(tile.dtype)
        self.overwrite_place(place)

    def _given(self, dtype: DType) -> Fact:
        """Facts of an input."""
        return replace(numbers(dtype), inf=bool(self.seed % 2) and kind_of(dtype) == "float")

    def atomic(self) -> None:
        """Add to a sum, or combine integers; anywhere, by any program, to any element."""
        self.updated(self.tame(self.any(), 2))

    def updated(self, value: Value) -> bool:
        """Add a value to a sum, or combine it with integers; False if that would round too much."""
        dtype, logical = value.tile.dtype, value.tile.dtype == BOOL
        integers = kind_of(dtype) in ("signed", "unsigned")
        role: Role = self.pick(["zeros", "inout"]) if logical or (integers and self.upto(1)) else "sum"
        kinds: list[AtomicKind] = ["and", "or", "xor"] if logical else ["add", "max", "min", "and", "or", "xor"]
        lengths = [self.pick([1, 2, 5]), *(n + self.pick([0, 1, -1]) for n in value.tile.shape), self.pick([1, 3])]
        lengths = [n for n in lengths if n > 0]
        positions: list[Value] = []
        shape = [None, *value.tile.shape][: len(lengths)]
        dims = [self._dim(n, positions, (size,)) for n, size in zip(lengths, shape, strict=False)]
        if [d.size for d in dims if d.kind != "index"] != list(value.tile.shape):
            return False
        fact = facts.reduce("sum", self.facts[value], self.repeats * value.tile.size, dtype)
        if fact is None:
            return False
        output = self._output(tuple(lengths[: len(dims)]), dtype, role)
        self.facts[output] = fact
        mask = self.value(TileType(value.tile.shape, BOOL)) if "mask" in self.features and self.chance(2) else None
        operands = (output, value, *positions, *(() if mask is None else (mask,)))
        kind = "add" if role == "sum" else self.pick(kinds)
        self.use(operands)
        access = Access(tuple(dims))
        self.builder.add(Atomic(operands=operands, access=access, masked=mask is not None, kind=kind))
        return True

    # --- what the program has stored ---

    def _open(self) -> list[Place]:
        """The places whose access has a meaning here; the program stores to one if there is none."""
        if not any(not p.counters for p in self.places):
            self.store()
        return [p for p in self.places if not p.counters]

    def read_back(self) -> Value | None:
        """Load what the program has stored."""
        places = self._open()
        if not places:
            return None
        place = self.pick(places[::-1])
        return self._read(place.output, place.access, place.positions)

    def overwrite(self) -> None:
        """Store once more to the same place, perhaps not to all of it; perhaps load before and behind that."""
        places = self._open()
        if not places:
            return
        place, watched = self.pick(places[::-1]), bool(self.upto(1))
        for step in range(3):
            if step == 1:
                self.overwrite_place(place)
            elif watched:
                op = Load(operands=(place.output, *place.positions), access=place.access)
                self.emit(op, union(self.facts[place.output], Fact(0)))

    def overwrite_place(self, place: Place) -> None:
        """Store another value to a place, perhaps under a mask."""
        value = self.fitted(self.value(TileType(place.access.shape, place.output.ref.dtype)), self.facts[place.output])
        if value is not None:
            masked = "mask" in self.features and self.upto(1)
            self._add_store(place, value, self.value(TileType(place.access.shape, BOOL)) if masked else None)

    def fitted(self, value: Value, target: Fact) -> Value | None:
        """`value`, or what can be made of it, such that `target` holds for it."""
        fact, floats = self.facts[value], kind_of(value.tile.dtype) == "float"
        if floats and not fact.error and not target.error and fact.grain < min(target.grain, 1):
            value = self.ew("floor", value)
            fact = self.facts[value]
        if floats and (fact.bound > target.bound or fact.inf > target.inf) and target.bound >= 1:
            value = self.tame(value, int(min(target.bound, 4)))
            fact = self.facts[value]
        if floats and not fact.error and not target.error and fact.grain < min(target.grain, 1):
            value = self.ew("floor", value)
        return value if self.facts[value].within(target) else None


def exact_numbers(dtype: DType) -> Fact:
    """Facts required of an output that several stores write to."""
    return replace(numbers(dtype), grain=0)


def widened(fact: Fact, dtype: DType, length: int) -> Fact | None:
    """A fact for a carry that starts as `fact` says, with room for `length` steps; None if errors would add up."""
    if kind_of(dtype) != "float":
        return facts.whole(dtype)
    if fact.error:
        bound = min(max(8.0, 4 * fact.bound), facts.limit(dtype))
        error = max(4 * fact.error, 2 * (length + 1) * facts.roundoff(dtype) * bound)
        return facts.meaningful(Fact(bound, facts.FINEST, error, fact.inf))
    grain = min(0, fact.grain) if fact.grain > facts.FINEST else fact.grain
    bound = max(fact.bound, min(64.0, 2.0 ** max(facts.digits(dtype) + grain, -1000)))
    return Fact(bound, grain, 0.0, fact.inf)
