"""Marks of texts: believed where the text proves them, and dropped elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from tests.ir.funcs import funcs
from tests.lower.library import CASES, family
from tilekern.ir.core import Func
from tilekern.ir.interpret import interpret
from tilekern.ir.marks import without_unproved
from tilekern.ir.memory import MemoryOp
from tilekern.ir.parse import parse
from tilekern.ir.text import to_text
from tilekern.lower.lowering import lower
from tilekern.lower.target import resolve
from tilekern.passes import pipeline
from tilekern.passes.split_loops import split_loops

TEXT = """
func @f(%x: ref<f32[16], in>, %which: ref<i32[8], in>, %o: ref<f32[8], out>) {{
  grid %i in i[2 by 1]
  %w = load %which[4*%i +: 4!] : i32[4]
  %a = load %x[{place}] : f32[4]
  store %a to %o[4*%i +: 4!]
}}"""


@pytest.mark.parametrize(
    ("place", "first"),
    [("1000000000 +: 4!", 0), ("16 +: 4!", 0), ("-1 +: 4!", 0), ("14 +: 4!", 14), ("gather(%w, 4)!", 0)],
)
@pytest.mark.parametrize("target", ["cpu:llvm", "cpu:xla"])
def test_what_a_text_cannot_prove_is_checked(place: str, first: int, target: str) -> None:
    func = parse(TEXT.format(place=place))
    assert f"{place[:-1]}]" in to_text(func) and to_text(func).count("!") == 2
    arrays = np.arange(1, 17, dtype=np.float32), np.full(8, 10**9, np.int32)
    (expected,) = interpret(func, *arrays)
    (found,) = lower(pipeline.run(func), resolve(target), {}).compile()(*arrays)
    np.testing.assert_array_equal(found, expected)
    assert set(map(float, expected)) <= {0.0, *range(1, 17)} and (first or place[0] in "-" or not expected.any())


@given(funcs())
def test_what_is_left_is_proved(func: Func) -> None:
    found = without_unproved(func)
    assert without_unproved(found) is found
    accesses = [op.access for op in func.walk() if isinstance(op, MemoryOp)]
    kept = [op.access for op in found.walk() if isinstance(op, MemoryOp)]
    for before, after in zip(accesses, kept, strict=True):
        for a, b in zip(before.dims, after.dims, strict=True):
            assert a.in_bounds or not b.in_bounds


@given(funcs())
def test_the_marks_of_the_passes_are_kept(func: Func) -> None:
    improved = pipeline.run(without_unproved(func))
    assert to_text(parse(to_text(improved))) == to_text(improved)


@pytest.mark.parametrize("name", ["flash_attention", "matmul", "ragged_dot"])
def test_the_marks_of_kernels_are_kept(name: str) -> None:
    func = family(name, CASES[name][0].name, "float32").func()
    split = pipeline.run(split_loops(func))
    for improved in (func, split):
        assert "!" in to_text(improved) and to_text(parse(to_text(improved))) == to_text(improved)
