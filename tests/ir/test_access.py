"""Accesses against an oracle that reads `Dim` and `Term` to the letter, lane by lane, in Python's integers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ir.funcs import assert_same
from tilekern.errors import VerifyError, WriteConflictError
from tilekern.ir.analysis.ranges import Interval, position_interval
from tilekern.ir.compute import splat
from tilekern.ir.control import Fold
from tilekern.ir.core import Array, Axis, Builder, Func, Value, index_value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.interpret import interpret
from tilekern.ir.memory import Access, Dim, Load, Position, Store, Term
from tilekern.ir.parse import parse
from tilekern.ir.text import to_text
from tilekern.ir.types import F32, I32, INDEX, RefType, TileType
from tilekern.ir.verify import verify
from tilekern.lower.xla.emit import emit_xla
from tilekern.passes.pipeline import run

LANES = 3  # of a gather
NUMBERS = np.array([5, -7, 0, 3, 11], np.int32)  # two scalars and a vector, loaded from memory

# --- the oracle ------------------------------------------------------------------------------------------------------


def position_of(position: Position, operands: list[Any], lane: int) -> int:
    total = position.const
    for term in position.terms:
        operand = operands[term.operand]
        number = operand[lane] if isinstance(operand, list) else operand
        digit = number // term.div
        total += term.stride * (digit % term.mod if term.mod else digit)
    return total


def lanes_of(access: Access, operands: list[Any]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every lane of an access, and the index in the array that it stands for."""
    for lane in np.ndindex(access.shape):
        place, left, gathered = [], list(lane), 0
        for dim in access.dims:
            own = 0 if dim.kind == "index" else gathered if dim.kind == "along" else left.pop(0)
            gathered = own if dim.kind == "gather" else gathered
            place.append(position_of(dim.position, operands, own) + (own if dim.kind == "block" else 0))
        yield lane, tuple(place)


