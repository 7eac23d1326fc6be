"""The rewrite of index vectors: what it adds, and what it leaves alone."""

import re

import pytest

from tilekern.ir.core import Func
from tilekern.ir.index_vectors import guard_index_vectors
from tilekern.ir.parse import parse
from tilekern.ir.text import to_text
from tilekern.ir.verify import verify

_PARAMS = "%x: ref<i32[10], in>, %s: ref<i32[2], in>, %y: ref<f32[10], in>, %o: ref<i32[6], zeros>"


def func_of(ops: str) -> Func:
    """A Func of three programs, tiles of 4, with arrays of 10 elements."""
    return parse(f"func @f({_PARAMS}) {{ grid %i in i[10 by 4]\n%one = constant 1 : i32[4]\n{ops}\n}}")


def text_of(func: Func) -> str:
    """The text with all values numbered."""
    names: dict[str, str] = {}
    return re.sub(r"%\w+(\.\d+)?", lambda name: names.setdefault(name[0], f"%{len(names)}"), to_text(func))


# Which lanes of x[4*i +: 4] are in bounds.
_INSIDE = """
    %iota = iota() {dim=0} : i32[4]
    %4 = constant 4 : i32[]
    %start = mul(%i, %4) : i32[]
    %starts = broadcast(%start) {dims=[]} : i32[4]
    %place = add(%iota, %starts) : i32[4]
    %length = constant 10 : i32[4]
    %inside = lt(%place, %length) : bool[4]"""

_CHOSEN = "%nowhere = constant -1 : i32[4] %chosen = select(%inside, %v, %nowhere) : i32[4]"

CHANGED = {
    "an index vector": (
        '%v = load %x[4*%i +: 4] : i32[4] atomic %one to %o[gather(%v, 4)] {kind="add"}',
        f'%v = load %x[4*%i +: 4] : i32[4] {_INSIDE} {_CHOSEN} atomic %one to %o[gather(%chosen, 4)] {{kind="add"}}',
    ),
    "arithmetic that an access takes in": (
        """
        %v = load %x[4*%i +: 4] : i32[4]
        %w = add(%v, %one) : i32[4]
        atomic %one to %o[gather(%w, 4)] {kind="add"}""",
        f"""
        %v = load %x[4*%i +: 4] : i32[4] {_INSIDE}
        %w = add(%v, %one) : i32[4]
        atomic %one to %o[gather(%w, 4)] mask %inside {{kind="add"}}""",
    ),
    "a view that adds to it, and a mask": (
        """
        %v = load %x[4*%i +: 4] : i32[4]
        %mask = eq(%v, %one) : bool[4]
        store %one to %o[gather(%v + 1, 4)] mask %mask""",
        f"""
        %v = load %x[4*%i +: 4] : i32[4] {_INSIDE}
        %mask = eq(%v, %one) : bool[4]
        %both = and(%mask, %inside) : bool[4]
        store %one to %o[gather(%v + 1, 4)] mask %both""",
    ),
    "a masked load": (
        """
        %mask = eq(%one, %one) : bool[4]
        %v = load %x[0 +: 4] mask %mask : i32[4]
        atomic %one to %o[gather(%v, 4)] {kind="add"}""",
        """
        %inside = eq(%one, %one) : bool[4]
        %v = load %x[0 +: 4] mask %inside : i32[4]
        %nowhere = constant -1 : i32[4] %chosen = select(%inside, %v, %nowhere) : i32[4]
        atomic %one to %o[gather(%chosen, 4)] {kind="add"}""",
    ),
    "a place that int32 arithmetic does not tell": (
        """
        %a = load %s[0] : i32[]
        %v = load %x[4*%i + 2*%a +: 4] : i32[4]
        atomic %one to %o[gather(%v, 4)] {kind="add"}""",
        """
        %a = load %s[0] : i32[]
        %v = load %x[4*%i + 2*%a +: 4] : i32[4]
        %1 = constant 1 : i32[]
        %again = load %x[4*%i + 2*%a +: 4] fill %1 : i32[4]
        %zero = constant 0 : i32[4]
        %p = ne(%v, %zero) : bool[4]
        %ones = constant 1 : i32[4]
        %q = ne(%again, %ones) : bool[4]
        %inside = or(%p, %q) : bool[4]
        %nowhere = constant -1 : i32[4] %chosen = select(%inside, %v, %nowhere) : i32[4]
        atomic %one to %o[gather(%chosen, 4)] {kind="add"}""",
    ),
    "a carry": (
        """
        %0 = constant 0 : i32[]
        %10 = constant 10 : i32[]
        %c = fold %k in k[10 by 4] from %0 to %10 with %b = %one do {
          %v = load %x[4*%k +: 4] : i32[4]
          yield %v
        } : i32[4]
        atomic %one to %o[gather(%c, 4)] {kind="add"}""",
        f"""
        %0 = constant 0 : i32[]
        %10 = constant 10 : i32[]
        %true = constant true : bool[4]
        %c.0, %c.1 = fold %k in k[10 by 4] from %0 to %10 with %b = %one, %d = %true do {{
          %v = load %x[4*%k +: 4] : i32[4] {_INSIDE.replace("%i,", "%k,")}
          yield %v, %inside
        }} : i32[4], bool[4]
        %nowhere = constant -1 : i32[4] %chosen = select(%c.1, %c.0, %nowhere) : i32[4]
        atomic %one to %o[gather(%chosen, 4)] {{kind="add"}}""",
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_comes_from_outside_is_left_out(name: str) -> None:
    before, after = map(func_of, CHANGED[name])
    found = guard_index_vectors(before)
    verify(found)
    assert text_of(found) == text_of(after)


UNCHANGED = {
    "no index vector": '%v = load %x[4*%i +: 4] : i32[4] atomic %v to %o[0 +: 4] {kind="add"}',
    "a fill": """
        %1 = constant 1 : i32[]
        %v = load %x[4*%i +: 4] fill %1 : i32[4]
        atomic %one to %o[gather(%v, 4)] {kind="add"}""",
    "a load inside of the array": """
        %v = load %x[2*%i +: 4] : i32[4]
        atomic %one to %o[gather(%v, 4)] {kind="add"}""",
    "numbers of the kernel's own": """
        %v = iota() {dim=0} : i32[4]
        %w = load %x[4*%i +: 4] : i32[4]
        atomic %w to %o[gather(%v + %i, 4)] {kind="add"}""",
    "a scalar that says where": """
        %v = iota() {dim=0} : i32[4]
        %w = load %x[%i + 8] : i32[]
        atomic %one to %o[gather(%v + %w, 4)] {kind="add"}""",
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_other_accesses_stay(name: str) -> None:
    func = func_of(UNCHANGED[name])
    assert guard_index_vectors(func) is func
