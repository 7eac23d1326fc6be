"""Constants of several elements become inputs."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ir.funcs import Source, assert_same, edges
from tests.lower.triton.legalize.meaning import counting, several
from tests.lower.triton.legalize.promises import assert_padded, ops_of
from tilekern.ir.compute import Constant, Reduce
from tilekern.ir.core import Value
from tilekern.ir.interpret import interpret
from tilekern.ir.types import DTYPES, F32
from tilekern.ir.verify import verify
from tilekern.lower.rewrite.constant_inputs import constants_as_inputs
from tilekern.lower.triton.legalize.pad_tiles import pad_tiles

pytestmark = pytest.mark.sweep(1)  # all cases: none compiles a program


@pytest.mark.parametrize("name", DTYPES)
def test_constants_become_inputs_of_the_padded_shape(name: str) -> None:
    dtype = DTYPES[name]
    array = np.resize(edges(dtype, 8), (3, 5))

    def body(b: Source, x: Value) -> list[Value]:
        table = b.one(Constant(array=array, shape=(3, 5)))
        return [table, b.op(Reduce, table, monoid="max", dims=(1,)), b.const(array[0, 1], (3, 5), dtype)]

    func, arrays = several(body, counting((2,), F32))
    padded = pad_tiles(func)
    result = constants_as_inputs(padded, "table")
    for made in (padded, result.func):
        verify(made)
        assert_padded(made)
    (table,) = result.constants
    assert_same(table[:3, :5], array)
    assert result.func.inputs[-1].ref.shape == table.shape == (4, 8) and result.func.outputs == func.outputs
    assert all(op.array.shape == () for op in ops_of(result.func, Constant))
    found = interpret(result.func, *arrays, *result.constants)
    for got, wanted in zip(found, interpret(func, *arrays), strict=True):
        assert_same(got, wanted)
