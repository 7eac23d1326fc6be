"""Groups of neighbouring programs, and what differs between them."""

from __future__ import annotations

from tests.lower.triton.gluon.samples import SM_90, attention, product
from tilekern.ir.analysis import ranges
from tilekern.ir.control import Fold
from tilekern.ir.core import Func
from tilekern.ir.memory import Load
from tilekern.lower.triton.gluon.groups import Group, group_programs
from tilekern.lower.triton.legalize import legalize
from tilekern.lower.triton.plan.tma import plan_tma_copies


def grouped(func: Func, count: int = 2) -> tuple[Func, Group]:
    legal = legalize(func, SM_90, delay=False)
    return legal, group_programs(legal, count, plan_tma_copies(legal, SM_90, ranges.analyze(legal)))


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
