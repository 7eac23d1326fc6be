"""Loops as an axis of the grid: which chains of loops can be one, and the table of the steps that run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilekern.ir.core import Func, cdiv
from tilekern.ir.parse import parse
from tilekern.lower.mosaic.chip import CHIPS
from tilekern.lower.mosaic.plan.grid_loops import (
    GridLoop,
    find_grid_loop,
    with_step_table,
)
from tilekern.lower.mosaic.plan.scalars import Scalars

pytestmark = pytest.mark.sweep(1)  # all cases: none compiles a program

TABLE_BYTES = CHIPS["tpu:v5e"].table_bytes


def chain(*bounds: str, before: str = "", between: str = "", after: str = "", reverse: str = "") -> Func:
    """Loops over the tiles of 4 of an axis of 21, each from one bound to the next, that carry a number."""
    names = ["start", *(f"r{n}" for n in range(len(bounds) - 1))]

    def fold(n: int) -> str:
        low, high = bounds[n : n + 2][::-1] if reverse else bounds[n : n + 2]
        return f"""
          %{names[n + 1]} = fold %k{n} in k[21 by 4] from {low} to {high} {reverse} with %c{n} = %{names[n]} do {{
            %d{n} = add(%c{n}, %k{n}) : i32[]
            yield %d{n}
          }} : i32[]
        """

    return parse(f"""
        func @f(%x: ref<f32[32, 128], in>, %t: ref<i32[4], in>, %o: ref<i32[40, 8], out>, %p: ref<f32[32, 128], out>) {{
          grid %i in i[40 by 1], %j in j[8 by 1]
          %start = constant 7 : i32[]
          %n0 = constant 0 : i32[]
          %n5 = constant 5 : i32[]
          %n9 = constant 9 : i32[]
          %n21 = constant 21 : i32[]
          %low = min(%i, %n9) : i32[]
          %high = max(%i, %n9) : i32[]
          %lower = min(%low, %j) : i32[]
          {before}
          {between.join(fold(n) for n in range(len(bounds) - 1))}
          {after}
          store %{names[-1]} to %o[%i!, %j!]
        }}
    """)


def shown(serial: GridLoop | None) -> tuple[int, int] | None:
    return serial and (len(serial.chain), serial.steps)


@pytest.mark.parametrize(
    ("bounds", "loops"),
    [
        (("%n0", "%n21"), 1),
        (("%i", "%j"), 1),
        (("%n0", "%i", "%n21"), 2),
        (("%n0", "%low", "%n9", "%n21"), 3),
        (("%n0", "%lower", "%high", "%n21"), 3),
        # The third loop goes back to 9, where the first one ran already if i > 9.
        (("%n0", "%i", "%n9", "%n21"), None),
        (("%n9", "%n5", "%n0", "%n21"), None),
    ],
)
def test_which_chains_are_an_axis(bounds: tuple[str, ...], loops: int | None) -> None:
    assert shown(find_grid_loop(chain(*bounds))) == (loops and (loops, 6))
    # Descending loops come in the opposite order.
    assert shown(find_grid_loop(chain(*bounds[::-1], reverse="reverse"))) == (loops and (loops, 6))


STORE = "%v = load %x[0 +: 8!, 0 +: 128!] : f32[8, 128]\n store %v to %p[0 +: 8!, 0 +: 128!]"
BACK = "%v = load %p[0 +: 8!, 0 +: 128!] : f32[8, 128]"
HIDDEN = f"switch(%i) do {{ {STORE} }} do {{ }}"
USED = "%v = add(%r0, %i) : i32[]"
FREE = "%w = add(%j, %i) : i32[]"
LOOP = """fold %m in m[8 by 4] from %n0 to %n5 do {
    %v = load %x[4*%m +: 4!, 0 +: 128!] : f32[4, 128]
    store %v to %p[4*%m +: 4!, 0 +: 128!]
}"""


@pytest.mark.parametrize(
    ("texts", "fits"),
    [
        ({"before": FREE, "after": STORE}, True),
        ({"between": FREE}, True),
        ({"between": USED}, False),  # what follows the first loop depends on it
        ({"between": "", "after": USED}, False),  # it would read the last loop's carry
        ({"between": STORE}, False),
        ({"before": STORE}, False),  # every step would see what a later one stored
        ({"before": BACK}, False),
        ({"before": HIDDEN}, False),
        ({"after": HIDDEN}, True),
        ({"before": LOOP}, False),  # over another axis
    ],
)
def test_what_may_stand_around_a_chain(texts: dict[str, str], fits: bool) -> None:
    bounds = ("%n0", "%low", "%n9") if "between" in texts else ("%n0", "%n9")
    assert (find_grid_loop(chain(*bounds, **texts)) is not None) == fits


def test_loops_without_carries_that_follow_each_other_are_no_chain_if_they_differ() -> None:
    func = parse("""
        func @f(%o: ref<i32[6], out>) {
          %0 = constant 0 : i32[]
          %1 = constant 21 : i32[]
          fold %k in k[21 by 4] from %0 to %1 do { store %k to %o[%k!] }
          fold %m in m[21 by 3] from %0 to %1 do { store %m to %o[%m] }
        }
    """)
    assert find_grid_loop(func) is None
    assert (
        find_grid_loop(parse("func @f(%o: ref<i32[6], out>) { %0 = constant 0 : i32[] store %0 to %o[%0!] }")) is None
    )


# --- the table -------------------------------------------------------------------------------------------------------


@given(data=st.data())
def test_the_table_has_the_tiles_that_run(data: st.DataObject) -> None:
    """Against the definition of a fold, program by program."""
    extent, block = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 5))
    grid = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    start, stop = (data.draw(st.tuples(*[st.integers(-3, 6)] * 3)) for _ in range(2))
    reverse = data.draw(st.booleans())

    def bound(name: str, numbers: tuple[int, int, int]) -> str:
        a, b, c = numbers
        return f"""
          %{name}a = constant {a} : i32[]
          %{name}b = constant {b} : i32[]
          %{name}c = constant {c} : i32[]
          %{name}d = mul(%i, %{name}a) : i32[]
          %{name}e = mul(%j, %{name}b) : i32[]
          %{name}f = add(%{name}d, %{name}e) : i32[]
          %{name} = add(%{name}f, %{name}c) : i32[]
        """

    func = parse(f"""
        func @f(%o: ref<i32[4, 3, 99], out>) {{
          grid %i in i[{grid[0]} by 1], %j in j[{grid[1]} by 1]
          {bound("start", start)}
          {bound("stop", stop)}
          fold %k in k[{extent} by {block}] from %start to %stop {"reverse" if reverse else ""} do {{
            store %k to %o[%i!, %j!, %k]
          }}
        }}
    """)
    serial = find_grid_loop(func)
    assert serial is not None
    paired = with_step_table(func, serial, Scalars(func, TABLE_BYTES))
    assert paired is not None and paired.table is not None and paired.table_axes == (0, 1)
    columns = [tuple(int(n) for n in column) for column in paired.table.T]
    assert paired.steps == len(columns)
    wanted: list[tuple[int, int, int, int]] = []
    for i in range(grid[0]):
        for j in range(grid[1]):
            first, last = (min(max(a * i + b * j + c, 0), extent) for a, b, c in (start, stop))
            run = list(range(first // block, cdiv(last, block)))
            steps = [(t, 4) for t in (run[::-1] if reverse else run)] or [(0, 0)]
            steps[0] = steps[0][0], steps[0][1] | 1
            steps[-1] = steps[-1][0], steps[-1][1] | 2
            wanted += [(t, flags, i, j) for t, flags in steps]
    assert columns == wanted


def pairs(func: Func) -> GridLoop | None:
    serial = find_grid_loop(func)
    assert serial is not None
    return with_step_table(func, serial, Scalars(func, TABLE_BYTES))


def test_when_there_is_no_table() -> None:
    assert pairs(chain("%n0", "%n21")) is None  # the same tiles in every program
    assert pairs(chain("%n0", "%b", before="%b = load %t[%i] : i32[]")) is None  # known only when the program runs
    many = chain("%n0", "%i")
    assert pairs(many) is not None
    text = str(many)
    assert pairs(parse(text.replace("i[40 by 1]", "i[0 by 1]"))) is None  # no step at all
    assert pairs(parse(text.replace("i[40 by 1]", "i[40000 by 1]"))) is None  # too many of them
    assert pairs(parse(text.replace("%p: ref<f32[32, 128], out>", "%p: ref<f32[32, 128], zeros>"))) is None


# --- saved values ------------------------------------------------------------------------------------------


def test_expensive_values_are_saved() -> None:
    func = chain(
        "%n0",
        "%n21",
        before="""
          %x1 = load %x[0 +: 32!, 0 +: 128!] : f32[32, 128]
          %slow = dot(%x1, %x1) {contract=[[0], [0]], batch=[[], []], precision="ieee"} : f32[128, 128]
          %later = add(%slow, %slow) : f32[128, 128]
          %part = slice(%later) {start=[0, 0], stop=[32, 128], stride=[1, 1]} : f32[32, 128]
        """,
        after="store %part to %p[0 +: 32!, 0 +: 128!]",
    )
    serial = find_grid_loop(func)
    assert serial is not None and [v.name for v in serial.saved] == ["part"]
