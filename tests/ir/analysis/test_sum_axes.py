"""Axes of sums: programs that differ along any other axis touch different elements."""

from __future__ import annotations

from itertools import product

from hypothesis import given

from tests.ir.analysis.random_sums import sums, touched
from tilekern.ir.analysis.sum_axes import sum_axes
from tilekern.ir.core import Func
from tilekern.ir.memory import Atomic


@given(func=sums())
def test_programs_that_differ_along_another_axis_never_touch_the_same_element(func: Func) -> None:
    """Else each would overwrite what the other has added to the copy that both share."""
    (total,) = func.outputs
    summed = sum_axes(func, total)
    owners: dict[tuple[int, ...], list[int]] = {}
    for program in product(*(range(a.tiles) for a in func.axes)):
        others = [index for n, index in enumerate(program) if n not in summed]
        numbers = dict(zip(func.body.args, program, strict=True))
        for op in func.walk():
            if isinstance(op, Atomic):
                for at in touched(op, numbers, total.ref.shape):
                    assert owners.setdefault(at, others) == others, f"{summed}\n{func}"
