"""Functions that Mosaic lacks: the signs of all numbers."""

from __future__ import annotations

from tests.ir.funcs import assert_same, edges
from tests.lower.triton.legalize.meaning import one
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.interpret import interpret
from tilekern.ir.types import F32
from tilekern.lower.mosaic.legalize.functions import expand_functions


def test_signs() -> None:
    func, arrays = one(Elementwise, edges(F32), function="sign")
    expanded = expand_functions(func)
    assert expanded is not func
    assert_same(interpret(expanded, *arrays)[0], interpret(func, *arrays)[0])
