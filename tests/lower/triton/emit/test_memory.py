"""Buffers: where the contributions to sums go, and what the call has to prepare."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ir.funcs import Source, ref
from tests.lower.triton.running import program_of
from tilekern.ir.core import Axis, Func, Value, index_value
from tilekern.ir.memory import Access, Atomic, Dim, Position, Term
from tilekern.ir.parse import parse
from tilekern.ir.types import DTYPES, F32
from tilekern.lower.triton.emit.memory import slot_axes
from tilekern.lower.triton.program import Result

# --- slots ----------------------------------------------------------------------------------------------------------


@st.composite
def dims(draw: Any, operands: int) -> Dim:
    """A block or an index at a sum of digits of the grid's indices."""
    used = draw(st.lists(st.integers(0, operands - 1), max_size=2))
    strides = st.sampled_from([-4, -2, -1, 0, 1, 1, 2, 3, 4, 8])
    terms = tuple(
        Term(n, draw(strides), draw(st.sampled_from([1, 1, 1, 2])), draw(st.sampled_from([0, 0, 0, 2]))) for n in used
    )
    kind = draw(st.sampled_from(["block", "index"]))
    size = draw(st.sampled_from([1, 2, 4])) if kind == "block" else 1
    return Dim(kind, Position(terms, draw(st.integers(-2, 2))), size)


@st.composite
def sums(draw: Any) -> Func:
    """A Func with one or two updates of a sum."""
    axes = tuple(Axis(name, draw(st.integers(1, 4))) for name in "ij"[: draw(st.integers(1, 2))])
    rank = draw(st.integers(1, 2))
    total = ref("total", (16,) * rank, "sum")
    indices = tuple(index_value(a.name) for a in axes)
    b = Source()

    def body(*_: Value) -> tuple[Value, ...]:
        for _ in range(draw(st.integers(1, 2))):
            found = tuple(draw(dims(len(axes))) for _ in range(rank))
            arity = 1 + max((t.operand for d in found for t in d.position.terms), default=-1)
            access = Access(found)
            value = b.const(1, access.shape, F32)
            b.add(Atomic(operands=(total, value, *indices[:arity]), access=access, kind="add"))
        return ()

    return Func("f", (total,), axes, b.block(indices, body))


def touched(op: Atomic, numbers: dict[Value, int], shape: tuple[int, ...]) -> set[tuple[int, ...]]:
    lanes: list[range] = []
    for dim in op.access.dims:
        start = dim.position.const + sum(
            t.stride * t.digit(numbers[op.positions[t.operand]]) for t in dim.position.terms
        )
        lanes.append(range(start, start + dim.size))
    return {at for at in product(*lanes) if all(0 <= i < n for i, n in zip(at, shape, strict=True))}


@given(func=sums())
def test_two_programs_of_one_slot_never_touch_the_same_element(func: Func) -> None:
    """They would add without seeing each other's sums."""
    (total,) = func.outputs
    shared = slot_axes(func, total)
    owners: dict[tuple[Any, ...], tuple[int, ...]] = {}
    for program in product(*(range(a.tiles) for a in func.axes)):
        slot = tuple(program[n] for n in shared)
        numbers = dict(zip(func.body.args, program, strict=True))
        for op in func.walk():
            if isinstance(op, Atomic):
                for at in touched(op, numbers, total.ref.shape):
                    assert owners.setdefault((*slot, *at), program) == program, f"{shared}\n{func}"


def test_programs_next_to_each_other_need_no_slots() -> None:
    func = parse("""
func @f(%x: ref<f32[96], in>, %o: ref<f32[96, 5], sum>) {
  grid %i in i[96 by 8], %j in j[5 by 1], %r in r[3 by 1]
  %0 = load %x[8*%i +: 8!] : f32[8]
  atomic %0 to %o[8*%i +: 8!, %j!] {kind="add"}
}""")
    assert slot_axes(func, func.outputs[0]) == (2,)
    (result,) = program_of(func).results
    assert result == Result((3, 96, 5), F32, F32, zeroed=True, slots=True)


