from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.passes.strategies import arrays_for, funcs
from tilekern.ir.analysis.ranges import (
    Interval,
    analyze,
    digit_interval,
    fold_index,
    position_interval,
    transfer,
    whole,
)
from tilekern.ir.compute import Constant, Convert, Reduce, Select
from tilekern.ir.control import Fold
from tilekern.ir.core import Array, Axis, Block, Func, Op, Value, index_value
from tilekern.ir.elementwise import TABLE, Elementwise
from tilekern.ir.interpret import interpret
from tilekern.ir.memory import Position, Term
from tilekern.ir.parse import parse
from tilekern.ir.records import record
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.shape import Broadcast, Concatenate, Iota, Pad, Reshape, Reverse, Slice, Transpose
from tilekern.ir.types import BOOL, DTYPES, INDEX, DType, TileType, kind_of

INTEGERS = [d for d in DTYPES.values() if kind_of(d) != "float"]
SHAPE = (3, 4)


@st.composite
def lanes(draw: st.DrawFn, dtype: DType, shape: tuple[int, ...] = SHAPE) -> tuple[Interval | None, Array]:
    """An interval, small or at the ends of the dtype, and elements inside it."""
    limits = whole(dtype)
    assert limits is not None
    middle = draw(st.sampled_from([limits.low, 0, limits.high])) + draw(st.integers(-9, 9))
    low = min(max(middle, limits.low), limits.high)
    high = min(low + draw(st.integers(0, 40)), limits.high)
    size = int(np.prod(shape, dtype=np.int64))
    elements = draw(st.lists(st.integers(low, high), min_size=size, max_size=size))
    interval = draw(st.sampled_from([Interval(low, high)] * 4 + [None]))
    return interval, np.array(elements, dtype).reshape(shape)


def inside(array: Array, interval: Interval | None) -> bool:
    return interval is None or all(interval.low <= int(x) <= interval.high for x in array.ravel())


def assert_sound(op: Op, drawn: list[tuple[Interval | None, Array]]) -> Interval | None:
    interval = transfer(op, [i for i, _ in drawn])
    assert inside(op.evaluate(*(a for _, a in drawn)), interval)
    return interval


def value(dtype: DType, shape: tuple[int, ...] = SHAPE) -> Value:
    return Value(TileType(shape, dtype))


@pytest.mark.parametrize("function", [name for name, row in TABLE.items() if row.accepts != ("float",)])
@given(data=st.data())
def test_elementwise_ops_stay_inside(function: str, data: st.DataObject) -> None:
    row = TABLE[function]
    dtype = data.draw(st.sampled_from([d for d in INTEGERS if kind_of(d) in row.accepts]))
    op = Elementwise(function=function, operands=(value(dtype),) * row.arity)
    assert_sound(op, [data.draw(lanes(dtype)) for _ in op.operands])


@given(data=st.data(), dtype=st.sampled_from(INTEGERS), to=st.sampled_from(INTEGERS))
def test_other_ops_stay_inside(data: st.DataObject, dtype: DType, to: DType) -> None:
    x = (value(dtype),)
    monoids = ["max", "min", "xor"] if dtype == BOOL else ["sum", "prod", "max", "min", "and", "or", "xor"]
    op = data.draw(
        st.sampled_from(
            [
                Convert(operands=x, dtype=to),
                Select(operands=(value(BOOL), *x, *x)),
                Broadcast(operands=x, shape=(2, *SHAPE), dims=(1, 2)),
                Reshape(operands=x, shape=(12,)),
                Transpose(operands=x, permutation=(1, 0)),
                Slice(operands=x, start=(0, 1), stop=(2, 4), stride=(1, 2)),
                Reverse(operands=x, dims=(1,)),
                Concatenate(operands=x * 2, dim=0),
                Pad(operands=(*x, value(dtype, ())), low=(1, -1), high=(0, 2), interior=(0, 1)),
                *(Reduce(operands=x, monoid=m, dims=dims) for m in monoids for dims in ((0,), (0, 1), ())),
            ]
        )
    )
    assert_sound(op, [data.draw(lanes(v.tile.dtype, v.tile.shape)) for v in op.operands])


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("shape", [(0,), (1,), (5,), (200,)])
def test_sources_stay_inside(dtype: DType, shape: tuple[int, ...]) -> None:
    if dtype != BOOL:
        assert_sound(Iota(shape=shape, dtype=dtype, dim=0), [])
    assert_sound(Constant(shape=shape, array=np.arange(shape[0]).astype(dtype)), [])


@given(dtype=st.sampled_from(INTEGERS), monoid=st.sampled_from(["max", "min", "and", "or", "xor"]))
def test_a_reduction_of_nothing_is_the_identity(dtype: DType, monoid) -> None:
    x = np.zeros((0, 2), dtype)
    assert_sound(Reduce(operands=(value(dtype, x.shape),), monoid=monoid, dims=(0,)), [(Interval(0, 0), x)])


