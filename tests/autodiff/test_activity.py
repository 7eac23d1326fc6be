"""Values that depend on inputs: through loads, fills, carries of loops and branches, but not through integers."""

from __future__ import annotations

from tests.ir.funcs import Source, at, func, ref
from tilekern.autodiff.activity import active_values
from tilekern.ir.compute import Convert
from tilekern.ir.control import Switch
from tilekern.ir.core import Axis, Value
from tilekern.ir.types import F32, I32


def test_the_values_that_depend_on_an_input() -> None:
    x, y, out = ref("x", (3,)), ref("y", (3,)), ref("out", (3,), "out")
    depends, is_fixed = list[Value](), list[Value]()

    def body(b: Source, i: Value) -> None:
        first, second = b.load(x, at(i)), b.load(y, at(i))
        filled = b.load(y, at(i), fill=first)
        rounded = b.op(Convert, b.op(Convert, first, dtype=I32), dtype=F32)
        loop = b.fold(
            Axis("k", 4), b.const(0), b.const(4), (second, second), lambda _, c, d: (b.ew("mul", d, filled), c)
        )
        still = b.fold(Axis("k", 4), b.const(0), b.const(4), (second,), lambda _, c: (b.ew("mul", c, rounded),))
        chosen = b.op(Switch, i, regions=(b.block((), lambda: (second,)), b.block((), lambda: (first,))))
        depends.extend((first, filled, *loop, chosen, b.ew("add", second, chosen)))
        is_fixed.extend((second, rounded, *still, b.ew("sign", first), b.ew("add", second, rounded)))
        b.store(out, chosen, at(i))

    f = func("f", (x, y, out), (Axis("i", 3),), body)
    active = active_values(f, [x])
    assert active.issuperset(depends)
    assert active.isdisjoint(is_fixed)
    assert not active_values(f, [])
