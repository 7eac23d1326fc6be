"""TMA copies: the loads and stores that become copies, and their descriptors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lower.triton.running import assert_runs, program_of
from tilekern.ir.analysis import ranges
from tilekern.ir.core import Func
from tilekern.ir.memory import Load, MemoryOp, Store
from tilekern.ir.parse import parse
from tilekern.ir.types import DTYPES
from tilekern.lower.triton.chip import CHIPS
from tilekern.lower.triton.plan.tma import TmaCopy, plan_tma_copies
from tilekern.lower.triton.program import Descriptor


def plan(func: Func, chip: str = "cuda:sm_90") -> dict[str, TmaCopy]:
    """The copies, by the name of their array."""
    found = plan_tma_copies(func, CHIPS[chip], ranges.analyze(func))
    return {op.ref.name: copy for op, copy in found.items() if isinstance(op, MemoryOp)}


def product(
    x: str = "f16[64, 64]", at: str = "16*%i +: 16, 0 +: 64", tile: str = "16, 64", more: str = "", load: str = ""
) -> Func:
    """A Func that multiplies tiles of x and y; `more` stands before the store of the product."""
    dtype = x.split("[")[0]
    wide = "i32" if dtype == "i8" else "f64" if dtype == "f64" else "f32"
    depth = tile.split(", ")[1]
    return parse(f"""
func @f(%x: ref<{x}, in>, %n: ref<i32[8], in>, %y: ref<{dtype}[{depth}, 32], in>, %o: ref<{wide}[64, 32], out>) {{
  grid %i in i[64 by 16]
  %r = load %n[0!] : i32[]
  %g = iota() {{dim=0}} : i32[16]
  %m = constant true : bool[{tile}]
  %a = load %x[{at}]{load} : {dtype}[{tile}]
  %b = load %y[0 +: {depth}!, 0 +: 32!] : {dtype}[{depth}, 32]
  %c = dot(%a, %b) {{contract=[[1], [0]]}} : {wide}[16, 32]
  {more}
  store %c to %o[16*%i +: 16!, 0 +: 32!]
}}""")


def test_operands_of_dots_and_stores_next_to_them() -> None:
    found = plan(product())
    assert found["x"] == TmaCopy(Descriptor((64, 64), (64, 1), (16, 64)), (0, 1))
    assert found["y"].descriptor.block == (64, 32) and found["o"].descriptor.block == (16, 32)
    assert plan(product(), "cuda:sm_100") == found
    assert plan(product(), "cuda:sm_80") == {}


WITHOUT = {
    "rows of no 16 bytes": product("f16[64, 60]", "16*%i +: 16, 0 +: 32", "16, 32"),
    "a box of more than 256 elements": product("i8[64, 512]", "16*%i +: 16, 0 +: 512", "16, 512"),
    "a start of no 16 bytes": product("f16[64, 64]", "16*%i +: 16, 4 +: 64"),
    "a box of few bytes": product("f16[64, 64]", "16*%i +: 16, 0 +: 16", "16, 16"),
    "a masked load": product(load=" mask %m"),
    "a gather": product(at="gather(%g, 16), 0 +: 64"),
    "a position that nothing is known of": product("f16[64, 64]", "%r +: 16, 0 +: 64"),
    "more than five dims": product("f16[2, 2, 2, 2, 64, 64]", "%i, 0, 0, 0, 16*%i +: 16, 0 +: 64"),
    "an index along the innermost dim": product("f16[64, 64, 8]", "16*%i +: 16, 0 +: 64, 0"),
    "exact float32 products": product("f32[64, 64]"),
    "float64": product("f64[64, 64]"),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_what_is_no_copy(name: str) -> None:
    assert "x" not in plan(WITHOUT[name])


@pytest.mark.parametrize("dtype", ["f16", "bf16", "i8", "f8e5m2", "f8e4m3fn"])
def test_dtypes(dtype: str) -> None:
    assert "x" in plan(product(f"{dtype}[64, 64]"))


def test_dims_that_the_tile_does_not_have_come_first() -> None:
    found = plan(product("f16[2, 64, 3, 64]", "1, 16*%i +: 16, 2, 0 +: 64"))
    assert found["x"] == TmaCopy(Descriptor((2, 3, 64, 64), (64 * 3 * 64, 64, 3 * 64, 1), (1, 1, 16, 64)), (0, 2, 1, 3))


def test_positions_partly_outside_are_copies_too() -> None:
    """Elements outside the array read as 0, so loads with other fills are no copies."""
    assert "x" in plan(product("f16[60, 64]", "16*%i - 8 +: 16, 8 +: 64"))


def test_what_is_loaded_for_arithmetic_is_no_copy() -> None:
    func = parse("""
func @f(%x: ref<f16[64, 64], in>, %o: ref<f16[64, 64], out>) {
  grid %i in i[64 by 16]
  %a = load %x[16*%i +: 16!, 0 +: 64!] : f16[16, 64]
  %b = add(%a, %a) : f16[16, 64]
  store %b to %o[16*%i +: 16!, 0 +: 64!]
}""")
    assert plan(func) == {}


@pytest.mark.parametrize(
    ("more", "copied"),
    [
        ("", True),
        ("store %c to %o[16*%i +: 16!, 0 +: 32!]", False),  # no barrier orders copies to one place
        ("%h = load %o[16*%i +: 16!, 0 +: 32!] : f32[16, 32]", False),
        (
            "%s = slice(%c) {start=[0, 0], stop=[8, 32], stride=[1, 1]} : f32[8, 32]"
            " store %s to %o[16*%i +: 8!, 0 +: 32!]",
            False,
        ),
    ],
    ids=["one store", "the same place twice", "a load", "another box"],
)
def test_stores_with_barriers_or_of_two_descriptors_are_no_copies(more: str, copied: bool) -> None:
    assert ("o" in plan(product(more=more))) == copied


@pytest.mark.parametrize(("rows", "copied"), [(32, {"y"}), (64, {"x", "y"})])
def test_what_a_loop_multiplies_again_and_again_is_a_copy_if_shared_memory_is_multiplied(
    rows: int, copied: set[str]
) -> None:
    """Operands of fewer rows are multiplied in registers, and would stay there for the whole loop."""
    func = parse(f"""
