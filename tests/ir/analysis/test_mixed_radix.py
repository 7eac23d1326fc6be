from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from tilekern.ir.analysis.mixed_radix import Digit, Sum
from tilekern.ir.analysis.ranges import Interval
from tilekern.ir.core import Value, index_value

VALUES = tuple(map(index_value, "ij"))
RADICES = st.sampled_from([1, 2, 3, 4, 6, 8, 12])


def digits() -> st.SearchStrategy[Digit]:
    return st.builds(Digit, st.sampled_from(VALUES), RADICES, RADICES | st.just(0))


def sums() -> st.SearchStrategy[Sum]:
    strides = st.dictionaries(digits(), st.sampled_from([-2, 0, 1, 1, 2, 3, 4, 6, 8, 12, 24]), max_size=3)
    return st.builds(Sum, strides, st.integers(-3, 12))


def number(total: Sum, at: Mapping[Value, int]) -> int:
    result = total.const
    for digit, stride in total.strides.items():
        quotient = at[digit.value] // digit.div
        result += stride * (quotient % digit.mod if digit.mod else quotient)
    return result


@given(x=sums(), y=sums(), factor=st.integers(-3, 3), numbers=st.tuples(*[st.integers(-50, 50)] * 2))
def test_sums_add_up(x: Sum, y: Sum, factor: int, numbers: tuple[int, ...]) -> None:
    at = dict(zip(VALUES, numbers, strict=True))
    assert number(x.plus(y, factor), at) == number(x, at) + factor * number(y, at)


@given(value=st.sampled_from(VALUES), div=RADICES, radices=st.lists(RADICES, max_size=3), stride=st.integers(1, 3))
def test_all_digits_together_are_the_number(value: Value, div: int, radices: list[int], stride: int) -> None:
    total, place, factor = Sum({}), div, stride
    for radix in radices:
        total = total.plus(Sum({Digit(value, place, radix): factor}))
        place, factor = place * radix, factor * radix
    total = total.plus(Sum({Digit(value, place): factor}))
    kept = {d: s for d, s in total.strides.items() if d.mod != 1}  # a digit in base 1 is 0
    assert kept == {Digit(value, div): stride}


@given(
    x=sums(), divisor=RADICES, low=st.integers(-20, 20), length=st.integers(0, 30), known=st.booleans(), data=st.data()
)
def test_quotient_and_remainder(x: Sum, divisor: int, low: int, length: int, known: bool, data: st.DataObject) -> None:
    ranges = {VALUES[0]: Interval(low, low + length), VALUES[1]: Interval(0, 7)} if known else {}
    parts = x.divide(divisor, ranges)
    if parts is None:
        return
    at = {VALUES[0]: data.draw(st.integers(low, low + length)), VALUES[1]: data.draw(st.integers(0, 7))}
    assert tuple(number(part, at) for part in parts) == divmod(number(x, at), divisor)


def test_what_is_divided_exactly_and_what_is_not() -> None:
    i, j = VALUES
    ranges = {j: Interval(0, 3)}
    head = Sum({Digit(i): 4, Digit(j): 1})
    assert head.divide(4, ranges) == (Sum({Digit(i): 1}), Sum({Digit(j): 1}))
    assert head.divide(8, ranges) == (Sum({Digit(i, 2): 1}), Sum({Digit(i, 1, 2): 4, Digit(j): 1}))
    assert head.divide(4, {}) == (Sum({Digit(i): 1, Digit(j, 4): 1}), Sum({Digit(j, 1, 4): 1}))
    assert head.divide(6, ranges) is None and head.divide(8, {}) is None
    assert Sum({Digit(i, 2, 6): 1}).divide(3, {}) == (Sum({Digit(i, 6, 2): 1}), Sum({Digit(i, 2, 3): 1}))
    assert Sum({Digit(i, 2, 4): 1}).divide(3, {}) is None
