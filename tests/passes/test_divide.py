"""The Func of a device's part: golden text. `tests/ir/analysis/test_lanes.py` interprets parts of random kernels."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ir.funcs import assert_same
from tilekern.ir.analysis.sharding import sharding_of
from tilekern.ir.interpret import interpret
from tilekern.ir.parse import parse
from tilekern.ir.text import to_text
from tilekern.ir.verify import verify
from tilekern.passes.divide import divide

BEFORE = """
func @f(%x: ref<f32[12, 6], in>, %w: ref<f32[6, 5], in>, %out: ref<f32[12, 5], out>) {
  grid %i in i[12 by 4]
  %n = constant 12 : i32[]
  %lanes = iota() {dim=0} : i32[4]
  %four = constant 4 : i32[]
  %first = mul(%i, %four) : i32[]
  %firsts = broadcast(%first) {dims=[]} : i32[4]
  %rows = add(%firsts, %lanes) : i32[4]
  %ends = broadcast(%n) {dims=[]} : i32[4]
  %inside = lt(%rows, %ends) : bool[4]
  %mask = broadcast(%inside) {dims=[0]} : bool[4, 5]
  %size = constant 12.0 : f32[]
  %sizes = broadcast(%size) {dims=[]} : f32[4, 5]
  %zero = constant 0.0 : f32[]
  %zeros = broadcast(%zero) {dims=[]} : f32[4, 5]
  %start = constant 0 : i32[]
  %stop = constant 6 : i32[]
  %sum = fold %k in k[6 by 2] from %start to %stop with %total = %zeros do {
    %a = load %x[4*%i +: 4, 2*%k +: 2] : f32[4, 2]
    %b = load %w[2*%k +: 2, 0 +: 5] : f32[2, 5]
    %product = dot(%a, %b) {contract=[[1], [0]]} : f32[4, 5]
    %next = add(%total, %product) : f32[4, 5]
    yield %next
  } : f32[4, 5]
  %mean = div(%sum, %sizes) : f32[4, 5]
  store %mean to %out[4*%i +: 4, 0 +: 5] mask %mask
}
"""
ROWS = {
    "f32[12, 6], in": "f32[4, 6], in",
    "f32[12, 5], out": "f32[4, 5], out",
    "i[12 by 4]": "i[4 by 4]",
    "%n = constant 12": "%n = constant 4",
}
INNER = {
    "f32[12, 6], in": "f32[12, 2], in",
    "f32[6, 5], in": "f32[2, 5], in",
    "k[6 by 2]": "k[2 by 2]",
    "%stop = constant 6": "%stop = constant 2",
}


@pytest.mark.parametrize(("name", "changes"), [("i", ROWS), ("k", INNER)])
def test_only_extents_change(name: str, changes: dict[str, str]) -> None:
    """The size that the body divides by stays that of the whole."""
    func = parse(BEFORE)
    (factor,) = (f for f in sharding_of(func).factors if f.name == name)
    expected = BEFORE
    for before, after in changes.items():
        assert expected.count(before) == 1
        expected = expected.replace(before, after)
    part = divide(func, {factor: 3})
    verify(part)
    assert to_text(part) == to_text(parse(expected))


def test_both_at_once() -> None:
    func = parse(BEFORE.replace("12.0", "16.0"))  # so that means are exact
    by_name = {factor.name: factor for factor in sharding_of(func).factors}
    part = divide(func, {by_name["i"]: 3, by_name["k"]: 3})
    x, w = (np.arange(n, dtype=np.float32).reshape(-1, 6) for n in (72, 30))
    w = w.T.copy()
    (whole,) = interpret(func, x, w)
    rows = [
        sum(interpret(part, *p)[0] for p in zip(np.split(r, 3, 1), np.split(w, 3), strict=True)) for r in np.split(x, 3)
    ]
    assert_same(np.concatenate(rows), whole)


def test_a_view_of_a_divided_array() -> None:
    """The dims before those that a view reshapes are divided in its shape, too."""
    func = parse("""
func @f(%x: ref<f32[8, 6], in>, %out: ref<f32[8, 2, 3], out>) {
  grid %i in i[8 by 2]
  %a = load %x as [8, 2, 3] [2*%i +: 2, 0 +: 2, 0 +: 3] : f32[2, 2, 3]
  store %a to %out[2*%i +: 2, 0 +: 2, 0 +: 3]
}
""")
    (factor,) = sharding_of(func).factors
    part = divide(func, {factor: 4})
    verify(part)
    assert "as [2, 2, 3]" in str(part)


def test_sizes_that_parts_do_not_divide() -> None:
    func = parse(BEFORE)
    (factor,) = (f for f in sharding_of(func).factors if f.name == "i")
    with pytest.raises(AssertionError):
        divide(func, {factor: 5})
