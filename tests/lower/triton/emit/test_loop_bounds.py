"""Loop bounds in tiles: the emitted quotient is exact for every index."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilekern.ir.analysis.ranges import Interval, transfer
from tilekern.ir.compute import splat
from tilekern.ir.core import Op, Value, cdiv, index_value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.types import INDEX
from tilekern.lower.triton.emit.loop_bounds import LoopBounds

pytestmark = pytest.mark.sweep(1)  # all cases: none compiles a program

HIGHEST = 9
TL = SimpleNamespace(minimum=min, maximum=max)


class Scalars:
    """Arithmetic on an index i in 0..HIGHEST as ops, with their intervals."""

    def __init__(self) -> None:
        self.index = index_value("i")
        self.ranges: dict[Value, Interval] = {self.index: Interval(0, HIGHEST)}
        self.definitions: dict[Value, Op] = {}

    def number(self, n: int) -> Value:
        return self._add(splat(n, INDEX))

    def of(self, function: str, x: Value, y: Value) -> Value:
        return self._add(Elementwise(operands=(x, y), function=function))

    def _add(self, op: Op) -> Value:
        self.definitions[op.result] = op
        interval = transfer(op, [self.ranges.get(v) for v in op.operands])
        if interval is not None:
            self.ranges[op.result] = interval
        return op.result

    def tiles(self, value: Value, block: int, up: bool) -> str | None:
        names = {v: f"v{n}" for n, v in enumerate([self.index, *self.definitions])}
        return LoopBounds(self.definitions.get, self.ranges).tiles(value, block, up, names.__getitem__)

    def numbers(self, i: int) -> dict[str, int]:
        """The values of the variables."""
        found: dict[Value, int] = {self.index: i}
        for value, op in self.definitions.items():
            found[value] = int(op.evaluate(*(_int32(found[v]) for v in op.operands)))
        return {f"v{n}": found[v] for n, v in enumerate([self.index, *self.definitions])}


def _int32(n: int) -> Any:
    return INDEX.dtype.type(n)


@st.composite
def scalars(draw: st.DrawFn) -> tuple[Scalars, Value]:
    made = Scalars()
    values = [made.index]
    for _ in range(draw(st.integers(1, 5))):
        function = draw(st.sampled_from(["add", "sub", "mul", "div", "min", "max"]))
        number = draw(st.sampled_from([1, 2, 4, 8, 3, 16, 2**30]))
        other = made.number(number) if draw(st.booleans()) or function == "div" else draw(st.sampled_from(values))
        values.append(made.of(function, draw(st.sampled_from(values)), other))
    return made, values[-1]


@given(made=scalars(), block=st.sampled_from([1, 2, 4, 8, 3]), up=st.booleans())
def test_what_is_written_is_the_quotient(made: tuple[Scalars, Value], block: int, up: bool) -> None:
    sketch, value = made
    text = sketch.tiles(value, block, up)
    for i in range(HIGHEST + 1 if text else 0):
        names = sketch.numbers(i)
        (elements,) = (n for v, n in zip(sketch.definitions, list(names.values())[1:], strict=True) if v is value)
        assert eval(text or "", {"tl": TL}, names) == (-(-elements // block) if up else elements // block), text


Build = Callable[[Scalars], Value]


@pytest.mark.parametrize(
    ("build", "down", "up"),
    [
        (lambda s: s.of("mul", s.index, s.number(128)), "v0 * 2", "v0 * 2"),
        (lambda s: s.of("add", s.of("mul", s.index, s.number(64)), s.number(65)), "v0 + 1", "v0 + 2"),
        (
            # The first tile that the diagonal reaches: (64 i + 1) // 64 * 64.
            lambda s: s.of(
                "mul",
                s.of("div", s.of("add", s.of("mul", s.index, s.number(64)), s.number(1)), s.number(64)),
                s.number(64),
            ),
            "v0",
            "v0",
        ),
        (
            lambda s: s.of(
                "min", s.of("mul", s.index, s.number(64)), s.of("add", s.of("mul", s.index, s.number(64)), s.number(64))
            ),
            "v0",
            "v0",
        ),
        (
            lambda s: s.of("min", s.of("mul", s.index, s.number(64)), s.number(128)),
            "tl.minimum(v0, 2)",
            "tl.minimum(v0, 2)",
        ),
        (lambda s: s.of("add", s.index, s.number(1)), None, None),
        (lambda s: s.number(130), "2", "3"),
    ],
)
def test_bounds_for_people(build: Build, down: str | None, up: str | None) -> None:
    made = Scalars()
    value = build(made)
    assert (made.tiles(value, 64, False), made.tiles(value, 64, True)) == (down, up)


def test_rounding_up_is_cdiv() -> None:
    made = Scalars()
    assert made.tiles(made.number(7), 2, True) == str(cdiv(7, 2))
