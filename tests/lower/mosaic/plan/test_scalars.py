"""Known scalars: equal keys for equal computations, and for no others."""

from __future__ import annotations

import numpy as np

from tilekern.ir.interpret import interpret
from tilekern.ir.memory import Load
from tilekern.ir.parse import parse
from tilekern.lower.mosaic.plan.scalars import Scalars

# Elements 2 * i of a table of five numbers, of which the last one lies outside of it.
LOADS = """
func @loads(%table: ref<i32[5], in>, %out: ref<i32[4, 4], out>) {
  grid %i in i[4 by 1]
  %one = constant 1 : i32[]
  %seven = constant 7 : i32[]
  %again = constant 7 : i32[]
  %a = load %table[2*%i] fill %one : i32[]
  %b = load %table[2*%i] fill %seven : i32[]
  %c = load %table[2*%i] fill %again : i32[]
  %d = load %table[2*%i] : i32[]
  store %a to %out[%i, 0]
  store %b to %out[%i, 1]
  store %c to %out[%i, 2]
  store %d to %out[%i, 3]
}"""


def test_loads_with_other_fills_have_other_keys() -> None:
    func = parse(LOADS)
    scalars = Scalars(func, 1 << 18)
    keys = [scalars.key(op.result) for op in func.walk() if isinstance(op, Load)]
    assert None not in keys
    results = interpret(func, np.arange(10, 15, dtype=np.int32))[0].T
    for key, result in zip(keys, results, strict=True):
        for other, same in zip(keys, results, strict=True):
            assert (key == other) == (result.tolist() == same.tolist())
