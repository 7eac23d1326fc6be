"""Random ops that find places, or whose places are computed: sort, scan, arg-reduce, take, dynamic slices."""

from __future__ import annotations

from tilekern.ir.compute import Bitcast, Convert
from tilekern.ir.core import Value
from tilekern.ir.dynamic import DynamicSlice, DynamicUpdateSlice, Take
from tilekern.ir.ordering import ArgReduce, Cumulative, LinearScan, Scan, Sort
from tilekern.ir.types import BOOL, F32, F64, I32, INDEX, TileType, kind_of
from tilekern.testing.programs import facts
from tilekern.testing.programs.facts import Fact, union
from tilekern.testing.programs.values import LARGEST, Values


class Places(Values):
    """Makes the ops of `ir.ordering` and `ir.dynamic`, and casts of the bits of integers."""

    def _ranked(self) -> Value:
        """A value that has a dim."""
        value = self.any()
        return value if value.tile.shape else self.value(TileType((self.pick(self.sizes),), value.tile.dtype))

    def _dim_of(self, value: Value) -> int:
        return self.upto(len(value.tile.shape) - 1)

    # --- order ---

    def arg_reduce(self) -> Value | None:
        """The place of the extreme along a dim."""
        x = self._ranked()
        dim = self._dim_of(x)
        if self.facts[x].error or x.tile.dtype == BOOL:
            return None
        op = ArgReduce(operands=(x,), extreme=self.pick(["max", "min"]), dim=dim)
        return self.emit(op, Fact(x.tile.shape[dim]))

    def sort(self) -> Value:
        """By keys that are the same on every backend; the payload may differ."""
        x = self._exact(self._ranked().tile)
        others = [self.value(TileType(x.tile.shape, self.pick(self.dtypes))) for _ in range(self.upto(2))]
        exact = [n for n, v in enumerate(others) if self.facts[v].error]
        num_keys = 1 + self.upto(min([len(others), *exact]))
        pick, dim = self.upto(len(others)), self._dim_of(x)
        op = Sort(operands=(x, *others), dim=dim, num_keys=num_keys, pick=pick)
        return self.emit(op, self.facts[op.operands[pick]])

    def scan(self) -> Value | None:
        """A cumulative reduction along a dim."""
        x = self._ranked()
        dim, kind = self._dim_of(x), kind_of(x.tile.dtype)
        if kind == "bool":
            return None
        monoids: list[Cumulative] = ["sum", "max", "min", "prod", *(["logsumexp"] if kind == "float" else [])]
        monoid = self.pick(monoids)
        length = x.tile.shape[dim]
        x = self.tame(x, 1 if monoid == "prod" else 4)
        if monoid == "logsumexp":
            x = self.clamp(x, -4, 4)
            domain = facts.Smooth(-4, 4, 1, 4 + length)
            fact = facts.smooth((domain,), self.fact(x), x.tile.dtype)
        else:
            fact = facts.reduce(monoid, self.facts[x], length, x.tile.dtype)
        return fact and self.emit(Scan(operands=(x,), monoid=monoid, dim=dim, reverse=bool(self.upto(1))), fact)

    def linear_scan(self) -> Value | None:
        """A linear recurrence of some float."""
        return self.recurrence(self.any("float"))

    def recurrence(self, terms: Value) -> Value | None:
        """A linear recurrence along a dim, whose factors are -1, 0 or 1, so that it is as exact as a sum."""
        if terms.tile.dtype not in (F32, F64) or not terms.tile.shape:
            return None
        dim = self._dim_of(terms)
        fact = facts.reduce("sum", self.facts[terms], terms.tile.shape[dim], terms.tile.dtype)
        if fact is None:
            return None
        signs = self.clamp(self.value(TileType(terms.tile.shape, I32)), -1, 1)
        factors = self.emit(Convert(operands=(signs,), dtype=terms.tile.dtype), Fact(1))
        return self.emit(LinearScan(operands=(factors, terms), dim=dim, reverse=bool(self.upto(1))), fact)

    # --- places ---

    def _starts(self, count: int) -> tuple[Value, ...]:
        """Anything may be a start: it is clamped."""
        return tuple(self.value(INDEX) for _ in range(count))

    def dynamic_slice(self) -> Value:
        """A slice that starts where values say."""
        x = self._ranked()
        sizes = tuple(n - self.upto(min(n, 8) - 1) for n in x.tile.shape)
        return self.emit(DynamicSlice(operands=(x, *self._starts(len(sizes))), sizes=sizes), self.facts[x])

    def dynamic_update(self) -> Value:
        """A tile with a slice replaced, where values say."""
        x = self._ranked()
        sizes = tuple(n - self.upto(min(n, 8) - 1) for n in x.tile.shape)
        update = self.value(TileType(sizes, x.tile.dtype))
        op = DynamicUpdateSlice(operands=(x, update, *self._starts(len(sizes))))
        return self.emit(op, union(*self.fact(x, update)))

    def take(self) -> Value | None:
        """Elements along a dim, by index vectors."""
        x = self._ranked()
        dim, along = self._dim_of(x), bool(self.upto(1))
        shape = list(x.tile.shape)
        if along:
            shape[dim] = self.pick(self.sizes)
        indices = self.value(TileType(tuple(shape) if along else self.shape(2), I32))
        op = Take(operands=(x, indices), dim=dim, along=along)
        return self.emit(op, self.facts[x]) if op.result.tile.size <= LARGEST else None

    def bitcast(self) -> Value | None:
        """Of integers only: the bits of a NaN are not the same everywhere, nor is the sign of a zero."""
        x = self.any("signed", "unsigned")
        width, integers = x.tile.dtype.itemsize, ("signed", "unsigned")
        targets = [d for d in self.dtypes if d.itemsize == width and kind_of(d) in integers]
        if x.tile.dtype not in targets:
            return None
        target = self.pick(targets)
        return self.emit(Bitcast(operands=(x,), dtype=target), facts.whole(target))
