"""A tally of what random programs hold: which ops read which values, moved in which way, and where facts go.

Two tables. A cell of the first one is a `Use`: an op reads the result of a producer, after ops that only move elements.
A cell of the second one is a pair: a fact that a body may read, and the place in which it is used.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from tilekern.ir.compute import Constant, Select
from tilekern.ir.control import Fold, Hoist, While
from tilekern.ir.core import Block, Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Load, MemoryOp
from tilekern.ir.shape import Broadcast, Iota, Reshape, Reverse, Slice, Transpose
from tilekern.ir.types import BOOL, kind_of
from tilekern.testing.programs import FEATURES
from tilekern.testing.programs.batches import sample
from tilekern.testing.programs.facts import COMPARISONS
from tilekern.testing.programs.kinds import CONSUMERS, PRODUCERS, RELATIONS, impossible, kind

FACTS = ("index", "indices", "size", "valid", "shape", "arange", "constants")
"""What a body may read beside arrays: a tile's number, its elements' positions, the block, which lanes are inside of
the extent, the extents of arrays, 0, 1, 2, … and known tiles."""
PLACES = ("grid axis", "fold", "carry", "mask", "gather position")
"""Where a fact goes: to data in a program, to data in a fold, to a carry, to a mask, to an index vector."""

_MOVES = (Broadcast, Slice, Transpose, Reverse, Reshape)
# Smaller numbers are in programs for other reasons.
_LEAST = 4


@dataclass(frozen=True, order=True)
class Use:
    """An op's use of a value.

    Attributes:
      op: the kind of the op, one of `CONSUMERS`.
      producer: the kind of the value, one of `PRODUCERS`.
      relation: one of `RELATIONS`.
      several: the value is used in other ways, too.
    """

    op: str
    producer: str
    relation: str
    several: bool

    @property
    def impossible(self) -> str:
        """The reason why no program has it; "" if there is none."""
        return impossible(self.op, self.producer, self.relation, self.several)

    def __str__(self) -> str:
        return f"{self.op} of {self.producer}, {self.relation}, {'several uses' if self.several else 'one use'}"


@dataclass(frozen=True)
class Tally:
    """The numbers of programs in which each cell occurs; prints as two tables."""

    programs: int
    uses: Mapping[Use, int]
    facts: Mapping[tuple[str, str], int]

    @property
    def missing(self) -> list[str]:
        """The cells that are possible and that no program has."""
        uses = [str(u) for u in all_uses() if not self.uses.get(u) and not u.impossible]
        pairs = [pair for pair in product(FACTS, PLACES) if not self.facts.get(pair)]
        return [*uses, *(f"{fact} in {place}" for fact, place in pairs)]

    def __str__(self) -> str:
        return "\n".join([*_shown_uses(self), "", *_shown_facts(self), "", *_summary(self)])


def all_uses() -> Iterator[Use]:
    """All cells of the first table, possible or not."""
    for op, producer, relation, several in product(CONSUMERS, PRODUCERS, RELATIONS, (False, True)):
        yield Use(op, producer, relation, several)


def tally(funcs: Iterable[Func]) -> Tally:
    """Count the programs that have each cell."""
    uses: Counter[Use] = Counter()
    pairs: Counter[tuple[str, str]] = Counter()
    count = 0
    for func in funcs:
        count += 1
        uses.update(set(uses_of(func)))
        pairs.update(facts_of(func))
    return Tally(count, uses, pairs)


# --- uses -----------------------------------------------------------------------------------------------------------


def uses_of(func: Func) -> Iterator[Use]:
    """Each use of a tile by an op that does more than to move elements."""
    makers: dict[Value, Op | str] = dict(_arguments(func.body, "index"))
    for op in func.walk():
        makers |= dict.fromkeys(op.results, op)
        makers |= {a: name for region in op.regions for a, name in _arguments(region, "carry", op)}
    reads = [*_reads(func)]
    count = Counter(value for _, value in reads)
    for op in func.walk():
        if isinstance(op, _MOVES):
            count.update(op.operands)
    for consumer, value in reads:
        source, relations = _origin(value, makers)
        maker = makers.get(source)
        if maker is None:
            continue  # a ref
        producer = maker if isinstance(maker, str) else kind(maker)
        for relation in relations:
            yield Use(consumer, producer, relation, count[source] > 1)


def _arguments(block: Block, name: str, op: Op | None = None) -> Iterator[tuple[Value, str]]:
    for number, value in enumerate(block.args):
        yield value, "index" if isinstance(op, Fold) and number == 0 else name


def _reads(func: Func) -> Iterator[tuple[str, Value]]:
    """Each operand and each yielded value, with the kind of its consumer. Ops that only move data are left out."""
    for op in func.walk():
        if not isinstance(op, _MOVES):
            name = kind(op)
            consumer = "carry" if isinstance(op, (Fold, While)) else name
            skipped = 2 if isinstance(op, Fold) else 0
            if consumer in CONSUMERS:
                yield from ((consumer, v) for v in op.operands[skipped:])
        if not isinstance(op, Hoist):
            yield from (("carry", v) for region in op.regions for v in region.results)


def _origin(value: Value, makers: Mapping[Value, Op | str]) -> tuple[Value, set[str]]:
    """The value that moves began with, and the relations that they make."""
    relations = set[str]()
    while isinstance(op := makers.get(value), _MOVES):
        relations |= _relation(op)
        (value,) = op.operands
    return value, relations or {"same"}


def _relation(op: Op) -> set[str]:
    match op:
        case Slice():
            return {"sliced from 0" if not any(op.start) else "sliced inside"}
        case Broadcast():
            return {"broadcast"}
        case Transpose():
            return {"transposed"}
        case Reverse():
            return {"reversed"} if op.dims else set()
        case _:
            return {"reshaped"}


# --- facts ----------------------------------------------------------------------------------------------------------


@dataclass
class _Flow:
    """A walk over a Func that collects the cells of the second table.

    Attributes:
      func: the Func.
      origins: for each value, the facts ("index", "arange", ...) from which it is computed.
      data: the values computed from elements of an array.
      cells: the pairs (fact, place) that the walk has met.
    """

    func: Func
    origins: defaultdict[Value, frozenset[str]] = field(default_factory=lambda: defaultdict(frozenset))
    data: set[Value] = field(default_factory=set[Value])
    cells: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])

    def run(self) -> set[tuple[str, str]]:
        """The pairs of the second table."""
        for value in self.func.body.args:
            self.origins[value] = frozenset({"index"})
        self.block(self.func.body, "grid axis")
        return self.cells

    def block(self, block: Block, place: str) -> None:
        """Follow the ops of a block."""
        for op in block.ops:
            self.op(op, place)

    def op(self, op: Op, place: str) -> None:
        """Record the origins of an op's results, and the cells that its operands fill."""
        inner = "fold" if isinstance(op, Fold) else place
        for region in op.regions:
            if isinstance(op, Fold):
                self.origins[region.args[0]] = frozenset({"index"})
                self.pass_on(op.inits, region.args[1:])
            elif isinstance(op, While):
                self.pass_on(op.operands, region.args)
            self.block(region, inner)
            self.pass_on(region.results, op.results)
            if isinstance(op, (Fold, While)):
                self.show("carry", (*op.operands[2 * isinstance(op, Fold) :], *region.results))
        if isinstance(op, MemoryOp):
            self.access(op)
        if isinstance(op, Select):
            self.show("mask", op.operands[:1])
        if not op.regions and not isinstance(op, MemoryOp):
            self.compute(op, place)

    def pass_on(self, values: Sequence[Value], targets: Sequence[Value]) -> None:
        """Add the origins of each value to the target beside it."""
        for value, target in zip(values, targets, strict=False):
            self.origins[target] |= self.origins[value]
            if value in self.data:
                self.data.add(target)

    def show(self, place: str, values: Iterable[Value]) -> None:
        """Record that a place uses the origins of some values."""
        self.cells |= {(fact, place) for value in values for fact in self.origins[value]}

    def access(self, op: MemoryOp) -> None:
        """Masks and index vectors."""
        if op.mask is not None:
            self.show("mask", [op.mask])
        self.show("gather position", [v for v in op.positions if v.tile.shape])
        if isinstance(op, Load):
            self.data.add(op.result)

    def compute(self, op: Op, place: str) -> None:
        """An op on tiles: facts that meet data are used in the program, or in the fold."""
        origins = frozenset[str]().union(*(self.origins[v] for v in op.operands), self.begun(op))
        if isinstance(op, Elementwise) and {"index", "arange"} <= origins and op.function == "add":
            origins |= {"indices"}
        bounds = isinstance(op, Elementwise) and op.function in COMPARISONS and "shape" in origins
        if bounds and origins & {"indices", "arange"}:
            origins |= {"valid"}
        holds = [v in self.data for v in op.operands]
        if any(holds):
            apart = [v for v, is_data in zip(op.operands, holds, strict=True) if not is_data]
            self.show(place, apart)
            self.data.update(op.results)
        for result in op.results:
            self.origins[result] = origins

    def begun(self, op: Op) -> frozenset[str]:
        """The facts that an op without operands states."""
        if isinstance(op, Iota):
            return frozenset({"arange"})
        if not isinstance(op, Constant) or op.array.dtype == BOOL or kind_of(op.array.dtype) == "float":
            return frozenset({"constants"} if isinstance(op, Constant) and op.array.size > 1 else ())
        if op.array.size != 1:
            return frozenset({"constants"})
        number = int(op.array.item())
        sizes, shapes = self.numbers
        return frozenset(n for n, some in (("size", sizes), ("shape", shapes)) if number >= _LEAST and number in some)

    @property
    def numbers(self) -> tuple[set[int], set[int]]:
        """The blocks of axes; the extents of arrays and of axes."""
        axes = [*self.func.axes, *(op.axis for op in self.func.walk() if isinstance(op, Fold))]
        dims = {n for p in self.func.params for n in p.ref.shape}
        return {a.block for a in axes}, dims | {a.extent for a in axes}


