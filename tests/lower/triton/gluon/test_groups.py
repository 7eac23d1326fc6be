"""Groups of neighbouring programs, and what differs between them."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from tests.lower.triton.gluon.samples import SM_90, assert_computes, attention, product, program
from tilekern.ir.analysis import ranges
from tilekern.ir.control import Fold
from tilekern.ir.core import Func
from tilekern.ir.memory import Load
from tilekern.lower.triton.gluon.groups import Group, group_programs
from tilekern.lower.triton.legalize import legalize
from tilekern.lower.triton.plan.tma import plan_tma_copies


def grouped(func: Func, count: int = 2) -> tuple[Func, Group]:
    legal = legalize(func, SM_90, delay=False)
    copies = plan_tma_copies(legal, SM_90, ranges.analyze(legal))
    return legal, group_programs(legal, count, copies, SM_90.cores)


def test_what_depends_on_the_axis_differs() -> None:
    func, group = grouped(attention(512, causal=True))
    loads = {op.ref.name: op for op in func.walk() if isinstance(op, Load)}
    assert not group.varying.isdisjoint(loads["query"].operands)
    assert group.varying.isdisjoint(loads["key"].operands) and group.varying.isdisjoint(loads["value"].operands)
    (fold,) = (op for op in func.body.ops if isinstance(op, Fold))
    assert group.varying.isdisjoint((fold.start,)) and not group.varying.isdisjoint((fold.stop,))


def test_an_uneven_number_of_programs_makes_a_group_more() -> None:
    _, group = grouped(attention(5 * 64), 2)
    assert (group.count, group.blocks) == (2, 3)


def test_a_group_is_no_larger_than_its_axis() -> None:
    _, group = grouped(attention(64), 2)
    assert (group.count, group.blocks) == (1, 1)


def test_the_order_of_the_grid_is_kept() -> None:
    _, group = grouped(product(1024, 128, 128))
    assert group.axes[0].group == 4 and group.axes[0].tiles == 8
    _, group = grouped(attention(512, causal=True))
    assert group.axes[group.axis].descending


@pytest.mark.parametrize(("length", "heads", "moved"), [(4096, 64, False), (16384, 16, True), (4096, 16, True)])
def test_long_programs_come_first_where_thread_blocks_would_be_unbalanced(length: int, heads: int, moved: bool) -> None:
    _, group = grouped(attention(length, heads=heads, groups=heads, causal=True))
    assert (group.order[0] == group.axis) is moved
    full = grouped(attention(length, heads=heads, groups=heads))[1]
    assert full.order == (0, 1, 2, 3)


def test_another_order_computes_the_same() -> None:
    func = attention(200, heads=2, groups=2, causal=True)
    with patch("tilekern.lower.triton.gluon.groups._excess", lambda axes, order, *_: -order[0]):
        made = program(func)
    assert made.text != program(func).text
    assert_computes(made, func)
