"""Moves that use a value of some kind, moved in some way, as the operand of an op of some kind; often beside itself.

Other moves take values in scope, and seldom meet a slice of a sort. These make each pair of producer and consumer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from tilekern.ir.compute import Convert, Dot, Reduce, Select
from tilekern.ir.core import Op, Value
from tilekern.ir.dynamic import DynamicSlice, DynamicUpdateSlice, Take
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Access, Dim, Load, Position, Term
from tilekern.ir.ordering import ArgReduce, Cumulative, Scan, Sort, TopK
from tilekern.ir.shape import Broadcast, Concatenate, Iota, Pad, Reshape, Reverse, Slice, Transpose
from tilekern.ir.types import BOOL, F32, F64, I32, TileType, kind_of
from tilekern.testing.programs import facts
from tilekern.testing.programs.facts import Fact, union
from tilekern.testing.programs.kinds import CONSUMERS, PRODUCERS, RELATIONS, feature, impossible, kind
from tilekern.testing.programs.memory import Memory
from tilekern.testing.programs.values import LARGEST

# An op of a kind, which uses a value that was moved in some way.
type Wish = tuple[str, str]

_TRIES = 6  # of a producer
# Functions whose slopes and magnitudes are no larger anywhere, infinities included; of numbers up to a magnitude.
_EVERYWHERE = {"tanh": float("inf"), "logistic": float("inf"), "atan": float("inf"), "sin": 64.0, "cos": 64.0}


class Uses(Memory):
    """Makes uses of values.

    Attributes:
      kinds: of values, by what made them.
      allowed: the features that programs may have, though this one's other moves leave some out.
    """

    def __init__(self, *arguments: Any) -> None:
        self.kinds: dict[Value, str] = {}
        self.allowed: frozenset[str] = frozenset()
        # The uses that the next loop is for: of its "carry" or its "index".
        self._wishes: tuple[str, Sequence[Wish]] | None = None
        super().__init__(*arguments)

    def emit(self, op: Op, fact: Fact, visible: bool = True) -> Value:
        value = super().emit(op, fact, visible)
        self.kinds[value] = kind(op)
        return value

    def use_in_loop(self, index: Value, carry: Value) -> None:
        """Use the index of a loop or its carry in the body: as is asked for, or the carry in some way."""
        producer, wishes = self._wishes or ("carry", self._drawn_wishes("carry"))
        self._wishes = None
        x = index if producer == "index" else carry
        for consumer, relation in wishes:
            if self._likes(consumer, x):
                self.consumed(consumer, self.related(x, relation), x if len(wishes) > 1 else None)

    def use_somehow(self) -> None:
        """Use a value of some kind, moved in some way, in an op of some kind; perhaps in two."""
        producer = self._kind(PRODUCERS)
        wishes = self._drawn_wishes(producer)
        if not wishes:
            return
        (consumer, relation), *others = wishes
        # The index of a grid is used by stores, too; the index of a loop may have one use.
        if producer == "carry" or (producer == "index" and not others):
            self._wishes = producer, wishes
            self.carried(self._liked(consumer if producer == "carry" else "store"))
            return
        for _ in range(_TRIES):
            x = self._produced(producer, consumer, unused=not others)
            if x is not None and self.consumed(consumer, self.related(x, relation), x if others else None):
                for consumer, relation in others:
                    self.consumed(consumer, self.related(x, relation), x)
                if not others and x in self.scope.values and self.upto(3):
                    self.scope.values.remove(x)  # so that nothing else uses it
                return

    def _drawn_wishes(self, producer: str) -> list[Wish]:
        """One use of a value, or two."""
        several = self.chance(3)
        wishes = [(self._kind(CONSUMERS), self._relation()) for _ in range(_TRIES)]
        return [wish for wish in wishes if not impossible(wish[0], producer, wish[1], several)][: 1 + several]

    def _relation(self) -> str:
        return self.pick(RELATIONS if "shape" in self.allowed else RELATIONS[:2])

    def _kind(self, kinds: tuple[str, ...]) -> str:
        return self.pick([k for k in kinds if not feature(k) or feature(k) in self.allowed])

    # --- producers ---

    def _produced(self, producer: str, consumer: str, unused: bool) -> Value | None:
        """A value whose op is `producer`, in a dtype and shape that `consumer` takes: one in scope, or a new one."""
        values = [*self.scope.unused] if unused else self.scope.values
        there = [v for v in values if self.kinds.get(v) == producer and self._likes(consumer, v)]
        if there and (producer == "index" or self.upto(2)):
            return self.pick(there[::-1][:6])
        if (make := self._makers.get(producer)) is None:
            return None
        before = len(self.scope.values)
        make(self._liked("smooth" if producer in ("smooth", "linear_scan") else consumer))
        new = [v for v in self.scope.values[before:] if self.kinds.get(v) == producer]
        return new[-1] if new else None

    def _likes(self, consumer: str, x: Value) -> bool:
        dtype, shape = x.tile.dtype, x.tile.shape
        match consumer:
            case "smooth":
                return kind_of(dtype) == "float"
            case "load":
                whole = dtype in (BOOL, I32) and len(shape) < 3
                return not shape or whole or any(dtype == r.ref.dtype for r in self.inputs)
            case "comparison" | "arg_reduce":
                return not self.facts[x].error
            case "scan" | "dot":
                return dtype != BOOL
            case "linear_scan":
                return dtype in (F32, F64)
            case _:
                return True

    def _liked(self, consumer: str) -> Value:
        """An operand for a producer."""
        if consumer in ("smooth", "linear_scan"):
            return self.tame(self.any("float"), 2)
        if consumer == "load":
            shape = () if self.upto(1) else (self.pick(self.sizes),)
            return self.value(TileType(shape, self.pick([I32, BOOL, self.inputs[0].ref.dtype])))
        x = self.any("float", "signed", "unsigned") if consumer in ("scan", "dot", "arg_reduce") else self.any()
        if consumer in ("comparison", "arg_reduce") and self.facts[x].error:
            return self.constant(x.tile)
        return x if x.tile.shape or not self.upto(3) else self.value(TileType((self.pick(self.sizes),), x.tile.dtype))

    @property
    def _makers(self) -> dict[str, Callable[[Value], Any]]:
        """Moves that make a value of each kind, of an operand; a carry and an index must be there."""
        return {
            "load": lambda x: self._loaded(x.tile),
            "constant": lambda x: self.constant(x.tile),
            "iota": lambda x: self._counted(x.tile),
            "arithmetic": self.arithmetically,
            "comparison": self._compared,
            "smooth": self._smoothed,
            "select": self._selected,
            "convert": self._converted,
            "dot": self._multiplied,
            "reduce": self._reduced,
            "scan": self._scanned,
            "linear_scan": self.recurrence,
            "sort": self._sorted,
            "arg_reduce": self._found,
            "take": self._taken,
            "dynamic": self._dynamic,
            "concatenate": self._joined,
            "pad": self._padded,
            "region": self.carried,
        }

    def _compared(self, x: Value, source: Value | None = None) -> Value | None:
        other = self._partner(x, source)
        if any(f.error for f in self.fact(x, other)):
            return None
        return self.ew(self.pick(facts.COMPARISONS), x, other)

    def carried(self, x: Value) -> bool:
        """A loop that carries a value; for the class that makes loops."""
        raise NotImplementedError

    def _loaded(self, tile: TileType) -> None:
        refs = [r for r in self.inputs if r.ref.dtype == tile.dtype]
        if refs and tile.size <= LARGEST:
            ref = self.pick(refs)
            self._load(ref, tile.shape[: len(ref.ref.shape)])

    def _counted(self, tile: TileType) -> None:
        shape = tile.shape or (self.pick(self.sizes),)
        dtype = tile.dtype
        if dtype == BOOL or (kind_of(dtype) == "float" and not facts.exact(Fact(max(shape)), dtype)):
            dtype = I32
        if max(shape) < facts.limit(dtype):
            self.emit(Iota(shape=shape, dtype=dtype, dim=self.upto(len(shape) - 1)), Fact(max(shape)))

    # --- relations ---

    def related(self, x: Value, relation: str) -> Value:
        """A value, moved; with one dim more, if it has too few for that."""
        if relation == "same":
            return x
        if relation == "broadcast":
            return self._repeated(x)
        x = self._with_dims(x, 2 if relation == "transposed" else 1, 2 if relation == "sliced inside" else 1)
        return self.emit(self._moved(x, relation), self.facts[x])

    def _repeated(self, x: Value) -> Value:
        """Along a new dim; or a first row or column, along its dim, which fits the value itself."""
        long = [d for d, n in enumerate(x.tile.shape) if n]
        if not long or "shape" not in self.allowed or not self.upto(1):
            return self._broadcast(x)
        dim, shape = self.pick(long), x.tile.shape
        stop = (*shape[:dim], 1, *shape[dim + 1 :])
        start = (0,) * len(shape)
        first = self.emit(Slice(operands=(x,), start=start, stop=stop, stride=(1,) * len(shape)), self.facts[x])
        return self.emit(Broadcast(operands=(first,), shape=shape, dims=tuple(range(len(shape)))), self.facts[x])

    def _with_dims(self, x: Value, rank: int, length: int) -> Value:
        while len(x.tile.shape) < rank or max(x.tile.shape) < length:
            n = self.pick([2, 4, 3]) if x.tile.size * 4 <= LARGEST else 1
            if x.tile.size * n > LARGEST or (n < length and len(x.tile.shape) >= rank):
                return self.constant(TileType((2,) * rank, x.tile.dtype))
            dims = tuple(range(1, len(x.tile.shape) + 1))
            x = self.emit(Broadcast(operands=(x,), shape=(n, *x.tile.shape), dims=dims), self.facts[x])
        return x

    def _moved(self, x: Value, relation: str) -> Op:
        shape, rank = x.tile.shape, len(x.tile.shape)
        match relation:
            case "transposed":
                return Transpose(operands=(x,), permutation=(*range(1, rank), 0))
            case "reversed":
                return Reverse(operands=(x,), dims=(self.upto(rank - 1),))
            case "reshaped":
                halves = (shape[0] // 2, 2, *shape[1:]) if shape[0] % 2 == 0 else (1, *shape)
                return Reshape(operands=(x,), shape=self.pick([(prod(shape),), (*shape, 1), halves]))
            case _:
                inside = relation == "sliced inside"
                dim = self.pick([d for d, n in enumerate(shape) if n > 1] if inside else [*range(rank)])
                start, stop = [0] * rank, [*shape]
                if inside:
                    start[dim] = 1 + self.upto(shape[dim] - 2)
                else:
                    stop[dim] -= self.upto(max(shape[dim] - 1, 0))
                return Slice(operands=(x,), start=tuple(start), stop=tuple(stop), stride=(1,) * rank)

    # --- consumers ---

    def consumed(self, consumer: str, x: Value, source: Value | None = None) -> bool:
        """Use a value in an op of a kind, perhaps beside its source; False if that does not go."""
        if not self._likes(consumer, x) or (not x.tile.size and self.upto(7)):
            return False
        match consumer:
            case "arithmetic":
                return self.arithmetically(x, source) is not None
            case "comparison":
                return self._compared(x, source) is not None
            case "select":
                self._selected(x, source)
                return True
            case "concatenate":
                return self._joined(x, source) is not None
            case "dot":
                return self._multiplied(x, source) is not None
            case "load":
                return self._addressed(x) is not None
            case "store":
                if self.covering is None or self.hoisting:
                    return False
                self.store_value(x)
                return True
            case "atomic":
                return not self.hoisting and self.updated(x)
            case "carry":
                return self.carried(x)
            case _:
                return self._makers[consumer](x) is not None

    hoisting = False

    def _partner(self, x: Value, source: Value | None) -> Value:
        """The source itself, made to fit, or another value of the type."""
        if source is not None and self.upto(2) < 2 and (fitting := self.coerce(source, x.tile)) is not None:
            return fitting
        return self.value(x.tile)

    def arithmetically(self, x: Value, source: Value | None = None) -> Value | None:
        """A function of two values that every dtype has; as they are, or of smaller ones."""
        other = self._partner(x, source)
        functions = ["sub", "add", "mul", "max", "min"]
        if x.tile.dtype == BOOL:
            functions = ["and", "or", "xor"]
        operands = (x, other) if self.upto(1) else (other, x)
        function = self.pick(functions)
        value = self._computed(function, operands)
        return self._computed("max", operands) if value is None and x.tile.dtype != BOOL else value

    def _smoothed(self, x: Value) -> Value | None:
        """A smooth function of a value as it is, if it is in the domain of one; else of the clamped value."""
        if kind_of(x.tile.dtype) != "float":
            return None
        fact = self.facts[x]
        domains = {n: d for n, d in facts.SMOOTH.items() if d.low <= -fact.bound and fact.bound <= d.high}
        domains = {} if fact.inf else domains
        if not (fact.inf and fact.error):
            domains |= {n: facts.SMOOTH[n] for n, farthest in _EVERYWHERE.items() if fact.bound <= farthest}
        if not domains:
            return self._smooth_of(self.pick([*facts.SMOOTH]), x)
        function = self.pick([*domains])
        result_fact = facts.smooth((domains[function],), (fact,), x.tile.dtype)
        return result_fact and self.emit(Elementwise(function=function, operands=(x,)), result_fact)

    def _selected(self, x: Value, source: Value | None = None) -> Value:
        if x.tile.dtype == BOOL and self.upto(1):
            tile = TileType(x.tile.shape, self.pick(self.dtypes))
            which, operands = x, (self.value(tile), self.value(tile))
        else:
            which = self.value(TileType(x.tile.shape, BOOL))
            other = self._partner(x, source)
            operands = (x, other) if self.upto(1) else (other, x)
        return self.emit(Select(operands=(which, *operands)), union(*self.fact(*operands)))

    def _converted(self, x: Value) -> Value | None:
        """A cast, which may round; of smaller numbers only if it rounds too much."""
        converted = {d: facts.convert(self.facts[x], x.tile.dtype, d) for d in self.dtypes if d != x.tile.dtype}
        as_it_is = {d: fact for d, fact in converted.items() if fact is not None and not fact.inf}
        if not as_it_is:
            return self.converted(x, self.pick([*converted] or [*self.dtypes]))
        dtype = self.pick([*as_it_is])
        return self.emit(Convert(operands=(x,), dtype=dtype), as_it_is[dtype])

    def _multiplied(self, x: Value, source: Value | None = None) -> Value | None:
        """A product along the last dim, with the source or another value."""
        if x.tile.dtype == BOOL or not x.tile.shape:
            return None
        shape, last = x.tile.shape, len(x.tile.shape) - 1
        n = shape[-1]
        if source is not None and source.tile.dtype == x.tile.dtype and source.tile.shape[:1] == (n,) and self.upto(2):
            other = source
        else:
            others = (n, self.pick(self.sizes)) if len(shape) > 1 or self.upto(1) else (n,)
            other = self.value(TileType(others, x.tile.dtype))
        if x.tile.size * other.tile.size > 16 * LARGEST * max(n, 1):
            return None
        for tamed in range(3):  # the other side first, so that the value is used as it is
            fact = facts.dot(self.facts[x], self.facts[other], n, x.tile.dtype, "ieee")
            if fact is not None:
                op = Dot(operands=(x, other), contract=((last,), (0,)))
                return None if op.result.tile.size > LARGEST else self.emit(op, fact)
            x, other = (x, self.tame(other, 2)) if tamed == 0 else (self.tame(x, 2), other)
        return None

    def _reduced(self, x: Value) -> Value | None:
        """A sum where that needs no smaller numbers; else the greatest or the least."""
        dims = tuple(d for d in range(len(x.tile.shape)) if self.upto(1)) or tuple(range(len(x.tile.shape)))[-1:]
        length = prod(x.tile.shape[d] for d in dims)
        if x.tile.dtype == BOOL:
            return self.reduced(x, dims, self.pick(["or", "and"]))
        fact = facts.reduce("sum", self.facts[x], length, x.tile.dtype)
        if fact is not None and self.upto(2):
            return self.emit(Reduce(operands=(x,), monoid="sum", dims=dims), fact)
        return self.reduced(x, dims, self.pick(["max", "min"])) if length else None

    def _scanned(self, x: Value) -> Value | None:
        if x.tile.dtype == BOOL or not x.tile.shape:
            return None
        dim = self._dim_of(x)
        fact = facts.reduce("sum", self.facts[x], x.tile.shape[dim], x.tile.dtype)
        least: list[Cumulative] = ["max", "min"]
        monoid: Cumulative = "sum" if fact is not None and self.upto(1) else self.pick(least)
        result_fact = fact if fact is not None and monoid == "sum" else self.facts[x]
        return self.emit(Scan(operands=(x,), monoid=monoid, dim=dim, reverse=bool(self.upto(1))), result_fact)

    def _sorted(self, x: Value) -> Value | None:
        """By the value, or of the value by other keys."""
        if not x.tile.shape:
            return None
        if not self.facts[x].error and self.upto(1):
            operands, pick = (x,), 0
        else:
            operands, pick = (self._exact(TileType(x.tile.shape, self.pick(self.dtypes))), x), 1
        return self.emit(Sort(operands=operands, dim=self._dim_of(x), pick=pick), self.facts[operands[pick]])

    def _found(self, x: Value) -> Value | None:
        """The places of the greatest elements."""
        if self.facts[x].error or x.tile.dtype == BOOL or not x.tile.shape or not min(x.tile.shape):
            return None
        dim = self._dim_of(x)
        n = x.tile.shape[dim]
        if self.upto(1):
            return self.emit(ArgReduce(operands=(x,), extreme=self.pick(["max", "min"]), dim=dim), Fact(n))
        return self.emit(TopK(operands=(x,), dim=dim, k=1 + self.upto(min(n, 4) - 1)), Fact(n))

    def _taken(self, x: Value) -> Value | None:
        """Elements of the value; or of another one, at positions that the value says."""
        if x.tile.dtype == I32 and len(x.tile.shape) < 2 and self.upto(1):
            other = self._ranked()
            op = Take(operands=(other, x), dim=self._dim_of(other), along=False)
            return self.emit(op, self.facts[other]) if op.result.tile.size <= LARGEST else None
        if not x.tile.shape:
            return None
        dim, along = self._dim_of(x), bool(self.upto(1))
        shape = list(x.tile.shape)
        if along:
            shape[dim] = self.pick(self.sizes)
        indices = self.value(TileType(tuple(shape) if along else (self.pick(self.sizes),), I32))
        op = Take(operands=(x, indices), dim=dim, along=along)
        return self.emit(op, self.facts[x]) if op.result.tile.size <= LARGEST else None

    def _dynamic(self, x: Value) -> Value | None:
        """A slice of the value, an update by it or of it; or it says where."""
        if not x.tile.shape:
            if x.tile.dtype != I32:
                return None
            other = self._ranked()
            starts = (x, *self._starts(len(other.tile.shape) - 1))
            sizes = tuple(max(n - 1, min(n, 1)) for n in other.tile.shape)
            return self.emit(DynamicSlice(operands=(other, *starts), sizes=sizes), self.facts[other])
        starts = self._starts(len(x.tile.shape))
        sizes = tuple(n - self.upto(min(n, 4) - 1) if n else 0 for n in x.tile.shape)
        if self.upto(1):
            return self.emit(DynamicSlice(operands=(x, *starts), sizes=sizes), self.facts[x])
        update = self.value(TileType(sizes, x.tile.dtype))
        op = DynamicUpdateSlice(operands=(x, update, *starts))
        return self.emit(op, union(*self.fact(x, update)))

    def _joined(self, x: Value, source: Value | None = None) -> Value | None:
        other = self._partner(x, source)
        if not x.tile.shape or x.tile.size + other.tile.size > LARGEST:
            return None
        operands = (x, other) if self.upto(1) else (other, x)
        return self.emit(Concatenate(operands=operands, dim=self._dim_of(x)), union(*self.fact(*operands)))

    def _padded(self, x: Value) -> Value | None:
        """A padded tile; a scalar pads another one."""
        tile = x if x.tile.shape else self.value(TileType((self.pick(self.sizes),), x.tile.dtype))
        if tile.tile.size > LARGEST // 4:
            return None
        value = self.value(TileType((), x.tile.dtype)) if x.tile.shape else x
        rank = len(tile.tile.shape)
        low, high = (tuple(self.upto(1) for _ in range(rank)) for _ in range(2))
        op = Pad(operands=(tile, value), low=low, high=high, interior=(0,) * rank)
        return self.emit(op, union(*self.fact(tile, value)))

    def _addressed(self, x: Value) -> Value | None:
        """A load under a mask, at positions, or with a fill that the value says."""
        shape = x.tile.shape
        if x.tile.dtype == BOOL and len(shape) <= 2:
            refs = [r for r in self.inputs if len(r.ref.shape) >= len(shape)]
            return self._masked(self.pick(refs), x) if refs else None
        if x.tile.dtype == I32 and len(shape) <= 1 and self.facts[x].bound <= 2**31 - 1:
            refs = [r for r in self.inputs if r.ref.shape]
            return self._at(self.pick(refs), x) if refs else None
        refs = [r for r in self.inputs if r.ref.dtype == x.tile.dtype]
        if not refs or not x.tile.size:
            return None
        x, ref = self._first(x), self.pick(refs)
        access = Access(tuple(Dim("block", Position((), self.upto(2) - 1), 2) for _ in ref.ref.shape))
        return self.emit(Load(operands=(ref, x), access=access, filled=True), union(*self.fact(ref, x)))

    def _first(self, x: Value) -> Value:
        """The first element of a tile, as a scalar."""
        rank = len(x.tile.shape)
        if not rank:
            return x
        op = Slice(operands=(x,), start=(0,) * rank, stop=(1,) * rank, stride=(1,) * rank)
        first = self.emit(op, self.facts[x], visible=False)
        return self.emit(Reshape(operands=(first,), shape=()), self.facts[x], visible=False)

    def _masked(self, ref: Value, mask: Value) -> Value:
        sizes = [*mask.tile.shape, *[None] * (len(ref.ref.shape) - len(mask.tile.shape))]
        dims = tuple(Dim("index", Position(), 1) if n is None else Dim("block", Position(), n) for n in sizes)
        fact = union(*self.fact(ref), Fact(0))
        return self.emit(Load(operands=(ref, mask), access=Access(dims), masked=True), fact)

    def _at(self, ref: Value, position: Value) -> Value:
        shape = position.tile.shape
        first = Position((Term(0, 1),), self.pick([0, 0, 1, -1]))
        dim = Dim("gather", first, shape[0]) if shape else Dim("block", first, self.pick(self.sizes))
        others = (Dim("index", Position(), 1) for _ in ref.ref.shape[1:])
        fact = union(*self.fact(ref), Fact(0))
        return self.emit(Load(operands=(ref, position), access=Access((dim, *others))), fact)
