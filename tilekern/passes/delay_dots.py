"""Compute the last dot of an iteration in the next one, on request of a backend.

Needs: a canonical Func. Gives: a Func for the pipeline of passes, which simplifies the tile numbers.

    fold k with c, m {                            → s = dot(q, load y[first])
      s = dot(q, load y[k])                         p, r, n = f(s, m)
      p, r, n = f(s, m)                             fold k from first + 1 with c, m = n, p, r {
      yield c * r + dot(p, load z[k]), n              s = dot(q, load y[k])
    }                                                 d = c * r + dot(p, load z[k - 1])
                                                      p, r, n = f(s, m)
                                                      yield d, n, p, r
                                                    }
                                                    c * r + dot(p, load z[last])

A dot that adds to a carry, and whose operands depend on another dot of the same iteration, waits for them; what comes
between them waits for the first dot. One iteration later its operands are there. Matrix units then multiply beside the
vector units that compute f, as in attention, where f are the exponentials of a softmax. Source of the idea: Shah et
al., FlashAttention-3 (https://arxiv.org/abs/2407.08608), section 3.2, which delays the products with values likewise.

Sums keep their order, and so their bits. What the dot needs of its iteration becomes carries, in the dtypes that they
have before a cast for the dot alone, so that they stay in the registers in which f computes them. A tile that the dot
loads by itself is loaded an iteration later; a dot of a tile that others need earlier stays where it is, and so do dots
of folds that may run no tile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tilekern.ir.analysis.backward_slice import backward_slice, index_values
from tilekern.ir.analysis.ranges import Interval, analyze, update
from tilekern.ir.compute import Convert, Dot
from tilekern.ir.control import Fold
from tilekern.ir.core import Block, Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.make import Make
from tilekern.ir.memory import Load
from tilekern.ir.rewrite import Cloner, Rewriter
from tilekern.ir.shape import Broadcast, Reshape, Transpose


@dataclass(frozen=True)
class Sizes:
    """Elements that the body of a fold holds at once.

    Attributes:
      total: of the carry that the dot adds to.
      before: of all carries, and of the other dots.
      after: the same, with the new carries.
    """

    total: int
    before: int
    after: int


def delay_dots(func: Func, *, beside: Callable[[Dot], bool], pays: Callable[[Sizes], bool]) -> Func:
    """Apply the rewrite above to every fold that has such a dot.

    Args:
      func: a canonical Func.
      beside: True for dots that a machine computes beside other ops; others in the same body keep all where they are.
      pays: True if registers, say, can hold so many elements.
    """
    ranges = analyze(func)

    def rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
        update(ranges, op)
        if not isinstance(op, Fold) or op.reverse or not always_runs(op, ranges.get(op.start), ranges.get(op.stop)):
            return None
        for number in range(len(op.inits)):
            delayed = delayed_dot(op.body, number, beside)
            if delayed is not None and pays(delayed.sizes):
                return _Rewrite(op, delayed, rewriter).results()
        return None

    return Rewriter(rule).run(func)


def always_runs(op: Fold, start: Interval | None, stop: Interval | None) -> bool:
    """True if the intervals of a fold's bounds prove that at least one tile runs."""
    first = None if start is None else op.axis.first_tile(start.high)
    return first is not None and stop is not None and first < op.axis.end_tile(stop.low)


@dataclass(frozen=True)
class Delayed:
    """The parts of a body.

    Attributes:
      number: the carry that the dot adds to.
      late: ops that move to the next iteration, in order: the dot, the sum, what they alone need.
      early: the other ops.
      held: results of early ops that late ones need, with the carry that each is yielded as: the number of one that
        there was, or of one of the new carries, which follow them.
      sizes: see `Sizes`.
    """

    number: int
    late: list[Op]
    early: list[Op]
    held: dict[Value, int]
    sizes: Sizes


def leading_ops(early: Sequence[Op]) -> int:
    """The number of early ops up to the first dot, behind which the late ops of the iteration before come."""
    return next((n for n, op in enumerate(early) if isinstance(op, Dot)), -1) + 1


