"""Proofs of x <= y: whatever is proved holds for all indices."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tilekern.ir.core import Func, Value
from tilekern.ir.parse import parse
from tilekern.lower.mosaic.plan.inequalities import Inequalities


@given(data=st.data())
def test_what_is_at_most_something_is(data: st.DataObject) -> None:
    """Of random minima, maxima and products: what is claimed holds for all indices."""
    lines = [f"%v{n} = constant {data.draw(st.integers(-4, 9))} : i32[]" for n in range(3)]
    lines += ["%v3 = max(%i, %i) : i32[]", "%v4 = max(%j, %j) : i32[]"]
    for n in range(5, 13):
        function = data.draw(st.sampled_from(["min", "max", "min", "max", "mul", "add"]))
        a, b = (data.draw(st.integers(0, n - 1)) for _ in range(2))
        lines.append(f"%v{n} = {function}(%v{a}, %v{b}) : i32[]")
    text = "\n".join(lines)
    func = parse(f"func @f(%o: ref<i32[5, 7], out>) {{ grid %i in i[5 by 1], %j in j[7 by 1]\n {text}\n }}")
    order, numbers = Inequalities(func), _numbers(func)
    for x, first in numbers.items():
        for y, second in numbers.items():
            assert not order.at_most(x, y) or (first <= second).all(), (x, y)


def _numbers(func: Func) -> dict[Value, Any]:
    """The scalars of a Func in every program."""
    found: dict[Value, Any] = dict(zip(func.body.args, np.indices(func.grid, np.int32), strict=True))
    for op in func.body.ops:
        found[op.result] = np.broadcast_to(op.evaluate(*(found[v] for v in op.operands)), func.grid)
    return found


def test_what_is_ordered() -> None:
    func = parse("""
        func @f(%o: ref<i32[5, 7], out>) {
          grid %i in i[5 by 1], %j in j[7 by 1]
          %two = constant 2 : i32[]
          %low = min(%i, %j) : i32[]
          %high = max(%i, %two) : i32[]
          %a = mul(%low, %two) : i32[]
          %b = mul(%high, %two) : i32[]
          %c = max(%a, %two) : i32[]
        }
    """)
    value = {r.name: r for op in func.body.ops for r in op.results} | {a.name: a for a in func.body.args}
    order = Inequalities(func)
    for pair in ("low i", "low j", "i high", "low high", "two high", "a b", "a c"):
        x, y = pair.split()
        assert order.at_most(value[x], value[y]) and not order.at_most(value[y], value[x]), pair
