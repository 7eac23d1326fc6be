"""Grid decode: the emitted lines, run as Python."""

from __future__ import annotations

from itertools import product
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilekern.ir.core import Axis
from tilekern.lower.triton.emit.names import Names
from tilekern.lower.triton.emit.program_order import decode_program_id


@st.composite
def grids(draw: Any) -> tuple[Axis, ...]:
    counts = draw(st.lists(st.integers(1, 6), max_size=4))
    blocks, descending = st.integers(1, 3), st.booleans()
    groups = st.sampled_from([0, 0, 1, 2, 3, 4, 9])
    return tuple(
        Axis(f"a{n}", count * (block := draw(blocks)), block, draw(descending), draw(groups))
        for n, count in enumerate(counts)
    )


def lines_of(axes: tuple[Axis, ...]) -> list[str]:
    names = Names()
    wishes = tuple(names.fresh(axis.name) if axis.tiles > 1 else "" for axis in axes)
    return list(decode_program_id(axes, wishes, names.fresh))


def tiles(axes: tuple[Axis, ...]) -> list[tuple[int, ...]]:
    """The indices of each program, in the order in which they start."""
    code = compile("\n".join(lines_of(axes)), "program", "exec")
    found: list[tuple[int, ...]] = []
    for program in range(prod(axis.tiles for axis in axes)):
        tl = SimpleNamespace(program_id=lambda axis, number=program: number + 0 * axis, minimum=min)
        variables: dict[str, Any] = {"tl": tl}
        exec(code, variables)
        found.append(tuple(variables[a.name] if a.tiles > 1 else 0 for a in axes))
    return found


@given(axes=grids())
def test_every_combination_of_tiles_once(axes: tuple[Axis, ...]) -> None:
    assert sorted(tiles(axes)) == list(product(*(range(a.tiles) for a in axes)))


@given(axes=grids())
def test_the_last_axis_is_fastest_and_descending_ones_start_at_the_end(axes: tuple[Axis, ...]) -> None:
    axes = tuple(Axis(a.name, a.extent, a.block, a.descending) for a in axes)
    ways = [range(a.tiles)[:: -1 if a.descending else 1] for a in axes]
    assert tiles(axes) == list(product(*ways))


@given(
    rows=st.integers(1, 9), columns=st.integers(1, 6), group=st.integers(1, 5), down=st.booleans(), back=st.booleans()
)
def test_a_group_runs_through_all_tiles_of_the_next_axis(
    rows: int, columns: int, group: int, down: bool, back: bool
) -> None:
    """Groups follow each other; within a group, all rows run before the next column."""
    found = tiles((Axis("i", rows, 1, down, group), Axis("j", columns, 1, back)))
    row, column = range(rows)[:: -1 if down else 1], range(columns)[:: -1 if back else 1]
    if rows == 1 or columns == 1:
        assert found == list(product(row, column))
        return
    parts = [row[start : start + group] for start in range(0, rows, group)]
    assert found == [(i, j) for part in parts for j in column for i in part]


def test_lines_for_people() -> None:
    assert lines_of(()) == lines_of((Axis("i", 1),)) == []
    assert lines_of((Axis("i", 4),)) == ["program = tl.program_id(0)", "i = program"]
    assert lines_of((Axis("b", 2), Axis("i", 7, 2, descending=True))) == [
        "program = tl.program_id(0)",
        "i = 3 - program % 4",
        "b = program // 4",
    ]
    assert lines_of((Axis("b", 2), Axis("n", 3), Axis("i", 4))) == [
        "program = tl.program_id(0)",
        "i = program % 4",
        "program = program // 4",
        "n = program % 3",
        "b = program // 3",
    ]


@pytest.mark.parametrize("group", [2, 3])
def test_a_grid_of_many_programs_stays_within_int32(group: int) -> None:
    """No intermediate number exceeds the number of programs."""
    axes = (Axis("i", 2**15), Axis("j", 2**14, 1, group=group), Axis("k", 4))
    names: dict[str, Any] = {}
    tl = SimpleNamespace(program_id=lambda _: prod(a.tiles for a in axes) - 1, minimum=min)
    for line in lines_of(axes):
        exec(line, {"tl": tl}, names)
        assert all(0 <= n < 2**31 for n in names.values()), line
