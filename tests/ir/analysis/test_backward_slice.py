"""Backward slices: the ops that values depend on, through regions, too."""

from __future__ import annotations

from tilekern.ir.analysis.backward_slice import backward_slice
from tilekern.ir.parse import parse


def test_a_slice_has_the_ops_that_values_depend_on() -> None:
    func = parse("""
        func @f(%o: ref<i32[4, 4], out>) {
          grid %i in i[4 by 1], %j in j[4 by 1]
          %a = add(%i, %j) : i32[]
          %b = switch(%i) do { %q = switch(%j) do { yield %a } do { yield %j } : i32[]
            yield %q } do { yield %i } : i32[]
          %c = add(%i, %i) : i32[]
          store %b to %o[%i!, %j!]
        }
    """)
    ops = func.body.ops
    values = {r.name: r for op in ops for r in op.results}
    found = backward_slice(ops, [values["b"]])
    assert [r.name for op in found for r in op.results] == ["a", "b"]
    assert backward_slice(ops, [values["b"]], {values["b"]}) == []
    (switch,) = (op for op in ops if op.name == "switch")
    assert {values["a"], *func.body.args} <= set(switch.uses())