func @f(%x: ref<bf16[128, 64], in>, %y: ref<bf16[512, 64], in>, %o: ref<f32[128, 64], out>) {{
  grid %i in i[128 by {rows}]
  %z = constant 0 : i32[]
  %n = constant 512 : i32[]
  %s = constant 0.0 : f32[{rows}, 64]
  %a = load %x[{rows}*%i +: {rows}!, 0 +: 64!] : bf16[{rows}, 64]
  %acc = fold %k in k[512 by 64] from %z to %n with %c = %s do {{
    %b = load %y[64*%k +: 64!, 0 +: 64!] : bf16[64, 64]
    %t = transpose(%b) {{permutation=[1, 0]}} : bf16[64, 64]
    %d = dot(%a, %t) {{contract=[[1], [0]]}} : f32[{rows}, 64]
    %e = add(%c, %d) : f32[{rows}, 64]
    yield %e
  }} : f32[{rows}, 64]
  store %acc to %o[{rows}*%i +: {rows}!, 0 +: 64!]
}}""")
    assert plan(func).keys() - {"o"} == copied
    rng = np.random.default_rng(0)
    assert_runs(func, *(rng.integers(-3, 4, (n, 64)).astype(DTYPES["bf16"]) for n in (128, 512)))


def test_one_array_may_have_several_descriptors() -> None:
    func = parse("""
func @f(%x: ref<f16[64, 64], in>, %o: ref<f32[64, 64], out>) {
  grid %i in i[64 by 16]
  %a = load %x[16*%i +: 16!, 0 +: 64!] : f16[16, 64]
  %b = load %x[0 +: 64!, 0 +: 64!] : f16[64, 64]
  %c = dot(%a, %b) {contract=[[1], [0]]} : f32[16, 64]
  store %c to %o[16*%i +: 16!, 0 +: 64!]
}""")
    found = plan_tma_copies(func, CHIPS["cuda:sm_90"], ranges.analyze(func))
    assert len({c for op, c in found.items() if isinstance(op, Load)}) == 2
    assert sum(isinstance(op, Store) for op in found) == 1
    program = assert_runs(func, (np.arange(64 * 64).reshape(64, 64) % 7).astype(np.float16))
    assert [a.name for a in program.arguments] == ["x_desc", "x_desc_2", "o_desc"] and program.operands == (0, 0)


@given(rows=st.integers(1, 40), depth=st.integers(1, 40), step=st.integers(-5, 5), dtype=st.sampled_from(["f16", "i8"]))
def test_boxes_read_what_pointers_read(rows: int, depth: int, step: int, dtype: str) -> None:
    """Boxes at the edges of arrays and beyond, for any size."""
    start, width = (16 // DTYPES[dtype].itemsize * n for n in (step, depth))
    wide = "i32" if dtype == "i8" else "f32"
    func = parse(f"""
func @f(%x: ref<{dtype}[{rows}, {width}], in>, %o: ref<{wide}[{rows}, {rows}], out>) {{
  grid %i in i[{rows} by 16], %j in j[{rows} by 16]
  %a = load %x[16*%i +: 16, {start} +: 64] : {dtype}[16, 64]
  %b = load %x[16*%j +: 16, {start} +: 64] : {dtype}[16, 64]
  %c = dot(%a, %b) {{contract=[[1], [1]]}} : {wide}[16, 16]
  store %c to %o[16*%i +: 16, 16*%j +: 16]
}}""")
    x = (np.arange(rows * width).reshape(rows, width) % 5).astype(DTYPES[dtype])
    program = assert_runs(func, x)
    assert "x_desc" in [a.name for a in program.arguments]


def test_arrays_beyond_int32_have_coordinates_of_32_bits() -> None:
    """Offsets would need 64 bits; coordinates do not, and descriptors take only 32."""
    func = parse(f"""
func @f(%x: ref<bf16[{2**16}, {2**16}], in>, %y: ref<bf16[{2**16}, 64], in>, %o: ref<f32[{2**16}, 64], out>) {{
  grid %i in i[{2**16} by 64]
  %z = constant 0 : i32[]
  %n = constant {2**16} : i32[]
  %s = constant 0.0 : f32[64, 64]
  %acc = fold %k in k[{2**16} by 64] from %z to %n with %c = %s do {{
    %a = load %x[64*%i +: 64!, 64*%k +: 64!] : bf16[64, 64]
    %b = load %y[64*%k +: 64!, 0 +: 64!] : bf16[64, 64]
    %d = dot(%a, %b) {{contract=[[1], [0]]}} : f32[64, 64]
    %e = add(%c, %d) : f32[64, 64]
    yield %e
  }} : f32[64, 64]
  store %acc to %o[64*%i +: 64!, 0 +: 64!]
}}""")
    text = program_of(func).text
    assert "x_desc.load(" in text and "int64" not in text
