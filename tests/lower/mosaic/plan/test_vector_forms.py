"""The forms in which vectors are computed: rows and columns."""

from __future__ import annotations

from tilekern.ir.core import Func, Value
from tilekern.ir.parse import parse
from tilekern.lower.mosaic.plan.vector_forms import VectorForms


def forms_of(body: str) -> dict[str, tuple[str, ...]]:
    """The forms of the vectors of a Func that has a matrix m, a vector v and an output o."""
    func = parse(f"""
        func @f(%m: ref<f32[8, 128], in>, %x: ref<f32[8], in>, %o: ref<f32[8], out>, %p: ref<f32[8, 128], out>) {{
          %m0 = load %m[0 +: 8!, 0 +: 128!] : f32[8, 128]
          %v = load %x[0 +: 8!] : f32[8]
          {body}
        }}
    """)
    forms = VectorForms(func)
    return {v.name: forms.of(v) for v in vectors(func)}


def vectors(func: Func) -> list[Value]:
    found = [r for op in func.walk() for r in op.results]
    found += [a for op in func.walk() for region in op.regions for a in region.args]
    return [v for v in found if len(v.tile.shape) == 1]


ROWS = 'reduce(%m0) {monoid="max", dims=[1]} : f32[8]'
STORE = "store %{} to %o[0 +: 8!]"
WIDE = "%w = broadcast(%{}) {{dims=[0]}} : f32[8, 128]\n store %w to %p[0 +: 8!, 0 +: 128!]"


def test_a_stored_vector_is_a_row() -> None:
    assert forms_of(f"%a = {ROWS}\n %b = add(%a, %v) : f32[8]\n {STORE.format('b')}") == {
        "v": ("row",),
        "a": ("row",),
        "b": ("row",),
    }


def test_a_vector_that_is_broadcast_along_rows_is_a_column() -> None:
    assert forms_of(f"%a = {ROWS}\n %b = add(%a, %v) : f32[8]\n {WIDE.format('b')}") == {
        "v": ("column",),
        "a": ("column",),
        "b": ("column",),
    }


def test_a_vector_may_have_both_forms() -> None:
    found = forms_of(f"%b = add(%v, %v) : f32[8]\n {WIDE.format('b')}\n {STORE.format('b')}")
    assert found == {"v": ("column", "row"), "b": ("column", "row")}


def test_a_carry_has_one_form() -> None:
    """Also where it is stored as a row at last: it is turned there, once, and not in every iteration."""
    found = forms_of(f"""
      %0 = constant 0 : i32[]
      %8 = constant 8 : i32[]
      %r = fold %k in k[8 by 2] from %0 to %8 with %c = %v do {{
        %cw = broadcast(%c) {{dims=[0]}} : f32[8, 128]
        %d = add(%m0, %cw) : f32[8, 128]
        %e = reduce(%d) {{monoid="max", dims=[1]}} : f32[8]
        yield %e
      }} : f32[8]
      {STORE.format("r")}
    """)
    assert found == {"v": ("column",), "c": ("column",), "e": ("column",), "r": ("column",)}


def test_branches_yield_one_form() -> None:
    found = forms_of(f"""
      %0 = constant 0 : i32[]
      %a = {ROWS}
      %s = switch(%0) do {{ yield %a }} do {{ %n = neg(%v) : f32[8] yield %n }} : f32[8]
      {WIDE.format("s")}
    """)
    assert found["s"] == ("column",) and found["n"] == ("column",)


def test_loops_hand_on_one_form() -> None:
    found = forms_of(
        """
      %0 = constant 3 : i32[]
      %z = constant 0 : i32[]
      %one = constant 1 : i32[]
      %n.0, %n.1 = while(%0, %v) do (%i: i32[], %c: f32[8]) {
        %t = gt(%i, %z) : bool[]
        yield %t
      } do (%j: i32[], %d: f32[8]) {
        %h = sub(%j, %one) : i32[]
        yield %h, %d
      } : i32[], f32[8]
      {WIDE}
    """.replace("{WIDE}", WIDE.format("n.1"))
    )
    assert set(found.values()) == {("column",)}
