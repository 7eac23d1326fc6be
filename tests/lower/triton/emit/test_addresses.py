"""Addresses of lanes: the emitted text is evaluated in int32 and int64 that wrap around, as on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ir.funcs import ref
from tilekern.ir.analysis.ranges import Interval
from tilekern.ir.core import Array, Value
from tilekern.ir.memory import Access, Dim, Load, Position, Term
from tilekern.ir.types import I32, TileType
from tilekern.lower.triton.emit.addresses import Addresses
from tilekern.lower.triton.emit.source_text import Expr

pytestmark = pytest.mark.sweep(1)  # all cases: none compiles a program

LOW, HIGH = -(2**31), 2**31 - 1
SIZES = st.sampled_from([1, 2, 4, 8])


# --- Triton's integers ----------------------------------------------------------------------------------------------


class Int:
    """An int32 or int64 tile. Division rounds toward zero, and a Python number takes the dtype of the other operand."""

    def __init__(self, array: Any, dtype: Any = np.int32) -> None:
        self.array = np.asarray(array, dtype)

    def to(self, dtype: Any) -> Int:
        return Int(self.array, dtype)

    def __getitem__(self, index: Any) -> Int:
        return Int(self.array[index], self.array.dtype)

    def _pair(self, other: Any) -> tuple[Array, Array]:
        if isinstance(other, Int):
            wide = np.promote_types(self.array.dtype, other.array.dtype)
            return self.array.astype(wide), other.array.astype(wide)
        wide = self.array.dtype if LOW <= other <= HIGH else np.dtype(np.int64)
        return self.array.astype(wide), np.asarray(other, wide)

    def _combine(self, other: Any, function: Any) -> Int:
        x, y = self._pair(other)
        with np.errstate(over="ignore"):
            result = function(x, y)
        return Int(result, result.dtype)

    def __add__(self, other: Any) -> Int:
        return self._combine(other, np.add)

    def __sub__(self, other: Any) -> Int:
        return self._combine(other, np.subtract)

    def __mul__(self, other: Any) -> Int:
        return self._combine(other, np.multiply)

    def __mod__(self, other: Any) -> Int:
        return self._combine(other, np.fmod)

    def __floordiv__(self, other: Any) -> Int:
        return self._combine(other, lambda x, y: (x - np.fmod(x, y)) // y)

    def __lt__(self, other: Any) -> Int:
        return self._combine(other, np.less)

    def __ge__(self, other: Any) -> Int:
        return self._combine(other, np.greater_equal)

    def __and__(self, other: Any) -> Int:
        return self._combine(other, np.logical_and)

    __radd__ = __add__
    __rmul__ = __mul__

    def __neg__(self) -> Int:
        return Int(0, self.array.dtype) - self


def language() -> dict[str, Any]:
    """The functions that the text may call."""
    from tilekern.lower.triton.emit.prelude import prelude

    def where(condition: Int, x: Any, y: Any) -> Int:
        pair = [v.array if isinstance(v, Int) else v for v in (x, y)]
        return Int(np.where(condition.array, *pair), next(v for v in (x, y) if isinstance(v, Int)).array.dtype)

    def full(shape: tuple[int, ...], value: Any, dtype: Any) -> Int:
        return Int(np.full(shape, value.array if isinstance(value, Int) else value), dtype)

    def arange(start: int, stop: int) -> Int:
        return Int(np.arange(start, stop))

    tl = SimpleNamespace(int64=np.int64, int32=np.int32, arange=arange, full=full, where=where)
    found: dict[str, Any] = {"tl": tl, "triton": SimpleNamespace(jit=lambda f: f)}
    exec(prelude("floor_divide floor_remainder"), found)
    return found


# --- accesses -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """An access, the values of its positions, and their known intervals."""

    op: Load
    numbers: tuple[Array, ...]
    intervals: dict[Value, Interval]
    literal: tuple[bool, ...]

    def lanes(self) -> list[Array]:
        """The exact indices along each dim of the array, in dims of the tile."""
        found: list[Array] = []
        for dim in self.op.access.dims:
            place = np.asarray(dim.position.const, object)
            for term in dim.position.terms:
                place = place + term.stride * term.digit(self.numbers[term.operand].astype(object))
            found.append(place + np.arange(dim.size).astype(object) if dim.kind == "block" else np.asarray(place))
        return np.ix_(*(np.atleast_1d(x) for x in found)) if found else []

    def evaluate(self) -> tuple[Array, Array]:
        """The offset and the mask of every lane, by the text."""
        variables = language()
        operands: list[Expr] = []
        for n, (number, literal) in enumerate(zip(self.numbers, self.literal, strict=True)):
            variables[f"p{n}"] = Int(number)
            text = str(int(number)) if literal else f"p{n}"
            operands.append(
                Expr(text, number.shape, number if literal else None, tight=int(np.max(number)) >= 0 or not literal)
            )

        def bind(wish: str, text: str) -> str:
            name = f"{wish}{len(variables)}"
            variables[name] = eval(text, variables)
            return name

        addresses = Addresses(self.op, operands, self.intervals, bind)
        if addresses.all_out_of_bounds:
            return np.zeros(self._shape, np.int64), np.zeros(self._shape, bool)
        scalar, lanes = addresses.offset()
        offset = sum(_array(eval(part, variables)).astype(np.int64) for part in (scalar, lanes) if part)
        mask = addresses.mask()
        touched = _array(eval(mask, variables)) if mask else np.ones((), bool)
        return np.broadcast_to(offset, self._shape), np.broadcast_to(touched, self._shape)

    @property
    def _shape(self) -> tuple[int, ...]:
        return self.op.access.shape

    def check(self) -> None:
        """Lanes in bounds have their address, all others are masked."""
        shape = self.op.ref.ref.shape
        lanes = self.lanes()
        inside, flat = np.ones((), bool), np.zeros((), object)
        for index, size in zip(lanes, shape, strict=True):
            inside = inside & (index >= 0) & (index < size)
            flat = flat * size + index
        inside, flat = (np.reshape(x, self._shape) for x in (np.broadcast_arrays(inside, flat)))
        offset, touched = self.evaluate()
        np.testing.assert_array_equal(touched, inside.astype(bool))
        np.testing.assert_array_equal(offset[touched], flat[touched].astype(np.int64))


def _array(x: Any) -> Array:
    return x.array if isinstance(x, Int) else np.asarray(x)


# Around 0, anything, and the limits of int32.
NUMBERS = st.one_of(st.integers(-9, 40), st.integers(LOW, HIGH), st.integers(LOW, LOW + 9), st.integers(HIGH - 9, HIGH))
EXTENTS = st.one_of(st.integers(0, 40), st.sampled_from([1000, 2**16, 2**20 + 3, 2**30, HIGH]))


@st.composite
def terms(draw: Any, operand: int) -> Term:
    stride = draw(st.one_of(st.integers(-4, 16), st.sampled_from([64, 1000, 2**16, -(2**20), 2**30])))
    div = draw(st.sampled_from([1, 1, 2, 3, 6, 1000]))
    return Term(operand, stride, div, draw(st.sampled_from([0, 0, 1, 2, 5, 64])))


@st.composite
def accesses(draw: Any, numbers: st.SearchStrategy[int] = NUMBERS, extents: st.SearchStrategy[int] = EXTENTS) -> Case:
    rank = draw(st.integers(0, 3))
    shape = tuple(draw(extents) for _ in range(rank))
    values: list[Array] = [np.asarray(draw(numbers), np.int32) for _ in range(2)]
    dims: list[Dim] = []
    for _ in shape:
        kind = draw(st.sampled_from(["block", "index", "gather"]))
        used = draw(st.lists(st.integers(0, 1), max_size=2, unique=True))
        parts = [draw(terms(n)) for n in used]
        size = 1 if kind == "index" else draw(SIZES)
        if kind == "gather":
            parts.append(draw(terms(len(values))))
            values.append(np.array([draw(numbers) for _ in range(size)], np.int32))
        dims.append(Dim(kind, Position(tuple(parts), draw(st.integers(-20, 20))), size))
    made, positions, used_values = _packed(dims, values)
    op = Load(operands=(ref("x", shape), *positions), access=Access(tuple(made)))
    intervals: dict[Value, Interval] = {}
    for value, number in zip(positions, used_values, strict=True):
        low, high = int(number.min()), int(number.max())
        match draw(st.sampled_from(["exact", "wide", "unknown"])):
            case "exact":
                intervals[value] = Interval(low, high)
            case "wide":
                more = draw(st.integers(0, 100))
                intervals[value] = Interval(max(low - more, LOW), min(high + more, HIGH))
            case _:
                pass
    literal = tuple(number.shape == () and draw(st.booleans()) for number in used_values)
    for value, number, known in zip(positions, used_values, literal, strict=True):
        if known:
            intervals[value] = Interval(int(number), int(number))
    return Case(op, tuple(used_values), intervals, literal)


def _packed(dims: list[Dim], values: list[Array]) -> tuple[list[Dim], list[Value], list[Array]]:
    """Drop operands that no term uses, and renumber the others."""
    used = list(dict.fromkeys(t.operand for d in dims for t in d.position.terms))
    renumbered = [
        Dim(
            d.kind,
            Position(
                tuple(Term(used.index(t.operand), t.stride, t.div, t.mod) for t in d.position.terms), d.position.const
            ),
            d.size,
        )
        for d in dims
    ]
    return renumbered, [Value(TileType(values[n].shape, I32), f"p{n}") for n in used], [values[n] for n in used]


@given(case=accesses(st.integers(-9, 40), st.integers(0, 40)))
def test_small_arrays(case: Case) -> None:
    case.check()


@given(case=accesses())
def test_any_numbers_and_arrays_of_any_size(case: Case) -> None:
    """A position whose arithmetic wraps around never becomes an address in bounds."""
    case.check()


@pytest.mark.parametrize(("div", "mod"), [(1, 0), (3, 0), (1, 5), (3, 64), (6, 7), (1 << 20, 0), (1, 1 << 20)])
@pytest.mark.parametrize("start", [LOW, HIGH - 8, -4])
def test_digits_round_down(div: int, mod: int, start: int) -> None:
    rows = np.arange(start, start + 8, dtype=np.int64).astype(np.int32)
    for number in rows:
        value = Value(TileType((), I32), "p")
        dim = Dim("index", Position((Term(0, 1, div, mod),), 0))
        Case(
            Load(operands=(ref("x", (100,)), value), access=Access((dim,))), (np.asarray(number),), {}, (False,)
        ).check()


def text_of(*dims: Dim, shape: tuple[int, ...], intervals: tuple[Interval, ...]) -> tuple[str, str, list[str]]:
    """The offset and the mask of an access at `i`, `j`, ...; and the expressions that get names."""
    arity = 1 + max((t.operand for d in dims for t in d.position.terms), default=-1)
    values = [Value(TileType((), I32), "ij"[n]) for n in range(arity)]
    op = Load(operands=(ref("x", shape), *values), access=Access(dims))
    bound: list[str] = []

    def bind(wish: str, text: str) -> str:
        bound.append(f"{wish} = {text}")
        return wish

    known = dict(zip(values, intervals, strict=True))
    addresses = Addresses(op, [Expr(v.name, ()) for v in values], known, bind)
    scalar, lanes = addresses.offset()
    return f"{scalar} | {lanes}", addresses.mask(), list(dict.fromkeys(bound))


def test_text_for_people() -> None:
    row = Dim("block", Position((Term(0, 32),)), 32, in_bounds=True)
    column = Dim("block", Position((), 16), 16)
    assert text_of(row, column, shape=(100, 24), intervals=(Interval(0, 2),)) == (
        " | i_lanes[:, None] * 24 + lanes[None, :]",
        "(lanes < 24)[None, :]",
        ["i_lanes = i * 32 + tl.arange(0, 32)", "lanes = 16 + tl.arange(0, 16)"],
    )
    head = Dim("index", Position((Term(0, 1, 4),)), in_bounds=True)
    assert text_of(head, shape=(3,), intervals=(Interval(0, 11),))[0] == "i // 4 | "
    assert text_of(head, shape=(3,), intervals=(Interval(-1, 11),))[0] == "floor_divide(i, 4) | "


def test_offsets_have_64_bits_only_where_they_need_them() -> None:
    dim = Dim("block", Position((Term(0, 128),)), 128, in_bounds=True)
    cases = {(2**31 - 1, 1): False, (2**31, 1): True, (2**20, 2**11): True, (2**20, 2**10): False}
    for shape, wide in cases.items():
        last = Dim("index", Position(), in_bounds=True)
        text = " ".join(text_of(dim, last, shape=shape, intervals=(Interval(0, 7),))[2])
        assert ("int64" in text) == wide, shape
    assert prod((2**20, 2**11)) > HIGH
