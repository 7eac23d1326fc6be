"""Copies of ops are the ops that their constructors would make."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from tests.ir import funcs
from tilekern.errors import VerifyError
from tilekern.ir.analysis.ranges import analyze
from tilekern.ir.core import Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.types import F32, I32, TileType
from tilekern.ir.verify import verify
from tilekern.testing.programs.batches import sample

OPS = [op for func in (funcs.every_op(), *(sample(seed)[0].func for seed in range(40))) for op in func.walk()]


def shown(op: Op) -> dict[str, object]:
    """The fields of an op, with types in the place of its results."""
    return {f.name: [v.type for v in op.results] if f.name == "results" else getattr(op, f.name) for f in fields(op)}


def test_a_copy_is_what_the_constructor_makes_of_the_fields() -> None:
    for op in OPS:
        operands = tuple(Value(v.type, "other") for v in op.operands)
        copy, made = op.copy(operands), replace(op, operands=operands)
        assert type(copy) is type(made) and shown(copy) == shown(made)
        assert vars(copy).keys() == {f.name for f in fields(op)}
        assert not set(copy.results) & set(op.results)


def test_a_copy_with_operands_of_other_types_obeys_the_type_rule() -> None:
    x, y = (Value(TileType((4,), dtype)) for dtype in (F32, I32))
    total = Elementwise(function="add", operands=(x, x))
    assert total.copy((y, y)).result.type == TileType((4,), I32)
    with pytest.raises(VerifyError, match="operands of one type"):
        total.copy((x, y))
    with pytest.raises(VerifyError, match="takes 2 operands"):
        total.copy((x,))


def test_ranges_are_the_callers_own() -> None:
    func = funcs.softmax()
    ranges = analyze(func)
    expected = dict(ranges)
    ranges.clear()
    assert analyze(func) == expected != {}


def test_an_op_that_was_verified_is_still_looked_at_where_it_stands() -> None:
    func = funcs.softmax()
    verify(func)
    ops = func.body.ops
    with pytest.raises(VerifyError, match="which is not defined there"):
        verify(replace(func, body=replace(func.body, ops=ops[::-1])))
