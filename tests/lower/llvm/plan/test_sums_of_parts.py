"""Sums of floats are added up in the same order, however many programs there are along axes of no sum."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lower.llvm.running import run
from tilekern.ir.core import Axis
from tilekern.ir.parse import parse
from tilekern.lower.llvm.lowering import LlvmLowering
from tilekern.lower.llvm.plan.task_partition import RunDigit, Runs, axis_groups, partition_tasks, sum_runs

FUNC = """
func @f(%x: ref<f32[{rows}, {columns}, 8], in>, %o: ref<f32[{columns}, 8], sum>) {{
  grid {grid}
  %0 = load %x[3*%i +: 3, 2*%j +: 2!, 0 +: 8!] : f32[3, 2, 8]
  %1 = exp(%0) : f32[3, 2, 8]
  %2 = tanh(%1) : f32[3, 2, 8]
  %3 = reduce(%2) {{monoid="sum", dims=[0]}} : f32[2, 8]
  atomic %3 to %o[2*%j +: 2!, 0 +: 8!] {{kind="add"}}
}}"""

AXES = {"i": "%i in i[{rows} by 3]", "j": "%j in j[{columns} by 2]", "r": "%r in r[2 by 1]"}


@pytest.mark.parametrize("order", ["ij", "ji", "rij", "irj", "jri"])
@pytest.mark.parametrize("rows", [3, 12, 69, 123])
def test_a_part_of_the_columns_has_the_bits_of_the_whole(order: str, rows: int) -> None:
    """Rows are added up, by several programs each; the number of columns decides nothing."""
    x = np.random.default_rng(rows).normal(size=(rows, 16, 8)).astype(np.float32)

    def sums_of(part: np.ndarray) -> np.ndarray:
        sizes = {"rows": rows, "columns": part.shape[1]}
        grid = ", ".join(AXES[axis] for axis in order).format(**sizes)
        (out,) = run(LlvmLowering(parse(FUNC.format(grid=grid, **sizes))), [part], seed=1)
        return out

    whole = sums_of(x)
    np.testing.assert_allclose(whole, np.tanh(np.exp(x.astype(np.float64))).sum(0) * (2 if "r" in order else 1), 1e-5)
    for parts in (2, 8):
        for n, part in enumerate(np.split(x, parts, 1)):
            assert sums_of(part).tobytes() == np.split(whole, parts)[n].tobytes(), f"part {n} of {parts}"


def copies(axes: tuple[Axis, ...], summed: set[int], most: int) -> dict[tuple[int, ...], tuple[int, int]]:
    """For each program, in the order of the tasks, its task and the number of its partial sum."""
    runs, digits, count = sum_runs(axes, summed, most)
    assert count <= most
    indices = list(product(*(range(a.tiles) for a in axes)))
    found: dict[tuple[int, ...], tuple[int, int]] = {}
    for task in range(runs.count):
        begin = task // runs.in_group * runs.group + task % runs.in_group * runs.length
        end = min(begin + runs.length, (task // runs.in_group + 1) * runs.group)
        copy = sum(task // d.div % d.mod * d.stride for d in digits)
        assert begin < end and copy < count
        found |= {indices[n]: (task, copy) for n in range(begin, end)}
    assert list(found) == indices
    return found


@given(lengths=st.lists(st.tuples(st.integers(1, 7), st.booleans()), min_size=1, max_size=4), most=st.integers(1, 16))
def test_the_partial_sum_of_a_program_follows_from_its_indices_along_axes_of_sums(
    lengths: list[tuple[int, bool]], most: int
) -> None:
    """Two tasks never add to the same partial sum for the same indices along other axes."""
    axes = tuple(Axis(f"i{n}", tiles) for n, (tiles, _) in enumerate(lengths))
    summed = {n for n, (_, is_sum) in enumerate(lengths) if is_sum}
    alone = tuple(Axis(a.name, a.extent if n in summed else 1) for n, a in enumerate(axes))
    single = {n for n, a in enumerate(alone) if a.tiles == 1}
    wanted = copies(alone, summed | single, most)  # analysis cannot tell what a single index is for
    tasks: dict[tuple[int, ...], int] = {}
    for program, (task, copy) in copies(axes, summed, most).items():
        assert copy == wanted[tuple(i if n in summed else 0 for n, i in enumerate(program))][1]
        others = tuple(i for n, i in enumerate(program) if n not in summed)
        assert tasks.setdefault((copy, *others), task) == task


def test_axes_of_no_sum_give_tasks() -> None:
    """Where one copy is enough, or few indices add up, programs beside each other run in different tasks."""
    rows, columns = Axis("i", 3), Axis("j", 100)
    assert sum_runs((columns, rows), {1}, 1) == (Runs(1, 300, 3), (), 1)
    assert sum_runs((rows, columns), {0}, 3) == (Runs(3, 100, 1), (RunDigit(100, 3, 1),), 3)
    assert sum_runs((rows, columns), {0}, 2) == (Runs(1, 300, 200), (RunDigit(1, 2, 1),), 2)


def test_an_axis_of_a_sum_is_in_no_group_with_another() -> None:
    text = FUNC.format(grid="%i in i[12 by 3 group 2], %j in j[16 by 2]", rows=12, columns=16)
    func = parse(text)
    assert axis_groups(func.axes) == [(0, 1)]
    partition = partition_tasks(func)
    assert axis_groups(partition.axes) == [(0,), (1,)]
    x = np.random.default_rng(0).integers(-2, 3, (12, 16, 8)).astype(np.float32)
    (out,) = run(LlvmLowering(func), [x], seed=1)
    np.testing.assert_allclose(out, np.tanh(np.exp(x)).sum(0), 1e-5)