@pytest.mark.parametrize(
    ("function", "x", "y", "expected"),
    [
        ("add", (1, 5), (10, 20), (11, 25)),
        ("add", (0, 2**31 - 1), (0, 1), None),
        ("sub", (1, 5), (10, 20), (-19, -5)),
        ("mul", (-2, 3), (4, 5), (-10, 15)),
        ("div", (-7, 9), (2, 4), (-3, 4)),
        ("div", (-7, 9), (0, 4), None),
        ("rem", (0, 3), (4, 8), (0, 3)),
        ("rem", (-100, 5), (8, 8), (-7, 5)),
        ("rem", (0, 100), (8, 8), (0, 7)),
        ("min", None, (3, 4), (-(2**31), 4)),
        ("max", None, (0, 0), (0, 2**31 - 1)),
        ("and", None, (0, 15), (0, 15)),
        ("or", (1, 4), (2, 3), (2, 7)),
        ("shift_left", (1, 3), (4, 4), (16, 48)),
        ("shift_right_arithmetic", (-8, 9), (2, 2), (-2, 2)),
        ("lt", (0, 4), (5, 9), (1, 1)),
        ("lt", (5, 9), (0, 5), (0, 0)),
        ("le", (0, 5), (5, 9), (1, 1)),
        ("gt", (5, 9), (0, 4), (1, 1)),
        ("ge", (5, 9), (0, 5), (1, 1)),
        ("ge", (0, 5), (5, 9), (0, 1)),
        ("eq", (0, 4), (5, 9), (0, 0)),
        ("eq", (3, 3), (3, 3), (1, 1)),
        ("ne", (0, 4), (5, 9), (1, 1)),
    ],
)
def test_intervals_are_as_small_as_they_should_be(function: str, x, y, expected) -> None:
    op = Elementwise(function=function, operands=(Value(INDEX), Value(INDEX)))
    assert transfer(op, [x and Interval(*x), y and Interval(*y)]) == (expected and Interval(*expected))


def test_a_position_is_exact_beyond_int32() -> None:
    position = Position((Term(0, 2), Term(1, -3)), 5)
    assert position_interval(position, [Interval(0, 2**31 - 1), Interval(1, 2)]) == Interval(-1, 2**32)
    assert position_interval(position, [None, Interval(1, 2)]) is None
    assert position_interval(Position((), 5), []) == Interval(5, 5)


@given(st.integers(-50, 50), st.integers(0, 40), st.integers(1, 6), st.integers(1, 9))
def test_a_digit_stays_inside(low: int, span: int, div: int, mod: int) -> None:
    found = digit_interval(Term(0, 1, div, mod), Interval(low, low + span))
    assert inside(np.arange(low, low + span + 1) // div % mod, found)


def fold(axis: Axis) -> Fold:
    index = index_value("k")
    return Fold(operands=(Value(INDEX), Value(INDEX)), regions=(Block((index,), (), ()),), axis=axis)


@given(
    axis=st.builds(Axis, st.just("k"), st.integers(0, 20), st.integers(1, 8)),
    bounds=st.tuples(lanes(INDEX.dtype, ()), lanes(INDEX.dtype, ())),
)
def test_the_tiles_that_run_are_among_those_that_can(axis: Axis, bounds) -> None:
    start, stop = (min(max(int(a), 0), axis.extent) for _, a in bounds)
    tiles = range(start // axis.block, -(-stop // axis.block))
    possible = fold_index(fold(axis), *(i for i, _ in bounds))
    assert all(possible.low <= t <= possible.high for t in tiles)


def test_the_index_of_a_fold() -> None:
    op = fold(Axis("k", 100, 8))
    assert fold_index(op, None, None) == Interval(0, 12)
    assert fold_index(op, Interval(17, 30), Interval(40, 64)) == Interval(2, 7)
    assert fold_index(op, Interval(-5, 200), Interval(-5, 200)) == Interval(0, 12)
    assert fold_index(op, Interval(64, 70), Interval(0, 64)).empty


@record(eq=False, kw_only=True)
class Probe(Op):
    """Remembers the elements that a value of another Func has had."""

    name: ClassVar[str] = "probe"

    of: Value
    seen: list[tuple[Value, Array]]

    def infer(self) -> tuple[TileType, ...]:
        return self.tiles()

    def evaluate(self, *operands: Array) -> Array:
        self.seen.append((self.of, operands[0]))
        return operands[0]


class Prober(Rewriter):
    """Probes every value that is computed and every block argument."""

    def __init__(self) -> None:
        super().__init__(lambda op, rewriter: None)
        self.seen: list[tuple[Value, Array]] = []

    def inline(self, block: Block, args=None) -> tuple[Value, ...]:
        self.probe(block.args)
        return super().inline(block, args)

    def visit(self, op: Op):
        results = super().visit(op)
        self.probe(op.results)
        return results

    def probe(self, values: tuple[Value, ...]) -> None:
        for v in values:
            self.add(Probe(operands=(self.value(v),), of=v, seen=self.seen))


@given(func=funcs(), seed=st.integers(0, 1000))
def test_every_value_of_a_program_lies_in_its_interval(func: Func, seed: int) -> None:
    ranges, prober = analyze(func), Prober()
    interpret(prober.run(func), *arrays_for(func, seed), orders=1)
    outside = [(v, a, ranges[v]) for v, a in prober.seen if v in ranges and not inside(a, ranges[v])]
    assert not outside


def test_what_is_known_of_loops_and_branches() -> None:
    func = parse("""
        func @f(%x: ref<i32[9], in>, %out: ref<i32[9], out>) {
          grid %i in i[9 by 2]
          %a = constant 3 : i32[]
          %b = constant 7 : i32[]
          %c = load %x[%i] : i32[]
          %f.0, %f.1, %f.2 = fold %k in k[32 by 4] from %a to %b with %d = %a, %e = %a, %g = %c do {
            yield %d, %b, %g
          } : i32[], i32[], i32[]
          %s = switch(%c) do {
            yield %a
          } do {
            yield %b
          } : i32[]
        }""")
    known = {v.name: (i.low, i.high) for v, i in analyze(func).items() if v.name not in ("f", "")}
    assert known == {"i": (0, 4), "a": (3, 3), "b": (7, 7), "k": (0, 1), "d": (3, 3), "s": (3, 7)}
    results = next(op for op in func.walk() if isinstance(op, Fold)).results
    assert [analyze(func).get(v) for v in results] == [Interval(3, 3), Interval(3, 7), None]