def facts_of(func: Func) -> set[tuple[str, str]]:
    """The facts that a program uses, with the places."""
    return _Flow(func).run()


# --- text -----------------------------------------------------------------------------------------------------------


def _shown_uses(table: Tally) -> list[str]:
    """A row for each op and producer: for each relation the programs with one use, and with several."""
    lines = [f"{'op':<11} {'producer':<11} " + " ".join(f"{r:>13}" for r in RELATIONS)]
    for op, producer in product(CONSUMERS, PRODUCERS):
        cells: list[str] = []
        for relation in RELATIONS:
            both = [Use(op, producer, relation, several) for several in (False, True)]
            cells.append("/".join("-" if u.impossible else str(table.uses.get(u, 0)) for u in both))
        lines.append(f"{op:<11} {producer:<11} " + " ".join(f"{c:>13}" for c in cells))
    return lines


def _shown_facts(table: Tally) -> list[str]:
    lines = [f"{'fact':<11} " + " ".join(f"{p:>15}" for p in PLACES)]
    for fact in FACTS:
        cells = [str(table.facts.get((fact, p), 0)) for p in PLACES]
        lines.append(f"{fact:<11} " + " ".join(f"{c:>15}" for c in cells))
    return lines


def _summary(table: Tally) -> list[str]:
    reasons: Counter[str] = Counter(filter(None, (u.impossible for u in all_uses())))
    possible = sum(not u.impossible for u in all_uses()) + len(FACTS) * len(PLACES)
    lines = [f"{table.programs} programs; {possible - len(table.missing)} of {possible} cells"]
    return [*lines, *(f"impossible: {count} cells, for {reason}" for reason, count in reasons.items())]


def drawn(count: int) -> Tally:
    """The tally of the first random programs of the fuzzer."""
    return tally(sample(seed, features=FEATURES)[0].func for seed in range(count))
