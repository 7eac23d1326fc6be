"""Groups of neighbouring programs, and what differs between them."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest

import tilekern as tk
from tests.lower.triton.gluon.samples import SM_90, assert_computes, attention, grouped_product, like, product, program
from tilekern.ir.analysis import ranges
from tilekern.ir.control import Fold
from tilekern.ir.core import Func
from tilekern.ir.memory import Load
from tilekern.lower.triton.gluon.groups import Group, group_programs
from tilekern.lower.triton.legalize import legalize
from tilekern.lower.triton.plan.tma import plan_tma_copies


def grouped(func: Func, count: int = 2) -> tuple[Func, Group]:
    legal = legalize(func, SM_90, delay=False)
    copies = plan_tma_copies(legal, SM_90, ranges.analyze(legal), casts=True)
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


def test_programs_of_a_group_run_loops_around_products_equally_often() -> None:
    """Rows would share the wide tiles of a matrix, but visit groups of their own."""
    func, group = grouped(grouped_product(512, 128, 512, 8, block_n=256))
    assert (func.axes[group.axis].extent, group.count) == (512, 2) and group.axis == 1
    (around,) = (op for op in func.body.ops if isinstance(op, Fold))
    assert group.varying.isdisjoint((around.start, around.stop))


@tk.kernel(out_type=lambda x, w, ends: like(x.shape[0], w.shape[2]))
def rows_alone(x, w, ends, out):
    """A product whose only axis decides which matrices are visited."""
    i = tk.parallel(x.shape[0], 64)

    def add(g, acc):
        return tk.fold(tk.serial(x.shape[1], 64), lambda k, acc: tk.dot(x[i, k], w[g, k, :], acc), acc)

    out[i, :] = tk.fold(tk.serial(w.shape[0], stop=ends[i.index]), add, tk.zeros((64, 64))).astype(out.dtype)


def test_programs_without_such_an_axis_are_not_grouped() -> None:
    func = rows_alone.trace(like(200, 128), like(5, 128, 64), like(4, dtype=np.int32)).ir
    _, group = grouped(func)
    assert (group.axis, group.count, group.blocks) == (0, 1, 4)
    assert_computes(program(func), func)


def test_programs_share_the_left_tile_where_the_right_one_is_cast() -> None:
    """A shared right tile would be cast by each of them."""
    for dtype, axis in (("bfloat16", 0), ("float8_e4m3fn", 1)):
        _, group = grouped(product(256, 256, 256, dtype=dtype))
        assert (group.axis, group.count) == (axis, 2)