def test_programs_that_touch_each_other_have_slots_of_their_own() -> None:
    """An update of a program's own place and one of its neighbour's: each for itself would need none."""
    func = parse("""
func @f(%x: ref<f32[96], in>, %o: ref<f32[96], sum>) {
  grid %i in i[96 by 8]
  %0 = load %x[8*%i +: 8!] : f32[8]
  atomic %0 to %o[8*%i +: 8!] {kind="add"}
  atomic %0 to %o[8*%i + 8 +: 8] {kind="add"}
}""")
    assert slot_axes(func, func.outputs[0]) == (0,)


# --- results and operands -------------------------------------------------------------------------------------------

ROLES = """
func @f(%a: ref<f32[8], in>, %b: ref<i32[8], inout>, %c: ref<f32[8], out>, %d: ref<i32[8], zeros>,
        %e: ref<bf16[8], sum>, %g: ref<i8[8], sum>) {
  %0 = load %a[0 +: 8!] : f32[8]
  %1 = load %b[0 +: 8!] : i32[8]
  store %1 to %b[0 +: 8!]
  store %0 to %c[0 +: 8!]
  atomic %1 to %d[0 +: 8!] {kind="add"}
  %2 = convert(%0) : bf16[8]
  atomic %2 to %e[0 +: 8!] {kind="add"}
  %3 = convert(%0) : i8[8]
  atomic %3 to %g[0 +: 8!] {kind="add"}
}"""


def test_what_the_buffers_are() -> None:
    """A sum of narrow floats is one of float32 until its end."""
    program = program_of(parse(ROLES))
    b, c, d, e, g = program.results
    assert b == Result((8,), DTYPES["i32"], DTYPES["i32"], alias=1)
    assert c == Result((8,), F32, F32)
    assert d == Result((8,), DTYPES["i32"], DTYPES["i32"], zeroed=True)
    assert e == Result((1, 8), F32, DTYPES["bf16"], zeroed=True, slots=True)
    assert g == Result((1, 8), DTYPES["i8"], DTYPES["i8"], zeroed=True, slots=True)
    assert [a.name for a in program.arguments] == ["a_ptr", "b_before", "b_ptr", "c_ptr", "d_ptr", "e_ptr", "g_ptr"]
    assert program.operands == (0, 1) and program.constants == ()


def test_the_bytes_of_a_buffer() -> None:
    assert Result((3, 5), DTYPES["bf16"], DTYPES["bf16"]).nbytes == 30
    assert Result((), DTYPES["f64"], F32).nbytes == 8


def test_slots_beyond_int32_are_found_with_int64() -> None:
    func = parse(f"""
func @f(%x: ref<f32[8], in>, %o: ref<f32[{2**28}], sum>) {{
  grid %i in i[16 by 1]
  %0 = load %x[0 +: 8!] : f32[8]
  atomic %0 to %o[0 +: 8!] {{kind="add"}}
}}""")
    assert f"i.to(tl.int64) * {2**28}" in program_of(func).text


# --- statements -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("extent", "masked"), [(96, False), (90, True)])
def test_masks_are_where_bounds_are_not_proved(extent: int, masked: bool) -> None:
    func = parse(f"""
func @f(%x: ref<f32[{extent}], in>, %o: ref<f32[{extent}], out>) {{
  grid %i in i[{extent} by 8]
  %tile = load %x[8*%i +: 8] : f32[8]
  store %tile to %o[8*%i +: 8]
}}""")
    text = program_of(func).text
    assert ("mask=(i_lanes < 90), other=0.0)" in text) == ("tile, mask=(i_lanes < 90))" in text) == masked
    assert text.count("i_lanes = ") == 1  # the same lanes have one name
