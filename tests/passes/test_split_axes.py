from functools import partial

import jax
import numpy as np
import pytest

from tilekern.ir.core import Func
from tilekern.ir.parse import parse
from tilekern.ir.text import to_text
from tilekern.ir.verify import verify
from tilekern.lower.xla.emit import emit_xla
from tilekern.passes.canonicalize import canonicalize
from tilekern.passes.dce import dce
from tilekern.passes.pipeline import run
from tilekern.passes.split_axes import split_axes


def func_of(grid: str, ops: str) -> Func:
    return parse(f"func @f(%x: ref<f32[24, 24], in>, %o: ref<f32[96], out>) {{ grid {grid} {ops} }}")


# grid before, ops before, grid after, ops after
CASES = {
    "two digits": (
        "%n in n[12 by 1]",
        "%0 = load %x[(%n // 4), (%n % 4)] : f32[] store %0 to %o[%n]",
        "%a in n0[3 by 1], %b in n1[4 by 1]",
        "%0 = load %x[%a, %b] : f32[] store %0 to %o[4*%a + %b]",
    ),
    "a tile of which several share a coarser one": (
        "%i in i[96 by 8], %j in j[24 by 8]",
        "%0 = load %x[(%i // 2), 8*%j +: 8] : f32[8] store %0 to %o[8*%i +: 8]",
        "%a in i0[6 by 1], %b in i1[2 by 1], %j in j[24 by 8]",
        "%0 = load %x[%a, 8*%j +: 8] : f32[8] store %0 to %o[16*%a + 8*%b +: 8]",
    ),
    "three digits": (
        "%n in n[24 by 1]",
        "%0 = load %x[(%n // 6), (%n // 2 % 3)] : f32[] store %0 to %o[%n]",
        "%a in n0[4 by 1], %b in n1[3 by 1], %c in n2[2 by 1]",
        "%0 = load %x[%a, %b] : f32[] store %0 to %o[6*%a + 2*%b + %c]",
    ),
    "in descending order": (
        "%n in n[12 by 1 descending]",
        "%0 = load %x[(%n // 4), 0] : f32[] store %0 to %o[%n]",
        "%a in n0[3 by 1 descending], %b in n1[4 by 1 descending]",
        "%0 = load %x[%a, 0] : f32[] store %0 to %o[4*%a + %b]",
    ),
    "digits that do not fit together": (
        "%n in n[12 by 1]",
        "%0 = load %x[(%n // 2), (%n // 3)] : f32[] store %0 to %o[%n]",
        "%a in n0[6 by 1], %b in n1[2 by 1]",
        """%1 = constant 2 : i32[] %2 = mul(%a, %1) : i32[] %3 = add(%2, %b) : i32[]
        %0 = load %x[%a, (%3 // 3)] : f32[] store %0 to %o[2*%a + %b]""",
    ),
}


def number_names(func: Func) -> str:
    """The text without the names that the grid's indices happen to have."""
    text = to_text(func)
    for number, index in enumerate(func.body.args):
        text = text.replace(f"%{index.name} in", f"%g{number} in")
        text = text.replace(f"%{index.name}", f"%g{number}")
    return text


@pytest.mark.parametrize("name", CASES)
def test_axes_are_split_into_the_digits_of_accesses(name: str) -> None:
    grid, ops, grid_after, ops_after = CASES[name]
    func = dce(canonicalize(split_axes(func_of(grid, ops))))
    verify(func)
    expected = func_of(grid_after, ops_after)
    assert [a.name for a in func.axes] == [a.name for a in expected.axes] and func.axes == expected.axes
    assert number_names(func) == number_names(expected)


@pytest.mark.parametrize(
    ("grid", "position"),
    [
        ("%n in n[12 by 1]", "%n"),
        ("%n in n[12 by 1]", "(%n // 5)"),
        ("%n in n[12 by 1]", "(%n // 12)"),
        ("%n in n[23 by 2]", "(%n // 4)"),
        ("%n in n[12 by 1 group 2]", "(%n // 4)"),
    ],
)
def test_axes_that_stay(grid: str, position: str) -> None:
    func = func_of(grid, f"%0 = load %x[{position}, 0] : f32[] store %0 to %o[%n]")
    assert split_axes(func) is func


def test_without_digits_xla_needs_no_gather() -> None:
    ops = "%0 = load %x[(%n // 4), 0 +: 24] : f32[24] %1 = load %x[(%n % 4), 0 +: 24] : f32[24]"
    func = parse(f"""func @f(%x: ref<f32[24, 24], in>, %o: ref<f32[96, 24], out>) {{ grid %n in n[96 by 1] {ops}
        %2 = add(%0, %1) : f32[24] store %2 to %o[%n, 0 +: 24] }}""")
    x = np.arange(24.0 * 24, dtype=np.float32).reshape(24, 24)
    expected = np.repeat(x, 4, 0) + np.tile(x[:4], (24, 1))
    for variant, gathers in ((func, True), (run(func), False)):
        compiled = jax.jit(partial(emit_xla.run, variant))
        assert ("gather" in compiled.lower(x).as_text()) == gathers
        np.testing.assert_array_equal(compiled(x)[0], expected)
