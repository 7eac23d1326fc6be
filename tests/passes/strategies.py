"""Random Funcs for the properties of the passes: well formed, every output element stored once, positions exact.

A program loads, computes and loops over tiles of a few shapes, and stores one tile of its own. Int32 values that are
used as positions are built apart from all others, with a bound on their size: absorbing index arithmetic into an
access is exact, so that it may differ from int32 arithmetic that wraps around.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from tests.ir.funcs import Lanes, Source, assert_same, at, func, ref, whole
from tilekern.ir.compute import Constant, Convert, Dot, Reduce, Select, splat
from tilekern.ir.control import Fold, Switch, While
from tilekern.ir.core import Array, Axis, Block, Builder, Func, Op, Value, index_value
from tilekern.ir.elementwise import TABLE, Elementwise
from tilekern.ir.interpret import interpret
from tilekern.ir.memory import Access, Dim, Load, Position, Store, Term
from tilekern.ir.shape import Broadcast, Concatenate, Iota, Pad, Reshape, Reverse, Slice, Transpose
from tilekern.ir.types import BOOL, F32, I32, INDEX, DType, RefType, TileType, kind_of
from tilekern.ir.verify import verify

EXTENTS = st.sampled_from([0, 1, 2, 5, 8, 13])
BLOCKS = st.sampled_from([1, 2, 4, 8])
DTYPES = (F32, I32, BOOL)
_SPECIAL = {F32: (0.0, -0.0, 1.0, -1.0, 2.5, np.inf, np.nan), I32: (0, 1, -1, 2, 7, 2**31 - 1), BOOL: (False, True)}
_FUNCTIONS = (
    *("add", "sub", "mul", "div", "rem", "max", "min", "neg", "abs", "sign", "and", "or", "xor", "not"),
    *("eq", "ne", "lt", "le", "gt", "ge", "shift_left", "shift_right_logical", "shift_right_arithmetic", "exp"),
)
_BOUND = 2**20  # of positions


@dataclass
class _Scope:
    """The values that a block may use, and the positions among them with their bounds."""

    values: list[Value] = field(default_factory=list)
    positions: dict[Value, int] = field(default_factory=dict)

    def child(self) -> _Scope:
        return _Scope(list(self.values), dict(self.positions))


class _Generator:
    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.builder = Builder()
        self.axes = [Axis(name, draw(EXTENTS), draw(BLOCKS)) for name in "ij"[: draw(st.integers(1, 2))]]
        self.tile = tuple(axis.block for axis in self.axes)
        self.shapes: tuple[tuple[int, ...], ...] = ((), self.tile, self.tile[:1], self.tile[::-1])
        self.inputs = [self._param(f"x{n}", draw(st.sampled_from(DTYPES))) for n in range(2)]
        self.outputs: list[Value] = []
        self.args: tuple[Value, ...] = ()
        self.depth = 0

    def _param(self, name: str, dtype: DType) -> Value:
        shape = tuple(self.draw(st.lists(EXTENTS, min_size=1, max_size=2)))
        return Value(RefType(shape, dtype, "in"), name)

    def func(self) -> Func:
        args = tuple(index_value(axis.name) for axis in self.axes)
        self.args = args

        def body(*_: Value) -> tuple[Value, ...]:
            scope = _Scope(list(args), dict.fromkeys(args, 16))
            self.ops(scope, self.draw(st.integers(3, 12)))
            self.tiles(scope)
            for value in scope.values[len(args) :][-8:]:
                self.store(value, ())
            return ()

        block = self.builder.block(args, body)
        return Func("f", (*self.inputs, *self.outputs), tuple(self.axes), block)

    def tiles(self, scope: _Scope) -> None:
        """Store a tile the way kernels do, the last ones over the edge."""
        value = self.value(scope, TileType(self.tile, self.pick(DTYPES)))
        output = Value(RefType(tuple(a.extent for a in self.axes), value.tile.dtype, "out"), "out")
        self.outputs.append(output)
        dims = tuple(Dim("block", Position((Term(n, a.block),)), a.block) for n, a in enumerate(self.axes))
        mask = self.one(scope, splat(True, TileType(self.tile, BOOL)))
        self.builder.add(Store(operands=(output, value, *self.args, mask), access=Access(dims), masked=True))

    def store(self, value: Value, indices: tuple[tuple[Value, int], ...]) -> None:
        """Store a value to an output of its own, which has a place for each program and each of the indices."""
        counted = (*((v, axis.tiles) for v, axis in zip(self.args, self.axes, strict=True)), *indices)
        shape = (*(n for _, n in counted), *value.tile.shape)
        output = Value(RefType(shape, value.tile.dtype, "out"), "o")
        self.outputs.append(output)
        dims = [Dim("index", Position((Term(n, 1),))) for n in range(len(counted))]
        dims += [Dim("block", Position(), n) for n in value.tile.shape]
        self.builder.add(Store(operands=(output, value, *(v for v, _ in counted)), access=Access(tuple(dims))))

    # --- choices ---

    def pick[T](self, items: Sequence[T]) -> T:
        return self.draw(st.sampled_from(items))

    def one(self, scope: _Scope, op: Op) -> Value:
        value = self.builder.one(op)
        scope.values.append(value)
        return value

    def value(self, scope: _Scope, tile: TileType) -> Value:
        """A value of this type: one that is there, if there is one, or a constant."""
        found = [v for v in scope.values if v.type == tile]
        return self.pick(found[-6:]) if found and self.draw(st.integers(0, 5)) else self.constant(scope, tile)

    def any(self, scope: _Scope, *dtypes: DType) -> Value:
        found = [v for v in scope.values if v.tile.dtype in (dtypes or DTYPES)]
        if found and self.draw(st.integers(0, 5)):
            return self.pick(found[-6:])
        return self.constant(scope, TileType(self.pick(self.shapes), self.pick(dtypes or DTYPES)))

    def constant(self, scope: _Scope, tile: TileType) -> Value:
        special = _SPECIAL[tile.dtype]
        if self.draw(st.booleans()):
            return self.one(scope, splat(self.pick(special), tile))
        elements = [special[(n + len(scope.values)) % len(special)] for n in range(tile.size)]
        return self.one(scope, Constant(array=np.array(elements, tile.dtype).reshape(tile.shape), shape=tile.shape))

    def ops(self, scope: _Scope, count: int) -> None:
        for _ in range(count):
            moves: list[Callable[[_Scope], object]] = [
                *(self.elementwise, self.select, self.convert, self.move, self.move, self.broadcast, self.reduce),
                *(self.position, self.position, self.load, self.load, self.compare, self.dot),
            ]
            if self.depth < 2:
                moves += [self.fold, self.fold, self.switch, self.loop]
            self.pick(moves)(scope)

    # --- values ---

    def elementwise(self, scope: _Scope) -> None:
        x = self.any(scope)
        accepted = [f for f in _FUNCTIONS if kind_of(x.tile.dtype) in TABLE[f].accepts]
        function = self.pick(accepted)
        others = [self.value(scope, x.tile) for _ in range(TABLE[function].arity - 1)]
        operands = (x, *others)
        self.one(scope, Elementwise(function=function, operands=self.pick([operands, operands[::-1]])))

    def compare(self, scope: _Scope) -> None:
        """A position against a constant: what the ranges are for."""
        x = self.pick(list(scope.positions))
        bound = self.one(scope, splat(self.draw(st.integers(-2, 20)), x.tile))
        self.one(scope, Elementwise(function=self.pick(["lt", "le", "gt", "ge", "eq", "ne"]), operands=(x, bound)))

    def select(self, scope: _Scope) -> None:
        x = self.any(scope)
        predicate = self.value(scope, TileType(x.tile.shape, BOOL))
        self.one(scope, Select(operands=(predicate, x, self.value(scope, x.tile))))

    def convert(self, scope: _Scope) -> None:
        self.one(scope, Convert(operands=(self.any(scope),), dtype=self.pick(DTYPES)))

    def broadcast(self, scope: _Scope) -> None:
        x = self.pick([v for v in scope.values if v.tile.shape in ((), self.tile[:1])])
        shape = self.pick([x.tile.shape, (*self.tile[:1], *x.tile.shape[1:]), self.tile])
        dims = tuple(range(len(x.tile.shape)))
        inner = self.one(scope, Broadcast(operands=(x,), shape=shape, dims=dims))
        if self.draw(st.booleans()):
            dims = tuple(range(1, 1 + len(shape)))
            self.one(scope, Broadcast(operands=(inner,), shape=(2, *shape), dims=dims))

    def reduce(self, scope: _Scope) -> None:
        x = self.any(scope)
        # Sums of floats depend on the memory layout inside NumPy, which passes may change.
        monoids = {F32: ["max", "min"], I32: ["sum", "max", "min", "and", "or"], BOOL: ["and", "or", "max", "min"]}
        dims = self.draw(st.sets(st.sampled_from(range(len(x.tile.shape))))) if x.tile.shape else ()
        self.one(scope, Reduce(operands=(x,), monoid=self.pick(monoids[x.tile.dtype]), dims=tuple(sorted(dims))))

    def dot(self, scope: _Scope) -> None:
        """A product of integers, which no order of the sum changes."""
        sides = tuple(self.value(scope, TileType(shape, I32)) for shape in (self.tile, self.tile[::-1]))
        self.one(scope, Dot(operands=sides, contract=((len(self.tile) - 1,), (0,))))

    def move(self, scope: _Scope) -> None:
        """An op that moves elements, often one that changes nothing."""
        x = self.any(scope)
        shape, zero = x.tile.shape, (0,) * len(x.tile.shape)
        ones, flat, order = (1,) * len(shape), (x.tile.size,), tuple(range(len(shape)))
        cut = tuple(max(0, n - self.draw(st.integers(0, 1))) for n in shape)
        filling = self.value(scope, TileType((), x.tile.dtype))
        choices: list[Op] = [
            Transpose(operands=(x,), permutation=self.pick([order, order[::-1]])),
            Reshape(operands=(x,), shape=self.pick([shape, flat, shape[::-1]])),
            Slice(operands=(x,), start=zero, stop=cut, stride=ones),
            Pad(operands=(x, filling), low=zero, high=self.pick([zero, ones]), interior=zero),
            Reverse(operands=(x,), dims=order),
        ]
        if shape:
            choices.append(Concatenate(operands=(x, x), dim=0))
        self.one(scope, self.pick(choices))

    # --- positions and loads ---

    def position(self, scope: _Scope) -> None:
        """A new position from others, a scalar or a vector, or a value clamped into bounds."""
        kind = self.pick(["add", "sub", "mul", "div", "rem", "neg", "constant", "iota", "broadcast", "clamp"])
        x = self.pick(list(scope.positions))
        tile, bound = x.tile, scope.positions[x]
        if kind == "constant":
            number = self.draw(st.integers(-3, 9))
            self._new_position(scope, splat(number, self.pick([INDEX, TileType((3,), I32)])), 9)
        elif kind == "iota":
            self._new_position(scope, Iota(shape=(3,), dtype=I32, dim=0), 3)
        elif kind == "broadcast" and tile == INDEX:
            self._new_position(scope, Broadcast(operands=(x,), shape=(3,), dims=()), bound)
        elif kind == "clamp":
            value = self.value(scope, tile)
            low, high = (self.one(scope, splat(n, tile)) for n in (-1, 9))
            raised = self.one(scope, Elementwise(function="max", operands=(value, low)))
            self._new_position(scope, Elementwise(function="min", operands=(raised, high)), 9)
        elif kind == "neg":
            self._new_position(scope, Elementwise(function="neg", operands=(x,)), bound)
        elif kind == "mul":
            factor = self.one(scope, splat(self.draw(st.integers(-2, 8)), tile))
            operands = self.pick([(x, factor), (factor, x)])
            self._new_position(scope, Elementwise(function="mul", operands=operands), 8 * bound)
        elif kind in ("div", "rem"):
            radix = self.one(scope, splat(self.draw(st.integers(1, 8)), tile))
            self._new_position(scope, Elementwise(function=kind, operands=(x, radix)), bound)
        elif kind in ("add", "sub"):
            y = self.pick([v for v in scope.positions if v.type == tile])
            self._new_position(scope, Elementwise(function=kind, operands=(x, y)), bound + scope.positions[y])

    def _new_position(self, scope: _Scope, op: Op, bound: int) -> None:
        if bound <= _BOUND:
            scope.positions[self.one(scope, op)] = bound

    def load(self, scope: _Scope) -> None:
        ref = self.pick(self.inputs)
        operands: list[Value] = []
        access = Access(tuple(self._dim(scope, operands) for _ in ref.ref.shape))
        masked, filled = self.draw(st.booleans()), self.draw(st.booleans())
        if masked:
            operands.append(self.value(scope, TileType(access.shape, BOOL)))
        if filled:
            operands.append(self.value(scope, TileType((), ref.ref.dtype)))
        self.one(scope, Load(operands=(ref, *operands), access=access, masked=masked, filled=filled))

    def _dim(self, scope: _Scope, operands: list[Value]) -> Dim:
        scalars = [v for v in scope.positions if v.type == INDEX]
        vectors = [v for v in scope.positions if v.type != INDEX]
        used = [self.pick(scalars[-4:]) for _ in range(self.draw(st.integers(0, 2)))]
        kind = self.pick(["block", "index", *(["gather"] * 2 if vectors else [])])
        used += [self.pick(vectors)] if kind == "gather" else []
        digits = [self.pick([(), (), (2,), (1, 4), (2, 3)]) for _ in used]
        terms = [Term(len(operands) + n, self.draw(st.integers(-1, 4)), *digit) for n, digit in enumerate(digits)]
        operands += used
        size = {"block": self.tile[0], "index": 1, "gather": 3}[kind]
        return Dim(kind, Position(tuple(terms), self.draw(st.integers(-1, 2))), size)

    # --- control ---

    def region(self, scope: _Scope, args: tuple[Value, ...], yields: Callable[[_Scope], tuple[Value, ...]]) -> Block:
        """A block of random ops that ends with what `yields` adds."""

        def body(*_: Value) -> tuple[Value, ...]:
            inner = scope.child()
            inner.values += [a for a in args if a not in inner.values]
            self.depth += 1
            self.ops(inner, self.draw(st.integers(0, 4)))
            self.depth -= 1
            return yields(inner)

        return self.builder.block(args, body)

    def _carries(self, scope: _Scope) -> tuple[Value, ...]:
        return tuple(self.any(scope) for _ in range(self.draw(st.integers(0, 3))))

    def fold(self, scope: _Scope) -> None:
        axis = Axis("k", self.draw(EXTENTS), self.draw(BLOCKS))
        start, stop = (self.value(scope, INDEX) for _ in range(2))
        everything = self.draw(st.booleans())
        if everything:
            start, stop = self.one(scope, splat(0, INDEX)), self.one(scope, splat(axis.extent, INDEX))
        inits = self._carries(scope)
        index = index_value("k")
        args = (index, *(Value(v.type, "c") for v in inits))
        inner = scope.child()
        inner.positions[index] = 16

        def following(inner: _Scope) -> tuple[Value, ...]:
            if everything and not self.depth and self.draw(st.booleans()):
                self.store(inner.values[-1], ((index, axis.tiles),))
            return tuple(self._next(inner, a, i) for a, i in zip(args[1:], inits, strict=True))

        body = self.region(inner, args, following)
        fold = Fold(operands=(start, stop, *inits), regions=(body,), axis=axis, reverse=self.draw(st.booleans()))
        scope.values += self.builder.add(fold)

    def _next(self, scope: _Scope, arg: Value, init: Value) -> Value:
        return self.pick([arg, init, *[self.value(scope, arg.tile)] * 3])

    def switch(self, scope: _Scope) -> None:
        types = [v.tile for v in self._carries(scope)]

        def region() -> Block:
            return self.region(scope, (), lambda s: tuple(self.value(s, t) for t in types))

        index = self.value(scope, INDEX)
        regions = tuple(region() for _ in range(self.draw(st.integers(1, 3))))
        scope.values += self.builder.add(Switch(operands=(index,), regions=regions))

    def loop(self, scope: _Scope) -> None:
        """A while that counts a first carry down to zero."""
        counter = self.one(scope, splat(self.draw(st.integers(0, 3)), INDEX))
        inits = (counter, *self._carries(scope))
        tests, args = (tuple(Value(v.type, "w") for v in inits) for _ in range(2))

        def condition(inner: _Scope) -> tuple[Value, ...]:
            zero = self.one(inner, splat(0, INDEX))
            return (self.one(inner, Elementwise(function="gt", operands=(tests[0], zero))),)

        def following(inner: _Scope) -> tuple[Value, ...]:
            one = self.one(inner, splat(1, INDEX))
            less = self.one(inner, Elementwise(function="sub", operands=(args[0], one)))
            return (less, *(self._next(inner, a, i) for a, i in zip(args[1:], inits[1:], strict=True)))

        regions = (self.region(scope, tests, condition), self.region(scope, args, following))
        scope.values += self.builder.add(While(operands=inits, regions=regions))


@st.composite
def funcs(draw: st.DrawFn) -> Func:
    """A random Func."""
    return _Generator(draw).func()


def arrays_for(func: Func, seed: int) -> tuple[Array, ...]:
    """Inputs of a Func: small numbers, signed zeros, infinities, NaN."""
    rng = np.random.default_rng(seed)
    return tuple(_array(p.ref, rng) for p in func.inputs)


@st.composite
def softmaxes(draw: st.DrawFn) -> Func:
    """A fold of dots of loaded tiles, masked by positions, that a second dot adds up; bounds of many kinds."""
    axis = Axis("k", draw(st.integers(1, 30)), draw(st.sampled_from([1, 4, 8])))
    n, x, y = (ref(name, shape, dtype=I32) for name, shape in (("n", (6,)), ("x", (4, 4)), ("y", (25, 4))))
    out, most = ref("out", (3, 4, 4), "out", I32), ref("most", (3, 4, 4), "out", I32)
    start = draw(st.sampled_from(["none", "index", "loaded"]))
    stop = draw(st.sampled_from(["extent", "index", "loaded"]))
    masked, shift, shared = draw(st.booleans()), draw(st.sampled_from([0, -3, 5])), draw(st.booleans())

    def body(b: Source, i: Value) -> None:
        first = {"none": b.const(0), "index": i, "loaded": b.load(n, at(i, 1))}[start]
        last = {
            "extent": b.const(axis.extent),
            "index": b.ew("add", b.ew("mul", i, b.const(5)), b.const(1)),
            "loaded": b.load(n, at(i, 1, 3)),
        }[stop]
        left = b.load(x, whole(4), whole(4))

        def step(k: Value, m: Value, total: Value) -> tuple[Value, ...]:
            logits = b.op(Dot, left, b.load(y, Lanes("block", ((k, 4),), 4, shift), whole(4)), contract=((1,), (1,)))
            if masked:
                row, column = (
                    b.ew("add", b.op(Broadcast, at_, shape=(4, 4), dims=()), b.op(Iota, shape=(4, 4), dtype=I32, dim=d))
                    for d, at_ in enumerate((b.ew("mul", i, b.const(4)), b.ew("mul", k, b.const(4))))
                )
                logits = b.op(Select, b.ew("ge", row, column), logits, b.const(-9, (4, 4)))
            grown = b.ew("max", m, logits)
            weights = b.ew("sub", grown, logits)
            values = b.load(y, Lanes("block", ((k, 4), (i, 1)), 4, -shift), whole(4))
            scaled = b.ew("mul", total, grown if shared else b.ew("sub", grown, m))
            return grown, b.ew("add", b.op(Dot, weights, values, contract=((1,), (0,))), scaled)

        m, total = b.fold(axis, first, last, (b.const(-9, (4, 4)), b.const(1, (4, 4))), step, False)
        b.store(out, total, at(i), whole(4), whole(4))
        b.store(most, m, at(i), whole(4), whole(4))

    return func("f", (n, x, y, out, most), (Axis("i", 3),), body)


def assert_same_meaning(before: Func, after: Func, seed: int) -> None:
    """Assert that both Funcs give the same bits for random inputs, and that `after` is well formed."""
    verify(after)
    arrays = arrays_for(before, seed)
    for expected, found in zip(interpret(before, *arrays), interpret(after, *arrays), strict=True):
        assert_same(found, expected)


def _array(ref: RefType, rng: np.random.Generator) -> Array:
    small = rng.integers(-3, 14, ref.shape).astype(ref.dtype)
    special = rng.choice(np.array(_SPECIAL.get(ref.dtype, (0.0, -0.0)), ref.dtype), ref.shape)
    return np.where(rng.random(ref.shape) < 0.2, special, small).astype(ref.dtype)
