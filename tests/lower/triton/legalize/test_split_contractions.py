"""Dots of loads, in parts whose contracted size is a power of two."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lower.triton.legalize.meaning import SM_90, assert_keeps, assert_stays, counting
from tests.lower.triton.legalize.promises import ops_of
from tilekern.ir.compute import Dot
from tilekern.ir.core import Func, definitions
from tilekern.ir.memory import Load
from tilekern.ir.parse import parse
from tilekern.ir.types import F32
from tilekern.lower.triton.legalize import legalize
from tilekern.lower.triton.legalize.split_contractions import split_contractions
from tilekern.passes.dce import dce


def split(func: Func) -> Func:
    return dce(split_contractions(func))


def product(size: int, rows: str = "x[0 +: 4!, {k}]", columns: str = "y[{k}, 0 +: 8!]", more: str = "") -> Func:
    """x[4, size] times y[size, 8]; arrays have three more elements along the contraction."""
    k, long = f"1 +: {size}!", size + 3
    return parse(f"""
func @f(%x: ref<f32[4, {long}], in>, %y: ref<f32[{long}, 8], in>, %t: ref<f32[8, {long}], in>,
        %o: ref<f32[4, 8], out>, %p: ref<f32[4, {size}], zeros>) {{
  %f = constant 1.0 : f32[]
  %a = load %{rows.format(k=k)} : f32[4, {size}]
  %b = load %{columns.format(k=k)} : f32[{size}, 8]
  {more}
  %c = dot(%a, %b) {{contract=[[1], [0]]}} : f32[4, 8]
  store %c to %o[0 +: 4!, 0 +: 8!]
}}""")


def inputs(size: int) -> list[np.ndarray]:
    x, y = counting((4, size + 3), F32) % 8, counting((size + 3, 8), F32) % 4
    return [x, y, y.T.copy()]


def depths(func: Func) -> list[int]:
    return [op.operands[0].tile.shape[op.contract[0][0]] for op in ops_of(func, Dot)]


@pytest.mark.parametrize(
    ("size", "parts"),
    [
        *((192, [128, 64]), (80, [64, 16]), (96, [64, 32]), (112, [64, 32, 16]), (100, [64, 32, 16]), (17, [16, 16])),
        *((64, [64]), (15, [16]), (7, [16]), (1, [16])),
    ],
)
def test_parts(size: int, parts: list[int]) -> None:
    assert depths(assert_keeps(split, product(size), inputs(size))) == parts


@given(size=st.integers(1, 140))
def test_the_product_stays(size: int) -> None:
    func = product(size)
    result = assert_keeps(split, func, inputs(size))
    assert size <= sum(depths(result)) < size + 16
    padded = sum(depths(assert_stays(func, inputs(size))))
    assert padded < size + 16  # zeros for less than one step of a tensor core


@pytest.mark.parametrize(
    "func",
    [
        product(48, rows="x[0 +: 4!, {k}] fill %f"),
        product(48, more="store %a to %p[0 +: 4!, 0 +: 48!]"),
    ],
    ids=["filled", "used elsewhere"],
)
def test_where_loads_stay_whole(func: Func) -> None:
    result = assert_keeps(split, func, inputs(48))
    loads = [op.result.tile.shape for op in ops_of(result, Load)]
    assert (4, 48) in loads


def test_both_operands_are_cut_through_transpositions() -> None:
    func = parse("""
func @f(%x: ref<f32[4, 48], in>, %t: ref<f32[8, 48], in>, %o: ref<f32[4, 8], out>) {
  %a = load %x[0 +: 4!, 0 +: 48!] : f32[4, 48]
  %b = load %t[0 +: 8!, 0 +: 48!] : f32[8, 48]
  %c = transpose(%b) {permutation=[1, 0]} : f32[48, 8]
  %d = dot(%a, %c) {contract=[[1], [0]]} : f32[4, 8]
  store %d to %o[0 +: 4!, 0 +: 8!]
}""")
    arrays = [counting((4, 48), F32), counting((8, 48), F32)]
    assert depths(assert_keeps(split, func, arrays)) == [32, 16]


def test_one_load_of_two_dots_is_cut_once() -> None:
    func = parse("""
func @f(%x: ref<f32[4, 48], in>, %y: ref<f32[48, 8], in>, %z: ref<f32[48, 8], in>,
        %o: ref<f32[4, 8], out>, %p: ref<f32[4, 8], out>) {
  %a = load %x[0 +: 4!, 0 +: 48!] : f32[4, 48]
  %b = load %y[0 +: 48!, 0 +: 8!] : f32[48, 8]
  %c = load %z[0 +: 48!, 0 +: 8!] : f32[48, 8]
  %d = dot(%a, %b) {contract=[[1], [0]]} : f32[4, 8]
  %e = dot(%a, %c) {contract=[[1], [0]]} : f32[4, 8]
  store %d to %o[0 +: 4!, 0 +: 8!]
  store %e to %p[0 +: 4!, 0 +: 8!]
}""")
    arrays = [counting((4, 48), F32) % 7, counting((48, 8), F32), counting((48, 8), F32) + 1]
    result = assert_keeps(split, func, arrays)
    assert depths(result) == [32, 16, 32, 16] and len(ops_of(result, Load)) == 6


def test_a_dim_that_two_dots_contract_differently_is_padded() -> None:
    """q k: over the width; k v: over the rows."""
    func = parse("""
func @f(%x: ref<f32[48, 48], in>, %o: ref<f32[48, 48], out>, %p: ref<f32[48, 48], out>) {
  %a = load %x[0 +: 48!, 0 +: 48!] : f32[48, 48]
  %b = dot(%a, %a) {contract=[[1], [1]]} : f32[48, 48]
  %c = dot(%a, %a) {contract=[[0], [0]]} : f32[48, 48]
  store %b to %o[0 +: 48!, 0 +: 48!]
  store %c to %p[0 +: 48!, 0 +: 48!]
}""")
    arrays = [counting((48, 48), F32) % 5]
    assert_keeps(split, func, arrays)
    assert_stays(func, arrays)


@pytest.mark.parametrize("size", [8, 15, 17, 40, 80, 100, 192])
def test_no_select_stands_between_a_load_and_a_dot(size: int) -> None:
    """The load fills lanes out of bounds with 0: tensor cores of sm_90 take operands from shared memory."""
    func = legalize(product(size), SM_90)
    made = definitions(func)
    for dot in ops_of(func, Dot):
        assert {type(made[v]) for v in dot.operands} == {Load}
