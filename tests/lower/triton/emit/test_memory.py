"""Buffers of a call, and the statements that access them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import tilekern as tk
from tests.lower.triton.running import assert_kernel, program_of
from tilekern.ir.parse import parse
from tilekern.ir.types import DTYPES, F32
from tilekern.lower.triton.program import Result

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
    """A sum of narrow floats is a float32 until the end."""
    program = program_of(parse(ROLES))
    b, c, d, e, g = program.results
    assert b == Result((8,), DTYPES["i32"], DTYPES["i32"], alias=1)
    assert c == Result((8,), F32, F32)
    assert d == Result((8,), DTYPES["i32"], DTYPES["i32"], zeroed=True)
    assert e == Result((1, 8), F32, DTYPES["bf16"], partial_sums=True)
    assert g == Result((1, 8), DTYPES["i8"], DTYPES["i8"], partial_sums=True)
    assert [a.name for a in program.arguments] == ["a_ptr", "b_before", "b_ptr", "c_ptr", "d_ptr", "e_ptr", "g_ptr"]
    assert program.operands == (0, 1) and program.constants == ()


def test_the_bytes_of_a_buffer() -> None:
    assert Result((3, 5), DTYPES["bf16"], DTYPES["bf16"]).nbytes == 30
    assert Result((), DTYPES["f64"], F32).nbytes == 8


def test_partial_sums_beyond_int32_are_found_with_int64() -> None:
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


def test_index_vectors_that_an_index_computes_are_operands() -> None:
    """The text of `i.indices + 1` stood without parentheses before `% 13`: programs on GPUs read beyond the array."""
    numbers = jnp.arange(13, dtype=jnp.int32)

    @tk.kernel(out_type=lambda x: (jax.ShapeDtypeStruct((13,), jnp.int32),) * 3)
    def f(x, remainders, quotients, backwards):
        i = tk.parallel(13, 8)
        remainders[i] = x[(i.indices + 1) % 13]
        quotients[i] = x[(i.indices + 1) // 2]
        backwards[i] = x[12 - (i.indices + 5) % 13]

    assert_kernel(f, numbers)