def inside(place: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return all(0 <= p < n for p, n in zip(place, shape, strict=True))


def naive_load(array: Array, access: Access, operands: list[Any]) -> Array:
    tile = np.zeros(access.shape, array.dtype)
    for lane, place in lanes_of(access, operands):
        if inside(place, array.shape):
            tile[lane] = array[place]
    return tile


# --- accesses of grids -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """An access of an array by the programs of a grid; its operands: the grid's indices, two scalars, a vector.

    Attributes:
      shape: the shape in which the access sees the array.
      own: the array's.
    """

    axes: tuple[Axis, ...]
    shape: tuple[int, ...]
    own: tuple[int, ...]
    access: Access

    @property
    def array(self) -> Array:
        return np.arange(1, 1 + np.prod(self.shape), dtype=np.float32).reshape(self.shape)

    def programs(self) -> Iterator[tuple[tuple[int, ...], list[Any]]]:
        """The indices of each program, and the operands of its access."""
        first, second, *vector = NUMBERS.tolist()
        for indices in product(*(range(axis.tiles) for axis in self.axes)):
            yield indices, [*indices, first, second, vector]

    def func(self, stores: bool) -> Func:
        """Load, and store the tiles to a place for each program; or with `stores` copy to where it is loaded from."""
        x, numbers = (Value(RefType(s, d, "in"), n) for n, s, d in (("x", self.own, F32), ("n", (5,), I32)))
        grid = tuple(axis.tiles for axis in self.axes)
        kept = RefType((*grid, *self.access.shape), F32, "out")
        out = Value(RefType(self.own, F32, "zeros") if stores else kept, "out")
        args, b = tuple(index_value(axis.name) for axis in self.axes), Builder()

        def body(*_: Value) -> tuple[Value, ...]:
            indices = [Access((Dim("index", Position(const=n)),)) for n in range(2)]
            lanes = Access((Dim("block", Position(const=2), LANES),))
            found = [b.one(Load(operands=(numbers,), access=a)) for a in (*indices, lanes)]
            used = (*args, *found)[: self.access.arity]
            tile = b.one(Load(operands=(x, *used), access=self.access))
            if stores:
                b.add(Store(operands=(out, tile, *used), access=self.access))
                return ()
            dims = [Dim("index", Position((Term(n, 1),))) for n in range(len(args))]
            dims += [Dim("block", Position(), n) for n in self.access.shape]
            b.add(Store(operands=(out, tile, *args), access=Access(tuple(dims))))
            return ()

        func = Func("f", (x, numbers, out), self.axes, b.block(args, body))
        verify(func)
        return func


STRIDES = st.sampled_from([1, 1, 1, 2, 3, 4, 8, -1])


@st.composite
def positions(draw: st.DrawFn, operands: int) -> Position:
    count = draw(st.sampled_from([0, 1, 1, 1, 2]))
    terms = [Term(draw(st.integers(0, operands - 1)), draw(STRIDES), *draw(DIGITS)) for _ in range(count)]
    return Position(tuple(terms), draw(st.sampled_from([0, 0, 0, 0, 1, 3, -1])))


DIGITS = st.sampled_from([(), (), (2,), (3,), (1, 2), (1, 3), (2, 2), (2, 3), (4,), (1, 4)])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    counts = draw(st.lists(st.sampled_from([1, 2, 4, 6]), min_size=1, max_size=2))
    cuts = draw(st.sampled_from([(1, 0), (1, 0), (4, 0), (4, 1)]))  # the block, and what the last tile lacks
    axes = tuple(Axis(name, cuts[0] * n - cuts[1], cuts[0]) for name, n in zip("ij", counts, strict=False))
    shape = tuple(draw(st.lists(st.sampled_from([1, 4, 9, 24]), min_size=1, max_size=2)))
    dims = []
    for _ in shape:
        along = ["along", "along"] if any(dim.kind == "gather" for dim in dims) else []
        kind = draw(st.sampled_from(["block", "block", "index", "index", "gather", *along]))
        # Mostly places in the grid, so that many lanes are in bounds; sometimes the scalars, too.
        position = draw(positions(len(axes) + draw(st.sampled_from([0, 0, 2]))))
        if kind in ("gather", "along"):
            vector = Term(len(axes) + 2, draw(STRIDES), *draw(DIGITS))
            position = Position((*position.terms, vector), position.const)
        size = {"block": draw(st.sampled_from([1, 2, 4])), "index": 1, "gather": LANES, "along": LANES}[kind]
        dims.append(Dim(kind, position, size))
    seen = [shape, shape, (int(np.prod(shape)),), (shape[0], 1, *shape[1:])]
    own = draw(st.sampled_from(seen))
    return Case(axes, shape, own, Access(tuple(dims), None if own == shape else shape))


def by_xla(func: Func, *arrays: Array) -> Array:
    (out,) = jax.jit(partial(emit_xla.run, func))(*arrays)
    return np.asarray(out)


@given(case=cases())
def test_loads_read_the_lanes_that_the_access_means(case: Case) -> None:
    func = case.func(stores=False)
    tiles = [naive_load(case.array, case.access, operands) for _, operands in case.programs()]
    expected = np.stack(tiles).reshape(*func.grid, *case.access.shape)
    improved = run(func, check=True)
    arrays = case.array.reshape(case.own), NUMBERS
    for result in (*interpret(func, *arrays), *interpret(improved, *arrays), by_xla(func, *arrays)):
        assert_same(result, expected)
    assert_same(by_xla(improved, *arrays), expected)


@given(case=cases())
def test_stores_write_the_lanes_that_the_access_means(case: Case) -> None:
    func, expected, owners = case.func(stores=True), np.zeros(case.shape, np.float32), dict[Any, set[Any]]()
    for program, operands in case.programs():
        for _, place in lanes_of(case.access, operands):
            if inside(place, case.shape):
                expected[place] = case.array[place]
                owners.setdefault(place, set()).add(program)
    array, expected = case.array.reshape(case.own), expected.reshape(case.own)
    for variant in (func, run(func, check=True)):
        if any(len(programs) > 1 for programs in owners.values()):
            with pytest.raises(WriteConflictError):
                interpret(variant, array, NUMBERS)
        else:
            assert_same(interpret(variant, array, NUMBERS)[0], expected)
    # Programs that store one element store the same number there.
    assert_same(by_xla(func, array, NUMBERS), expected)


@given(case=cases())
def test_the_text_form_keeps_digits(case: Case) -> None:
    text = to_text(case.func(stores=True))
    assert to_text(parse(text)) == text


@given(data=st.data(), position=positions(3))
def test_a_position_lies_in_its_interval(data: st.DataObject, position: Position) -> None:
    ends = st.integers(-40, 40)
    bounds = [sorted(data.draw(st.tuples(ends, ends))) for _ in range(3)]
    intervals = [data.draw(st.sampled_from([Interval(*b), Interval(*b), None])) for b in bounds]
    numbers = [data.draw(st.integers(*b)) for b in bounds]
    found = position_interval(position, intervals)
    assert found is None or found.low <= position_of(position, numbers, 0) <= found.high


@pytest.mark.parametrize(
    ("term", "operand", "expected"),
    [
        (Term(0, 3, 4), (0, 11), (0, 6)),
        (Term(0, 3, 4), (-1, 11), (-3, 6)),
        (Term(0, 3, 1, 4), (0, 11), (0, 9)),
        (Term(0, 3, 1, 4), (5, 6), (3, 6)),
        (Term(0, -3, 2, 4), (4, 7), (-9, -6)),
        (Term(0, 1, 2, 4), None, (0, 3)),
    ],
)
def test_the_interval_of_a_digit_is_as_small_as_it_should_be(term: Term, operand: Any, expected: Any) -> None:
    assert position_interval(Position((term,)), [operand and Interval(*operand)]) == Interval(*expected)


@pytest.mark.parametrize("term", [Term(0, 1, 0), Term(0, 1, -2), Term(0, 1, 1, -1)])
def test_a_divisor_and_a_modulus_are_positive(term: Term) -> None:
    ref = Value(RefType((4,), F32, "in"), "x")
    with pytest.raises(VerifyError, match="digits need a positive divisor and modulus"):
        Load(operands=(ref, index_value("i")), access=Access((Dim("index", Position((term,))),)))


# --- index arithmetic ------------------------------------------------------------------------------------------------

Tree = tuple[Any, ...]


def trees() -> st.SearchStrategy[Tree]:
    """Integer expressions of the program's index i (of 24) and of the fold's index k (of 6)."""
    leaves = st.one_of(st.sampled_from([("i",), ("k",)]), st.tuples(st.just("const"), st.integers(-3, 9)))
    radices = st.sampled_from([1, 2, 3, 4, 6, 8])

    def grow(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
        both = st.tuples(st.sampled_from(["add", "sub"]), inner, inner)
        scaled = st.tuples(st.sampled_from(["mul", "div", "rem"]), inner, st.tuples(st.just("const"), radices))
        joined = st.builds(_join, inner, radices)
        return both | scaled | joined

    return st.recursive(leaves, grow, max_leaves=5)


def _join(x: Tree, radix: int) -> Tree:
    """x cut into two digits and put together again."""
    c = ("const", radix)
    return ("add", ("mul", ("div", x, c), c), ("rem", x, c))


def value_of(tree: Tree, at: Mapping[str, int]) -> int:
    name, *rest = tree
    if name == "const":
        return rest[0]
    if name in at:
        return at[name]
    x, y = (value_of(t, at) for t in rest)
    quotient = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1) if name in ("div", "rem") else 0
    return {"add": x + y, "sub": x - y, "mul": x * y, "div": quotient, "rem": x - quotient * y}[name]


def op_of(tree: Tree, at: Mapping[str, Value], b: Builder) -> Value:
    name, *rest = tree
    if name == "const":
        return b.one(splat(rest[0], INDEX))
    return at[name] if name in at else b.one(Elementwise(function=name, operands=tuple(op_of(t, at, b) for t in rest)))


def sum_of_rows(tree: Tree, size: int) -> Func:
    """out[i] = the sum over k of (k + 1) x[tree(i, k) +: size]."""
    x, out = Value(RefType((40,), F32, "in"), "x"), Value(RefType((24, size), F32, "out"), "out")
    i, b, tile = index_value("i"), Builder(), TileType((size,), F32)

    def step(k: Value, total: Value) -> tuple[Value, ...]:
        access = Access((Dim("block", Position((Term(0, 1),)), size),))
        row = b.one(Load(operands=(x, op_of(tree, {"i": i, "k": k}, b)), access=access))
        # Otherwise a position that mixes up two iterations would give the same sum.
        doubled = b.one(Elementwise(function="add", operands=(total, total)))
        return (b.one(Elementwise(function="add", operands=(doubled, row))),)

    def body(_: Value) -> tuple[Value, ...]:
        start, stop = (b.one(splat(n, INDEX)) for n in (0, 6))
        args = (index_value("k"), Value(tile, "total"))
        inits = (start, stop, b.one(splat(0, tile)))
        (total,) = b.add(Fold(operands=inits, regions=(b.block(args, step),), axis=Axis("k", 6)))
        dims = (Dim("index", Position((Term(0, 1),))), Dim("block", Position(), size))
        b.add(Store(operands=(out, total, i), access=Access(dims)))
        return ()

    return Func("f", (x, out), (Axis("i", 24),), b.block((i,), body))


@given(tree=trees(), size=st.sampled_from([1, 4]))
def test_index_arithmetic_means_the_same_inside_the_access(tree: Tree, size: int) -> None:
    func = sum_of_rows(tree, size)
    x = np.arange(1, 41, dtype=np.float32)
    expected = np.zeros((24, size), np.float32)
    for i in range(24):
        for k in range(6):
            first = value_of(tree, {"i": i, "k": k})
            lanes = range(first, first + size)
            expected[i] = 2 * expected[i] + [x[n] if 0 <= n < 40 else 0 for n in lanes]
    improved = run(func, check=True)
    for result in (*interpret(func, x, orders=1), *interpret(improved, x, orders=1)):
        assert_same(result, expected)
