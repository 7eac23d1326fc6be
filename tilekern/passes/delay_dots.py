"""Compute the last dot of an iteration in the next iteration, on request of a backend.

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

A dot that adds to a carry, and whose operands depend on another dot of the same iteration, waits for its operands; the
ops between the two dots wait for the first dot. One iteration later the operands exist. Matrix units then multiply
beside the vector units that compute f, as in attention, where f are the exponentials of a softmax. Source: Shah et al.,
FlashAttention-3 (https://arxiv.org/abs/2407.08608), section 3.2, which delays the products with values likewise.

Sums keep their order, and so their bits. Values that the dot needs of its iteration become carries. A carry has the
dtype of its value before a cast for the dot alone, so that it stays in the registers in which f computes it. A tile
that only the dot needs is loaded an iteration later. A dot of a tile that other ops need earlier stays where it is, and
so do dots of folds that may run no tile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tilekern.ir.analysis.backward_slice import backward_slice, index_values
from tilekern.ir.analysis.ranges import Interval, analyze, update
from tilekern.ir.compute import Convert, Dot
from tilekern.ir.control import Fold
from tilekern.ir.core import Block, Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.make import Make
from tilekern.ir.memory import Load
from tilekern.ir.records import record
from tilekern.ir.rewrite import Cloner, Rewriter
from tilekern.ir.shape import Broadcast, Reshape, Transpose


@record
class Sizes:
    """Elements that the body of a fold holds at once.

    Attributes:
      total: the elements of the carry that the dot adds to.
      before: the elements of all carries and of the other dots' results, before the rewrite.
      after: the same sum after the rewrite, which adds carries.
    """

    total: int
    before: int
    after: int


def delay_dots(func: Func, *, beside: Callable[[Dot], bool], pays: Callable[[Sizes], bool]) -> Func:
    """Apply the rewrite above to every fold that has such a dot.

    Args:
      func: a canonical Func.
      beside: True for dots that a machine computes beside other ops; a fold with any other dot stays as it is.
      pays: True if the machine can hold so many elements, in its registers for example.
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


@record
class Delayed:
    """The parts of a body.

    Attributes:
      number: the number of the carry that the dot adds to.
      late: ops that move to the next iteration, in order: the dot, the sum, and ops that only these two need.
      early: all other ops.
      held: maps each result of an early op that late ops need to the number of the carry that transports it: an
        existing carry, or a new carry appended after them.
      sizes: see `Sizes`.
    """

    number: int
    late: list[Op]
    early: list[Op]
    held: dict[Value, int]
    sizes: Sizes


def leading_ops(early: Sequence[Op]) -> int:
    """How many early ops precede the previous iteration's late ops: all up to the first dot."""
    return next((n for n, op in enumerate(early) if isinstance(op, Dot)), -1) + 1


def with_numbers(body: Block, late: Sequence[Op]) -> list[Op]:
    """The late ops of a body, and the ops of the index alone that late ops need and that are computed again."""
    index_only = index_values(body)
    numbers = [op for op in body.ops if any(v in index_only for v in op.results)]
    needed = backward_slice(numbers, [v for op in late for v in op.uses()])
    return [op for op in body.ops if op in late or op in needed]


def delayed_dot(
    body: Block, number: int, beside: Callable[[Dot], bool], *, keeps_tiles: bool = False
) -> Delayed | None:
    """The parts of a fold's body if carry `number` is a sum of dots that can wait, and no other op needs it; else None.

    Args:
      body: the body.
      number: the number of the carry.
      beside: True for dots that a machine computes beside other ops.
      keeps_tiles: True if a tile that was loaded for an early dot is still loaded for the late dot.
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
    if not users.get(carry, set()) <= late or carry in body.results or dot not in late:
        return None
    ordered = [op for op in body.ops if op in late]
    early = [op for op in body.ops if op not in late]
    index_only = index_values(body)
    early_values = {v for op in early for v in op.results}
    needed = dict.fromkeys(v for op in ordered for v in op.uses() if v in early_values)
    held = [v for v in needed if v not in index_only]
    if not keeps_tiles and any(isinstance(op, Load) for v in held for op in _moved(early, v)):
        return None
    added = [v for v in held if v not in body.results]
    yielded = [*body.results, *added]
    dots = [op.result for op in early if isinstance(op, Dot)]
    before = sum(value.tile.size for value in (*body.results, *dots))
    sizes = Sizes(total.result.tile.size, before, before + sum(value.tile.size for value in added))
    return Delayed(number, ordered, early, {v: yielded.index(v) for v in held}, sizes)


def _moved(ops: Sequence[Op], value: Value) -> list[Op]:
    """The op that computes a value; behind a cast or a move, also the op that computes its operand, and so on."""
    chain: list[Op] = []
    while op := next((op for op in ops if value in op.results), None):
        chain.append(op)
        if not isinstance(op, (Convert, *_MOVES)):
            break
        value = op.operands[0]
    return chain


def _users(body: Block) -> dict[Value, set[Op]]:
    users: dict[Value, set[Op]] = {}
    for op in body.ops:
        for value in op.uses():
            users.setdefault(value, set()).add(op)
    return users


def _follows(body: Block, dot: Dot) -> bool:
    """True if the operands of a dot depend on another dot of the body, by more than casts and moves."""
    sources = backward_slice(body.ops, dot.operands)
    dots = [op for op in sources if isinstance(op, Dot)]
    return bool(dots) and any(not isinstance(op, (Convert, Load, Dot, *_MOVES)) for op in sources)


def _depending(ops: Sequence[Op], value: Value) -> set[Op]:
    """The ops that need a value, directly or through other ops."""
    dependents, values = set[Op](), {value}
    for op in ops:
        if not values.isdisjoint(op.uses()):
            dependents.add(op)
            values.update(op.results)
    return dependents


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
        """The first tile that runs, and the tile behind the last tile that runs."""
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
        """The sum that the late ops of tile `index` compute from the carries after its iteration."""
        body, parts = self._op.body, self._parts
        values = {body.args[0]: index, body.args[1 + parts.number]: carries[parts.number]}
        values |= {v: carries[number] for v, number in parts.held.items()}
        computed = self._computed(with_numbers(body, parts.late), values, builder)
        return computed[body.results[parts.number]]

    def _computed(
        self, ops: Sequence[Op], values: Mapping[Value, Value], builder: Rewriter | None = None
    ) -> Mapping[Value, Value]:
        """Maps the results of ops to the results of copies, whose operands are replaced by `values`."""
        cloner = Cloner()
        for old, new in values.items():
            cloner.replace(old, new)
        copy = cloner.block((), lambda: tuple(v for op in ops for v in cloner.visit(op)))
        for op in copy.ops:
            (builder or self._rewriter).add(op)
        return dict(zip((v for op in ops for v in op.results), copy.results, strict=True))