def with_numbers(body: Block, late: Sequence[Op]) -> list[Op]:
    """The late ops of a body with those, of the index alone, that they need: these are computed again."""
    again = index_values(body)
    numbers = [op for op in body.ops if any(v in again for v in op.results)]
    needed = backward_slice(numbers, [v for op in late for v in op.uses()])
    return [op for op in body.ops if op in late or op in needed]


def delayed_dot(
    body: Block, number: int, beside: Callable[[Dot], bool], *, keeps_tiles: bool = False
) -> Delayed | None:
    """The parts of a fold's body, if a carry is a sum of dots that can wait, and nothing else needs it.

    Args:
      body: the body.
      number: number of the carry.
      beside: True for dots that a machine computes beside other ops.
      keeps_tiles: True if a tile that was loaded for an early dot is still there for the late one.
    """
    carry = body.args[1 + number]
    users = _users(body)
    total = next((op for op in body.ops if body.results[number] in op.results), None)
    if not isinstance(total, Elementwise) or total.function != "add" or body.results.count(total.result) > 1:
        return None
    dot = next((op for op in body.ops if isinstance(op, Dot) and op.result in total.operands), None)
    if (
        dot is None
        or not all(beside(op) for op in body.ops if isinstance(op, Dot))
        or users.get(total.result)
        or not _follows(body, dot)
    ):
        return None
    late: set[Op] = {total}
    of_carry = _depending(body.ops, carry)
    for op in reversed(body.ops):
        alone = bool(op.results) and all(users.get(v) and users[v] <= late for v in op.results)
        alone = alone and not any(v in body.results for v in op.results)
        if alone and (op is dot or op in of_carry or _moves(op)):
            late.add(op)
    if not users.get(carry, set()) <= late or carry in body.results or not of_carry <= late or dot not in late:
        return None
    ordered = [op for op in body.ops if op in late]
    early = [op for op in body.ops if op not in late]
    again = index_values(body)
    made = {v for op in early for v in op.results}
    needed = dict.fromkeys(v for op in ordered for v in op.uses() if v in made)
    kept = [v for v in needed if v not in again]
    if not keeps_tiles and any(isinstance(op, Load) for v in kept for op in _moved(early, v)):
        return None
    added = [v for v in kept if v not in body.results]
    yielded = [*body.results, *added]
    dots = [op.result for op in early if isinstance(op, Dot)]
    before = sum(value.tile.size for value in (*body.results, *dots))
    sizes = Sizes(total.result.tile.size, before, before + sum(value.tile.size for value in added))
    return Delayed(number, ordered, early, {v: yielded.index(v) for v in kept}, sizes)


def _moved(ops: Sequence[Op], value: Value) -> list[Op]:
    """The op that makes a value, and if it is a cast or a move, the one that makes its operand, and so on."""
    found: list[Op] = []
    while op := next((op for op in ops if value in op.results), None):
        found.append(op)
        if not isinstance(op, (Convert, *_MOVES)):
            break
        value = op.operands[0]
    return found


def _users(body: Block) -> dict[Value, set[Op]]:
    users: dict[Value, set[Op]] = {}
    for op in body.ops:
        for value in op.uses():
            users.setdefault(value, set()).add(op)
    return users


def _follows(body: Block, dot: Dot) -> bool:
    """True if the operands of a dot depend on another dot of the body, by more than casts and moves."""
    before = backward_slice(body.ops, dot.operands)
    others = [op for op in before if isinstance(op, Dot)]
    return bool(others) and any(not isinstance(op, (Convert, Load, Dot, *_MOVES)) for op in before)


def _depending(ops: Sequence[Op], value: Value) -> set[Op]:
    """The ops that need a value, directly or through others."""
    found, known = set[Op](), {value}
    for op in ops:
        if not known.isdisjoint(op.uses()):
            found.add(op)
            known.update(op.results)
    return found


_MOVES = (Broadcast, Reshape, Transpose)


