"""Random ops on values: every move adds an op or a few to the block that is being built, and knows its facts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from tilekern.ir.compute import PRECISIONS, Constant, Convert, Dot, Monoid, Reduce, Select, splat
from tilekern.ir.core import Array, Builder, Op, Value
from tilekern.ir.elementwise import TABLE, Elementwise
from tilekern.ir.shape import Broadcast, Concatenate, Iota, Pad, Reshape, Reverse, Slice, Transpose
from tilekern.ir.types import BOOL, F32, F64, I32, DType, TileType, dtype_name, kind_of
from tilekern.testing.programs import facts
from tilekern.testing.programs.facts import Fact, union

# A tile has no more elements than this.
LARGEST = 256

# Chooses a number from 0 to its argument; 0 is the simplest choice.
Choose = Callable[[int], int]


def numbers(dtype: DType) -> Fact:
    """Facts of inputs and constants: floats are small multiples of 1/4, integers are any."""
    if kind_of(dtype) != "float":
        return facts.whole(dtype)
    return Fact(2.0 ** min(3, facts.digits(dtype) - 2), -2)


@dataclass
class Scope:
    """The values that the current block may use, and those made in it that nothing uses."""

    values: list[Value] = field(default_factory=list[Value])
    unused: dict[Value, None] = field(default_factory=dict[Value, None])


class Values:
    """Makes pure ops.

    Attributes:
      facts: of every value.
      scope: of the current block.
      sizes: the lengths that tiles have along their dims.
      small: the program has few ops.
    """

    small = False

    def __init__(self, choose: Choose, features: Sequence[str], dtypes: Sequence[DType]) -> None:
        self.upto, self.features = choose, frozenset(features)
        # A few dtypes a program, so that values meet others of their type; bool and int32 are always there.
        usual = [d for d in (F32, F64) if d in dtypes] if self.small else []
        chosen = [self.pick(usual if usual and self.upto(3) else dtypes) for _ in range(2)]
        self.dtypes = tuple(dict.fromkeys([*chosen, *(d for d in (I32, BOOL) if d in dtypes)]))
        self.builder = Builder()
        self.facts: dict[Value, Fact] = {}
        self.scope = Scope()
        self.sizes: list[int] = []

    # --- choices ---

    def pick[T](self, items: Sequence[T]) -> T:
        """One of some items; the first one is the simplest."""
        return items[self.upto(len(items) - 1)] if len(items) > 1 else items[0]

    def chance(self, n: int) -> bool:
        """True once in n + 1 times."""
        return self.upto(n) == n

    def shape(self, most: int = 3) -> tuple[int, ...]:
        """The shape of a tile."""
        while prod(shape := tuple(self.pick(self.sizes) for _ in range(self.upto(most)))) > LARGEST:
            pass
        return shape

    # --- ops ---

    def emit(self, op: Op, fact: Fact, visible: bool = True) -> Value:
        """Add an op with one result, which other ops may choose as an operand if it is `visible`."""
        self.use(op.operands)
        value = self.builder.one(op)
        self.facts[value] = fact
        if visible:
            self.scope.values.append(value)
            self.scope.unused[value] = None
        return value

    def use(self, values: Sequence[Value]) -> None:
        """Note that values are used."""
        for value in values:
            self.scope.unused.pop(value, None)

    @contextmanager
    def inner(self, args: Sequence[Value], arg_facts: Sequence[Fact]) -> Any:
        """A block inside the current one."""
        outer = self.scope
        self.scope = Scope([*outer.values, *args])
        self.facts.update(zip(args, arg_facts, strict=True))
        try:
            yield
        finally:
            self.scope = outer

    def fact(self, *values: Value) -> tuple[Fact, ...]:
        """The facts of values."""
        return tuple(self.facts[v] for v in values)

    # --- operands ---

    def any(self, *kinds: str) -> Value:
        """A value in scope, most likely a recent one, or a new one: of a dtype of `kinds`, if the program has one."""
        dtypes = [d for d in self.dtypes if not kinds or kind_of(d) in kinds] or [*self.dtypes]
        dtype = self.pick(dtypes)
        candidates = [v for v in self.scope.values if v.tile.dtype == dtype]
        if candidates and not self.chance(4):
            return self.pick(candidates[-6:][::-1])
        return self.source(TileType(self.shape(2), dtype))

    def value(self, tile: TileType) -> Value:
        """A value of this type: one in scope, or a coerced value of another type, or a new one."""
        way = self.upto(7)
        candidates = [v for v in self.scope.values[-24:] if v.type == tile]
        if candidates and way < 5:
            return self.pick(candidates[::-1][:6])
        if way < 6 and (coerced := self.coerce(self.any(), tile)) is not None:
            return coerced
        return self.source(tile)

    def source(self, tile: TileType) -> Value:
        """A value of this type from an op without operands; subclasses also load one."""
        return self.constant(tile)

    def constant(self, tile: TileType) -> Value:
        """A constant tile."""
        fact = numbers(tile.dtype)
        if not self.upto(3):
            number = self.pick([0, 1, -1, 2, 3, -2])
            number = number % 2 if tile.dtype == BOOL else abs(number) if kind_of(tile.dtype) == "unsigned" else number
            fact = Fact(max(1, abs(number)))
            return self.emit(splat(number, tile), fact)
        array = draw_array(tile.shape, tile.dtype, self.upto(63), specials=False)
        return self.emit(Constant(array=array, shape=tile.shape), fact)

    def number(self, value: float, tile: TileType) -> Value:
        """A splat of a known number."""
        return self.emit(splat(value, tile), Fact(abs(value), -3), visible=False)

    def clamp(self, x: Value, low: float, high: float) -> Value:
        """`x`, but between two numbers with few digits."""
        fact, bound = self.facts[x], max(abs(low), abs(high))
        raised = self.ew("max", x, self.number(low, x.tile))
        clamped = self.ew("min", raised, self.number(high, x.tile))
        self.facts[clamped] = Fact(bound, min(fact.grain, -3), fact.error)
        return clamped

    def tame(self, x: Value, bound: int = 4) -> Value:
        """`x` clamped to [-bound, bound], or to [0, bound] if unsigned; `x` itself if bool or within."""
        fact = self.facts[x]
        if x.tile.dtype == BOOL or (fact.bound <= bound and not fact.inf):
            return x
        return self.clamp(x, 0 if kind_of(x.tile.dtype) == "unsigned" else -bound, bound)

    def position(self, most: int = 8, shape: tuple[int, ...] = ()) -> Value:
        """An int32 value for index arithmetic: one bounded by 64, or one clamped between 0, -1 or -2 and `most`."""
        candidates = [v for v in self.scope.values if v.type == TileType(shape, I32) and self.facts[v].bound <= 64]
        if candidates and not self.chance(5):
            return self.pick(candidates[::-1][:8])
        return self.clamp(self.value(TileType(shape, I32)), self.pick([0, -1, -2]), most)

    def coerce(self, x: Value, tile: TileType) -> Value | None:
        """`x` cast, moved and repeated so that it has this type; None if facts cannot promise the result."""
        converted = x if x.tile.dtype == tile.dtype else self.converted(x, tile.dtype)
        return converted and self.reshaped(converted, tile.shape)

    def reshaped(self, x: Value, shape: tuple[int, ...]) -> Value | None:
        """The elements of `x` in another shape: transposed or reshaped if the sizes are equal, else broadcast.

        A tile that does not broadcast is filled up with zeros, or reduced to its maximum first; None if that fails.
        """
        have, fact = x.tile.shape, self.facts[x]
        if have == shape:
            return x
        if prod(have) == prod(shape):
            if sorted(have) == sorted(shape) and self.upto(1):
                order = sorted(range(len(have)), key=have.__getitem__)
                inverse = sorted(range(len(have)), key=sorted(range(len(shape)), key=shape.__getitem__).__getitem__)
                return self.emit(Transpose(operands=(x,), permutation=tuple(order[d] for d in inverse)), fact)
            return self.emit(Reshape(operands=(x,), shape=shape), fact)
        dims = _embedding(have, shape)
        if dims is None and "shape" in self.features:
            return self._refilled(x, shape)
        if dims is None:
            reduced = self.reduced(x, tuple(range(len(have))), "max")
            x, dims = (reduced, ()) if reduced is not None else (x, None)
        return None if dims is None else self.emit(Broadcast(operands=(x,), shape=shape, dims=dims), fact)

    def _refilled(self, x: Value, shape: tuple[int, ...]) -> Value:
        """A tile of this shape: the elements of `x` in order, cut off or followed by zeros."""
        size, fact, zero = x.tile.size, self.facts[x], self.number(0, TileType((), x.tile.dtype))
        flat = self.emit(Reshape(operands=(x,), shape=(size,)), fact, visible=False)
        pad = Pad(operands=(flat, zero), low=(0,), high=(prod(shape) - size,), interior=(0,))
        return self.emit(Reshape(operands=(self.emit(pad, fact, visible=False),), shape=shape), fact)

    # --- elementwise ---

    def ew(self, function: str, *operands: Value) -> Value:
        """The value of an elementwise op, with the fact of `facts.elementwise`; a caller that knows better sets it."""
        dtype, operands_fact = operands[0].tile.dtype, self.fact(*operands)
        known_fact = facts.elementwise(function, operands_fact, dtype)
        assert known_fact is not None
        return self.emit(Elementwise(function=function, operands=operands), known_fact)

    def elementwise(self) -> Value | None:
        """A random function of the table, but none that rounds; None if its result could not be promised."""
        x = self.any()
        dtype = x.tile.dtype
        smooth = (*facts.SMOOTH, *facts.SMOOTH_PAIRS) if kind_of(dtype) == "float" else ()
        function = self.pick([n for n, row in TABLE.items() if kind_of(dtype) in row.accepts and n not in smooth])
        operands = (x, *(self.value(x.tile) for _ in range(TABLE[function].arity - 1)))
        if len(operands) == 2 and self.upto(1):
            operands = operands[::-1]
        if function in ("div", "rem") and kind_of(dtype) != "float":
            operands = (operands[0], self.ew("or", operands[1], self.number(1, x.tile)))
        if function == "nextafter":
            operands = (self.clamp(operands[0], 0.25, 4), operands[1])
        return self._computed(function, operands)

    def _computed(self, function: str, operands: tuple[Value, ...]) -> Value | None:
        """The op if it is exact, or an operand is not; else the op on tamed operands; None if that has no fact."""
        dtype = operands[0].tile.dtype
        rounds = kind_of(dtype) == "float" and function in ("add", "sub", "mul")
        rule = facts.arithmetic if rounds else facts.elementwise
        fact = rule(function, self.fact(*operands), dtype)
        if fact is None or (fact.error and not any(f.error for f in self.fact(*operands))):
            operands = tuple(map(self.tame, operands))
            fact = rule(function, self.fact(*operands), dtype)
        return fact and self.emit(Elementwise(function=function, operands=operands), fact)

    def added(self, x: Value, y: Value) -> Value | None:
        """The sum of two tiles; None if facts cannot promise it."""
        return self._computed("add", (x, y))

    def smooth(self) -> Value | None:
        """A function that rounds, of floats that are clamped to its domain; None if the program has no floats."""
        x = self.any("float")
        if kind_of(x.tile.dtype) != "float":
            return None
        return self._smooth_of(self.pick([*facts.SMOOTH, *facts.SMOOTH_PAIRS]), x)

    def _smooth_of(self, function: str, x: Value) -> Value | None:
        """A function that rounds, of `x` and perhaps another value, clamped to its domains; None without a fact."""
        domains = (facts.SMOOTH[function],) if function in facts.SMOOTH else facts.SMOOTH_PAIRS[function]
        operands = (x, *(self.value(x.tile) for _ in domains[1:]))
        high = facts.limit(x.tile.dtype)
        operands = tuple(self.clamp(v, d.low, min(d.high, high)) for v, d in zip(operands, domains, strict=True))
        fact = facts.smooth(domains, self.fact(*operands), x.tile.dtype)
        return fact and self.emit(Elementwise(function=function, operands=operands), fact)

    def compare(self) -> Value | None:
        """A comparison of two tiles, as bools; None if the left one is inexact, for it might decide otherwise."""
        x = self.any()
        if self.facts[x].error:
            return None
        return self.ew(self.pick(facts.COMPARISONS), x, self._exact(x.tile))

    def _exact(self, tile: TileType) -> Value:
        """A value of this type that is the same on every backend."""
        value = self.value(tile)
        return self.constant(tile) if self.facts[value].error else value

    def select(self) -> Value:
        """A choice between two values, by a mask."""
        x = self.any()
        which = self.value(TileType(x.tile.shape, BOOL))
        operands = self.pick([(x, self.value(x.tile)), (self.value(x.tile), x)])
        return self.emit(Select(operands=(which, *operands)), union(*self.fact(*operands)))

    def convert(self) -> Value | None:
        """A cast to a random dtype; None if facts cannot promise the result, as of inexact floats to integers."""
        return self.converted(self.any(), self.pick(self.dtypes))

    def converted(self, x: Value, dtype: DType) -> Value | None:
        """`x` cast to `dtype`, clamped to [-2, 2] before if the cast would round; None if facts cannot promise it."""
        source = x.tile.dtype
        fact = facts.convert(self.facts[x], source, dtype)
        if fact is None or fact.error > self.facts[x].error:
            x = self.tame(x, 2)
            fact = facts.convert(self.facts[x], source, dtype)
        if fact is None:
            return None
        inf = fact.inf and dtype_name(dtype) != "f8e4m3fn"  # which has NaN instead
        return self.emit(Convert(operands=(x,), dtype=dtype), replace(fact, inf=inf))

    # --- shapes, reductions, dots ---

    def move(self) -> Value:
        """An op that moves elements."""
        moves: list[Callable[[Value], Op]] = [self._transpose, self._reverse, self._slice, self._pad, self._concatenate]
        x = self.any()
        if not x.tile.shape or self.chance(4):
            return self._broadcast(x)
        op = self.pick(moves)(x)
        return self.emit(op, union(*self.fact(*op.operands)))

    def _broadcast(self, x: Value) -> Value:
        shape = list(x.tile.shape)
        place = self.upto(len(shape))
        if prod(shape) * max(self.sizes) > LARGEST:
            return x
        shape.insert(place, self.pick(self.sizes))
        dims = tuple(d for d in range(len(shape)) if d != place)
        return self.emit(Broadcast(operands=(x,), shape=tuple(shape), dims=dims), self.facts[x])

    def _transpose(self, x: Value) -> Op:
        order = list(range(len(x.tile.shape)))
        return Transpose(operands=(x,), permutation=tuple(order.pop(self.upto(len(order) - 1)) for _ in x.tile.shape))

    def _reverse(self, x: Value) -> Op:
        return Reverse(operands=(x,), dims=tuple(d for d in range(len(x.tile.shape)) if not self.upto(1)))

    def _slice(self, x: Value) -> Op:
        bounds = [(low := self.upto(min(n, 63) - 1), n - self.upto(n - 1 - low)) for n in x.tile.shape]
        starts, stops = zip(*bounds, strict=True)
        return Slice(operands=(x,), start=starts, stop=stops, stride=tuple(1 + self.upto(2) for _ in bounds))

    def _pad(self, x: Value) -> Op:
        """Padding, of which a negative amount cuts off all but one element at most."""
        room = 2 if x.tile.size <= LARGEST // 27 else 0
        amounts = [(self.upto(room) - (n > 3), self.upto(room) - (n > 3), self.upto(room // 2)) for n in x.tile.shape]
        low, high, interior = zip(*amounts, strict=True)
        return Pad(operands=(x, self.value(TileType((), x.tile.dtype))), low=low, high=high, interior=interior)

    def _concatenate(self, x: Value) -> Op:
        dim = self.upto(len(x.tile.shape) - 1)
        if x.tile.size * 2 > LARGEST:
            return Concatenate(operands=(x,), dim=dim)
        return Concatenate(operands=self.pick([(x, self.value(x.tile)), (self.value(x.tile), x)]), dim=dim)

    def iota(self) -> Value:
        """The indices along a random dim, in a dtype of the program that holds them exactly; never bool."""
        shape = self.shape(2) or (self.pick(self.sizes),)
        dtype = self.pick([d for d in self.dtypes if d != BOOL] or [I32])
        while kind_of(dtype) == "float" and not facts.exact(Fact(max(shape)), dtype):
            dtype = I32
        return self.emit(Iota(shape=shape, dtype=dtype, dim=self.upto(len(shape) - 1)), Fact(max(shape)))

    def reduce(self) -> Value | None:
        """A random reduction over random dims, perhaps none; None if facts cannot promise the result."""
        x = self.any()
        dims = tuple(d for d in range(len(x.tile.shape)) if self.upto(1))
        monoids: dict[str, list[Monoid]] = {"float": ["sum", "max", "min", "prod"], "bool": ["or", "and", "max", "min"]}
        integers: list[Monoid] = ["sum", "max", "min", "prod", "and", "or"]
        return self.reduced(x, dims, self.pick(monoids.get(kind_of(x.tile.dtype), integers)))

    def reduced(self, x: Value, dims: tuple[int, ...], monoid: Monoid) -> Value | None:
        """`x` reduced over `dims`, clamped to [-1, 1] before if it would round; None if facts cannot promise it."""
        length = prod(x.tile.shape[d] for d in dims)
        fact = facts.reduce(monoid, self.facts[x], length, x.tile.dtype)
        if fact is None or fact.error > self.facts[x].error:
            x = self.tame(x, 1)
            fact = facts.reduce(monoid, self.facts[x], length, x.tile.dtype)
        return fact and self.emit(Reduce(operands=(x,), monoid=monoid, dims=dims), fact)

    def dot(self) -> Value | None:
        """A contraction over one or two dims, batched or not, in any order of the dims; None if it is too large."""
        dtypes = [d for d in self.dtypes if d != BOOL]
        if not dtypes:
            return None
        dtype, inner, batch = self.pick(dtypes), 1 + self.chance(4), int(self.chance(3))
        shared = [self.pick(self.sizes) for _ in range(inner + batch)]
        labels = [f"s{n}" for n in range(inner + batch)]
        size = dict(zip(labels, shared, strict=True))
        orders: list[list[str]] = []
        for side in "xy":
            free = [f"{side}{n}" for n in range(self.pick([1, 1, 0, 2] if inner + batch < 3 else [1, 0]))]
            size.update((name, self.pick(self.sizes)) for name in free)
            labels_left = [*free, *labels]
            orders.append([labels_left.pop(self.upto(len(labels_left) - 1)) for _ in range(len(labels_left))])
        shapes = [tuple(size[n] for n in order) for order in orders]
        if any(prod(s) > LARGEST for s in shapes) or prod(size.values()) > 4 * LARGEST:
            return None
        operands = tuple(self.tame(self.value(TileType(s, dtype)), 8) for s in shapes)
        dims = [[tuple(order.index(n) for n in part) for order in orders] for part in (labels[:inner], labels[inner:])]
        precision = self.pick(PRECISIONS)
        x, y = self.fact(*operands)
        fact = facts.dot(x, y, prod(shared[:inner]), dtype, precision)
        (contract, batched) = ((d[0], d[1]) for d in dims)
        op = Dot(operands=operands, contract=contract, batch=batched, precision=precision)
        return None if fact is None or op.result.tile.size > LARGEST else self.emit(op, fact)


def _embedding(have: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The dims along which a tile of shape `have` broadcasts to `shape`."""
    dims: list[int] = []
    for n in have:
        start = dims[-1] + 1 if dims else 0
        fitting = [d for d in range(start, len(shape)) if n in (1, shape[d])]
        if not fitting:
            return None
        dims.append(fitting[0])
    return tuple(dims)


def draw_array(shape: tuple[int, ...], dtype: DType, seed: int, specials: bool) -> Array:
    """Elements of which `numbers(dtype)` holds, but for NaN and infinities where `specials`."""
    rng = np.random.default_rng(seed)
    if dtype == BOOL:
        return np.asarray(rng.random(shape) < 0.5)
    if kind_of(dtype) != "float":
        info = np.iinfo(dtype)
        edges = [info.min, info.min + 1, info.max, info.max - 1, info.max // 2]
        small = np.asarray(rng.integers(-8 if kind_of(dtype) == "signed" else 0, 16, shape)).astype(dtype)
        return np.where(rng.random(shape) < 0.1, rng.choice(np.array(edges, dtype), shape), small).astype(dtype)
    steps = int(numbers(dtype).bound * 4)
    small = np.asarray(rng.integers(-steps, steps + 1, shape) / 4).astype(dtype)
    if not specials:
        return small
    odd = np.array([np.nan, np.inf, -np.inf, -0.0], np.float32).astype(dtype)
    return np.where(rng.random(shape) < 0.1, rng.choice(odd, shape), small).astype(dtype)
