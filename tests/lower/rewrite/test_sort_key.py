"""Integer keys that have the order of numbers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ir.funcs import edges
from tests.lower.triton.legalize.meaning import several
from tilekern.ir.interpret import interpret
from tilekern.ir.make import Make
from tilekern.ir.types import BOOL, DTYPES, kind_of
from tilekern.lower.rewrite.sort_key import sort_key

pytestmark = pytest.mark.sweep(1)  # all cases: none compiles a program


@pytest.mark.parametrize("name", [n for n, d in DTYPES.items() if d != BOOL and d.itemsize * 8 != 4])
def test_keys_have_the_order_of_numbers(name: str) -> None:
    """Those of edges, negative ones included; NaN is the last, and -0 is 0."""
    numbers = edges(DTYPES[name])
    func, arrays = several(lambda b, x: [sort_key(Make(b), x)], numbers)
    keys = interpret(func, *arrays)[0][: numbers.size]
    with np.errstate(invalid="ignore"):
        wide = numbers.astype(np.float64) if kind_of(DTYPES[name]) == "float" else numbers
    order, expected = np.argsort(keys, kind="stable"), np.sort(wide)  # NaN comes last
    np.testing.assert_array_equal(wide[order], expected)
    same = keys[order][1:] == keys[order][:-1]
    np.testing.assert_array_equal(same, (expected[1:] == expected[:-1]) | np.isnan(np.asarray(expected, float))[:-1])