def _moves(op: Op) -> bool:
    """True for a load of an input, and for ops that make a tile no smaller: their operand is a better carry."""
    if isinstance(op, Load):
        return op.ref.ref.role == "in"
    return isinstance(op, _MOVES) or (
        isinstance(op, Convert) and op.dtype.itemsize <= op.operands[0].tile.dtype.itemsize
    )


class _Rewrite:
    """One fold, rewritten at the current place of a rewriter."""

    def __init__(self, op: Fold, delayed: Delayed, rewriter: Rewriter) -> None:
        self._op, self._parts, self._rewriter = op, delayed, rewriter

    def _bounds(self, make: Make) -> tuple[Value, Value]:
        """The first tile that runs, and the one behind the last."""
        axis = self._op.axis
        start, stop = (make.of("min", make.of("max", v, 0), axis.extent) for v in (self._op.start, self._op.stop))
        return make.of("div", start, axis.block), make.of("div", make.of("add", stop, axis.block - 1), axis.block)

    def results(self) -> Sequence[Value]:
        """The results of the fold."""
        op, number, make = self._op, self._parts.number, Make(self._rewriter)
        first, end = self._bounds(make)
        index, *carries = op.body.args
        peeled = self._computed(self._parts.early, {index: first, **dict(zip(carries, op.inits, strict=True))})
        inits = [peeled.get(v, v) for v in (*op.body.results, *self._added)]
        inits[number] = op.inits[number]
        second, stop = make.of("add", first, 1), op.stop
        if op.axis.full_tiles < op.axis.tiles:  # the start is clamped to the extent, which lies in the last tile
            stop = make.select(make.of("lt", second, end), stop, 0)
        start = make.of("mul", second, op.axis.block)
        results = [*self._rewriter.add(op.copy((start, stop, *inits), (self._body(),)))]
        results[number] = self._late(make.of("sub", end, 1), results)
        return results[: len(carries)]

    @property
    def _added(self) -> list[Value]:
        """The values of the new carries."""
        return [v for v, number in self._parts.held.items() if number >= len(self._op.inits)]

    def _body(self) -> Block:
        """The body of the remaining iterations."""
        op, parts, cloner = self._op, self._parts, Cloner()
        fresh = [Value(v.type, v.name) for v in (*op.body.args, *self._added)]
        leading = leading_ops(parts.early)

        def body(index: Value, *carries: Value) -> tuple[Value, ...]:
            for old, new in zip(op.body.args, fresh, strict=False):
                cloner.replace(old, new)
            for inner in parts.early[:leading]:
                cloner.visit(inner)
            total = self._late(Make(cloner).of("sub", index, 1), carries, cloner)
            for inner in parts.early[leading:]:
                cloner.visit(inner)
            cloner.replace(op.body.results[parts.number], total)
            return tuple(cloner.value(v) for v in (*op.body.results, *self._added))

        return cloner.block(tuple(fresh), body)

    def _late(self, index: Value, carries: Sequence[Value], builder: Rewriter | None = None) -> Value:
        """The sum that the late ops of a tile make of the carries behind its iteration."""
        body, parts = self._op.body, self._parts
        values = {body.args[0]: index, body.args[1 + parts.number]: carries[parts.number]}
        values |= {v: carries[number] for v, number in parts.held.items()}
        computed = self._computed(with_numbers(body, parts.late), values, builder)
        return computed[body.results[parts.number]]

    def _computed(
        self, ops: Sequence[Op], values: Mapping[Value, Value], builder: Rewriter | None = None
    ) -> Mapping[Value, Value]:
        """Results of copies of ops at the current place of a builder, with `values` in place of others."""
        cloner = Cloner()
        for old, new in values.items():
            cloner.replace(old, new)
        copy = cloner.block((), lambda: tuple(v for op in ops for v in cloner.visit(op)))
        for op in copy.ops:
            (builder or self._rewriter).add(op)
        return dict(zip((v for op in ops for v in op.results), copy.results, strict=True))
