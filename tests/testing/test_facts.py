"""Facts that hold for all results of an op, whatever its operands are."""

from __future__ import annotations

from tilekern.ir.types import F32
from tilekern.testing.programs.facts import FINEST, Fact, reduce, rounded


def test_numbers_that_are_rounded_may_still_be_infinite() -> None:
    assert rounded(Fact(1.0, -40, 0.0, inf=True), F32) == Fact(1.0, FINEST, 2.0**-23, inf=True)


def test_a_product_of_numbers_that_may_be_infinite_may_be_infinite() -> None:
    assert reduce("prod", Fact(2.0, 0, 0.0, inf=True), 3, F32) == Fact(8.0, 0, 0.0, inf=True)
