"""The simulator finds races and deadlocks: every statement that synchronises is needed, and it misses each."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from tests.lower.triton.gluon.samples import attention, inputs, like, limited, product, program, scaled_product
from tilekern.errors import InterpreterError, WriteConflictError
from tilekern.ir.core import Func
from tilekern.lower.triton.gluon.simulator.run import simulate
from tilekern.lower.triton.program import Program

# Several groups of programs for one thread block, whose rings are shorter than its loops.
FUNCS = {
    "product": product(200, 200, 72),
    "attention": attention(330, heads=2, groups=2, causal=True),
    "of integers": scaled_product(("bfloat16", "int8"), columns=128),
    "limited": limited.trace(like(200, 200), like(200, 72), like(1, dtype=np.int32)).ir,
}
SYNCHRONISES = re.compile(r"(mbarrier\.(wait|arrive|expect)|fence_async_shared|tma\.store_wait|load_tile)\(")


def statements(func: Func) -> list[int]:
    """The numbers of the lines of a program that synchronise.

    Without those whose lack shows in some orders only: waits for a turn, and waits for tiles that this program skips,
    which another one waits for, too.
    """
    lines = made_of(func).text.splitlines()
    wanted = [n for n, line in enumerate(lines) if SYNCHRONISES.match(line.strip())]
    return [n for n in wanted if "wait(turns" not in lines[n] and "last_of_all" not in "".join(lines[n - 8 : n])]


def made_of(func: Func) -> Program:
    """The program of a Func."""
    return program(func, num_stages=2)


def repeats(lines: list[str], number: int) -> bool:
    """True for a wait that was passed before, whose only purpose is the order of the assembler's instructions."""
    return "warpgroup_mma_wait(0" in "".join(lines[number + 1 : number + 3]) and "wait" in lines[number]


def outcome(made: Program, func: Func, seeds: int = 3) -> str:
    """The error of the simulator, in words; "" if there is none."""
    for seed in range(seeds):
        try:
            simulate(made, inputs(func), seed=seed, blocks=1)
        except InterpreterError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name, func in FUNCS.items() for number in statements(func)]
)
def test_no_statement_that_synchronises_can_go(name: str, number: int) -> None:
    made = made_of(FUNCS[name])
    lines = made.text.splitlines()
    indent = re.match(r" *", lines[number])
    assert indent is not None
    without = [*lines[:number], f"{indent[0]}pass", *lines[number + 1 :]]
    found = outcome(replace(made, text="\n".join(without)), FUNCS[name])
    if repeats(lines, number):
        assert not found
    else:
        assert found, lines[number]


MUTANTS = [
    ("% 2 ^ 1)", "% 2)", "wait for one another|race|before anything"),
    ("count=2)", "count=1)", "more arrivals|race|wait for one another"),
    ("warpgroup_mma_wait(0", "warpgroup_mma_wait(1", ""),
    ("phase ^ 1)", "phase)", "wait for one another"),
]


@pytest.mark.parametrize(("old", "new", "says"), MUTANTS)
def test_wrong_phases_and_counts_are_found(old: str, new: str, says: str) -> None:
    for func in FUNCS.values():
        made = made_of(func)
        if old in made.text:
            try:
                found = outcome(replace(made, text=made.text.replace(old, new)), func)
            except (AttributeError, TypeError, ValueError) as error:  # a product is used that may not be done
                found = str(error)
            assert found and re.search(says, found), found


def test_bytes_that_nobody_announced_are_found() -> None:
    made = made_of(FUNCS["product"])
    fewer = re.sub(r"(mbarrier\.expect\(.*), (\d+)\)", lambda m: f"{m[1]}, {int(m[2]) - 64})", made.text)
    assert "than were announced" in outcome(replace(made, text=fewer), FUNCS["product"])


def test_a_fault_names_the_users_line() -> None:
    made = made_of(FUNCS["product"])
    text = re.sub(r"mbarrier\.wait\(lhs_rhs_filled.*", "pass", made.text)
    with pytest.raises(InterpreterError, match=r"race|read before") as info:
        for seed in range(5):
            simulate(replace(made, text=text), inputs(FUNCS["product"]), seed=seed)
    assert info.value.loc.file.endswith("kernel.py") and "generated source" in info.value.got


def test_a_place_is_stored_once() -> None:
    made = made_of(FUNCS["product"])
    text = made.text.replace("place = gl.program_id(0)", "place = gl.program_id(0) * 0")
    with pytest.raises(WriteConflictError, match="stored twice"):
        simulate(replace(made, text=text), inputs(FUNCS["product"]))
