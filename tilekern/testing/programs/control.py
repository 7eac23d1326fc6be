"""Random control flow, and whole Funcs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import ClassVar

from tilekern.ir.control import Fold, Hoist, Switch, While
from tilekern.ir.core import Axis, Block, Func, Value, index_value
from tilekern.ir.types import BOOL, INDEX, DType, TileType, kind_of
from tilekern.testing.programs import facts
from tilekern.testing.programs.facts import Fact, union
from tilekern.testing.programs.facts_of_places import FactsOfPlaces
from tilekern.testing.programs.memory import Counter, Place, exact_numbers, widened
from tilekern.testing.programs.values import Choose, Scope

# How many moves a block makes at most, by how deep it is nested.
_MOVES = (11, 4, 2)
_FEW = 12  # more than two, of a small program


class Generator(FactsOfPlaces):
    """Makes Funcs."""

    # The moves of each feature; likely moves stand several times. A feature without moves changes others' moves.
    MOVES: ClassVar[dict[str, tuple[str, ...]]] = {
        "elementwise": ("elementwise",) * 3 + ("select", "compare", "convert", "iota"),
        "smooth": ("smooth",) * 6,
        "shape": ("move",) * 2,
        "reduce": ("reduce",),
        "dot": ("dot",) * 3,
        "gather": (),
        "mask": (),
        "scatter": (),
        "readback": ("read_back",),
        "overwrite": ("overwrite",),
        "fold": ("fold",) * 4,
        "dynamic": (),
        "while": ("loop",),
        "switch": ("switch",),
        "hoist": ("hoist",),
        "order": ("scan", "linear_scan", "sort", "arg_reduce"),
        "places": ("take", "dynamic_slice", "dynamic_update"),
        "bitcast": ("bitcast",),
        "digits": ("arithmetic",) * 2,
        "partial": ("partial",),
        "atomic": ("atomic",),
        "uses": ("use_somehow",) * 10 + ("fact_of_place",) * 2,
    }
    _ALWAYS = ("load", "load", "store")

    def __init__(self, choose: Choose, features: Sequence[str], dtypes: Sequence[DType]) -> None:
        # Most programs are as people write them: few ops, most of which use some value once more.
        self.small = "uses" in features and bool(choose(7))
        # Programs with few kinds of ops use them in more ways: each leaves out half of what makes ops of its own.
        left = [f for f in self.MOVES if f in features and (f == "elementwise" or not self.MOVES[f] or choose(1))]
        super().__init__(choose, left, dtypes)
        self.allowed = frozenset(features)
        self.depth, self.hoisting = 0, False
        # The folds around, with their starts and stops.
        self.folds: list[tuple[Counter, Value, Value]] = []
        self._names = [*self._ALWAYS, *(name for feature in left for name in self.MOVES[feature])]
        if self.small:
            self._names = ["load", *self.MOVES["uses"]]

    def func(self) -> Func:
        """A Func with one output at least."""
        args = tuple(c.value for c in self.grid)
        self.kinds |= dict.fromkeys(args, "index")

        self.facts.update((c.value, Fact(max(1, c.axis.tiles))) for c in self.grid)

        def body(*_: Value) -> tuple[Value, ...]:
            free = [c.value for c in self.free]
            with self.inner(free, self.fact(*free)):
                self.top_level()
                for value in [*list(self.scope.unused)[::-1], *[self.any()] * (not self.outputs)][:4]:
                    self.store_value(value)
            return ()

        block = self.builder.block(args, body)
        outputs = sorted(self.outputs, key=lambda p: p.ref.role != "inout")
        return Func("f", (*self.inputs, *outputs), self.axes, block)

    def top_level(self) -> None:
        """Make the ops before the last stores."""
        self.moves(2 + self.upto(_FEW if self.small else _MOVES[0] - 2))

    def moves(self, count: int) -> None:
        """Make random moves."""
        names = self._names
        if self.depth >= len(_MOVES) - 1:
            names = [n for n in names if n not in ("fold", "loop", "switch", "hoist")]
        if self.hoisting:
            names = [n for n in names if n not in ("store", "read_back", "overwrite", "partial", "atomic", "hoist")]
        for _ in range(count):
            getattr(self, self.pick(names))()

    # --- regions ---

    def region(
        self,
        args: Sequence[Value],
        arg_facts: Sequence[Fact],
        counters: Sequence[Counter],
        yields: Callable[[], list[Value]],
        moves: bool = True,
    ) -> Block:
        """A block of random ops that ends with what `yields` adds; it covers outputs only if `counters` do."""
        outer = self.counters, self.covering, self.places, self.repeats
        self.repeats *= prod(max(1, c.axis.tiles) for c in counters)
        whole = self.covering is not None and bool(counters) and all(c.whole for c in counters)
        visible = [c for c in counters if not c.offset]
        self.counters, self.places = [*self.counters, *visible], list(self.places)
        self.covering = (*(self.covering or ()), *counters) if whole else None

        def body(*_: Value) -> tuple[Value, ...]:
            with self.inner(args, arg_facts):
                self.depth += 1
                self.moves(1 + self.upto(_MOVES[self.depth] - 1) if moves else 0)
                self.depth -= 1
                return tuple(yields())

        block = self.builder.block(tuple(args), body)
        stored = [p for p in self.places if p not in outer[2]]
        self.counters, self.covering, self.places, self.repeats = outer
        if whole:
            known_outside = {c.value for c in (*self.grid, *counters, *self.counters)}
            closed = [p for p in stored if known_outside.issuperset(p.positions)]
            self.places = [*self.places, *(replace(p, counters=(*p.counters, *counters)) for p in closed)]
        return block

    def _inits(self, length: int, first: Value | None = None) -> tuple[list[Value], list[Fact]]:
        """Initial carries and what shall hold for the carries in every iteration."""
        inits: list[Value] = []
        carry_facts: list[Fact] = []
        for init in [first] if first is not None else [self.any() for _ in range(self.upto(3))]:
            fact = widened(self.facts[init], init.tile.dtype, length)
            inits.append(init if fact else self.number(1, init.tile))
            carry_facts.append(fact or exact_numbers(init.tile.dtype))
        self.use(inits)
        return inits, carry_facts

    def _next(self, arg: Value, init: Value, length: int) -> Value:
        """The next carry: a sum, or another value that the carry's fact holds for, or the carry itself."""
        tile, way = arg.tile, self.upto(3)
        if way == 3:
            return arg
        term = self.value(tile)
        if way == 2 or tile.dtype == BOOL:
            return self.fitted(term, self.facts[arg]) or arg
        if kind_of(tile.dtype) != "float":
            return self.ew("add", arg, term)
        return self._accumulated(arg, term, self.facts[init], length) or arg

    def _accumulated(self, arg: Value, term: Value, init: Fact, length: int) -> Value | None:
        """`arg + term` if that stays within the carry's fact for `length` iterations."""
        carry_fact = self.facts[arg]
        room = (carry_fact.bound - init.bound) / max(length, 1)
        if room < self.facts[term].bound or self.facts[term].inf > carry_fact.inf:
            if room < 1:
                return None
            term = self.tame(term, int(min(room, 4)))
        fact = self.facts[term]
        if carry_fact.error:
            spent = init.error + length * (fact.error + facts.roundoff(arg.tile.dtype) * carry_fact.bound)
            if spent > carry_fact.error:
                return None
        elif fact.error or fact.grain < carry_fact.grain or not facts.exact(carry_fact, arg.tile.dtype):
            return None
        total = self.added(arg, term)
        if total is not None:
            self.facts[total] = carry_fact
        return total

    # --- control flow ---

    def fold(self, first: Value | None = None) -> None:
        """Over all tiles of an axis, or between bounds that are known only when the program runs.

        With a first carry, the body does little but to use that.
        """
        closed = [p.counters[0].axis for p in self.places if p.counters]
        axis = self.pick(closed) if closed and self.upto(1) else self.axis(f"k{self.depth}")
        whole = "dynamic" not in self.features or self.upto(2) < 2
        bounds = (self.number(0, INDEX), self.number(axis.extent, INDEX))
        if not whole:
            bounds = (self.position(axis.extent + 2), self.position(axis.extent + 2))
        inits, carry_facts = self._inits(axis.tiles, first)
        index = index_value(axis.name)
        args = [index, *(Value(v.type, "c") for v in inits)]
        self.kinds |= {index: "index", **dict.fromkeys(args[1:], "carry")}
        counter = Counter(index, axis, whole)
        reopened = [_reopened(p, counter) for p in self.places if p.counters and p.counters[0].axis == axis]
        self.places = [*self.places, *reopened]

        def yields() -> list[Value]:
            if first is not None:
                self.use_in_loop(index, args[1])
            return [self._next(a, i, axis.tiles) for a, i in zip(args[1:], inits, strict=True)]

        self.folds.append((counter, *bounds))
        body = self.region(args, [Fact(max(1, axis.tiles)), *carry_facts], [counter], yields, first is None)
        self.folds.pop()
        self.places = [p for p in self.places if p not in reopened]
        self.use(bounds)
        results = self.builder.add(
            Fold(operands=(*bounds, *inits), regions=(body,), axis=axis, reverse=bool(self.upto(1)))
        )
        self._define(results, carry_facts)

    def carried(self, x: Value) -> bool:
        """A fold whose first carry begins as a value."""
        if self.depth >= len(_MOVES) - 1:
            return False
        self.fold(x)
        return True

    def _define(self, results: Sequence[Value], result_facts: Sequence[Fact]) -> None:
        self.facts.update(zip(results, result_facts, strict=True))
        self.kinds |= dict.fromkeys(results, "region")
        self.scope.values += results
        self.scope.unused.update(dict.fromkeys(results))

    def loop(self) -> None:
        """A while that counts its first carry down to zero."""
        most = self.upto(3)
        static = not self.upto(1)
        start = self.number(most, INDEX) if static else self.clamp(self.position(), 0, most)
        inits, carry_facts = self._inits(most)
        carry_facts = [Fact(max(1, most)), *carry_facts]
        inits = [start, *inits]
        self.use(inits)
        tests, args = ([Value(v.type, "w") for v in inits] for _ in range(2))
        self.kinds |= dict.fromkeys((*tests, *args), "carry")

        def more() -> list[Value]:
            return [self.ew("gt", tests[0], self.number(0, INDEX))]

        def following() -> list[Value]:
            less = self.ew("sub", args[0], self.number(1, INDEX))
            self.facts[less] = carry_facts[0]
            return [less, *(self._next(a, i, most) for a, i in zip(args[1:], inits[1:], strict=True))]

        counter = Counter(args[0], Axis("w", most), whole=static, offset=-1)
        condition = self.condition(tests, carry_facts, more)
        body = self.region(args, carry_facts, [counter], following)
        self.places = [p for p in self.places if not any(c.offset for c in p.counters)]
        self._define(self.builder.add(While(operands=tuple(inits), regions=(condition, body))), carry_facts)

    def condition(self, tests: list[Value], test_facts: list[Fact], more: Callable[[], list[Value]]) -> Block:
        """The block that decides whether a while goes on: its arguments are `tests`, its results those of `more()`.

        `tests` hold the carries of the iteration, with the facts `test_facts`; `more` adds ops, and returns one bool.
        """

        def body(*_: Value) -> tuple[Value, ...]:
            with self.inner(tests, test_facts):
                return tuple(more())

        return self.builder.block(tuple(tests), body)

    def switch(self) -> None:
        """Branches that yield, and perhaps store, values of the same types."""
        types = [self.any().tile for _ in range(self.upto(2))]
        index = self.value(INDEX) if not self.upto(2) else self.position()
        yielded: list[list[Value]] = []
        target = self._target()

        def yields() -> list[Value]:
            yielded.append([self.value(t) for t in types])
            if target is not None:
                tile_type = TileType(target.access.shape, target.output.ref.dtype)
                fact = self.facts[target.output]
                value = self.fitted(self.value(tile_type), fact)
                self._write(target, self.number(1, tile_type) if value is None else value)
            return yielded[-1]

        regions = tuple(self.region((), (), (), yields) for _ in range(1 + self.upto(2)))
        self.use((index,))
        results = self.builder.add(Switch(operands=(index,), regions=regions))
        self._define(results, [union(*self.fact(*values)) for values in zip(*yielded, strict=True)])
        if target is not None:
            self.places.append(target)

    def hoist(self) -> None:
        """Values that depend on grid indices and inputs only."""
        outer = self.scope, self.counters
        index = self.number(0, INDEX)
        self.scope, self.counters = Scope([c.value for c in self.free]), list(self.free)
        was, self.hoisting = self.hoisting, True
        results: list[Value] = []

        def yields() -> list[Value]:
            results.extend(self.any() for _ in range(1 + self.upto(1)))
            return results

        region = self.region((), (), (), yields)
        self.hoisting = was
        self.scope, self.counters = outer
        self._define(self.builder.add(Hoist(operands=(index,), regions=(region,))), self.fact(*results))

    def _target(self) -> Place | None:
        """An output that every branch of a switch stores to."""
        if self.covering is None or self.upto(2):
            return None
        tile = self.any().tile
        place = self.place(tile, self.covering)
        self.places.remove(place)
        self.facts[place.output] = exact_numbers(tile.dtype)
        return place


def _reopened(place: Place, counter: Counter) -> Place:
    """A place that was stored in a fold over the same axis, seen from an iteration of another one."""
    positions = tuple(counter.value if v is place.counters[0].value else v for v in place.positions)
    return replace(place, positions=positions, counters=place.counters[1:])
