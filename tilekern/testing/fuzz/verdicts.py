"""Faults planted in random programs, each of which the interpreter must find."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from tilekern.errors import OrderDependenceError, TilekernError, UnwrittenError, WriteConflictError
from tilekern.ir.interpret import interpret
from tilekern.ir.parse import parse
from tilekern.ir.text import to_text
from tilekern.testing.programs import Program

_INDICES = re.compile(r"(%[\w.]+) in \w+\[")


@dataclass(frozen=True)
class Fault:
    """Accesses of one more output, an array of int32 with an element for each program.

    Attributes:
      error: the verdict.
      code: block IR that programs end with; {mine} is the program's element, {first} and {last} are other programs'.
      role: of the output.
      missing: elements of the output that no program has.
      programs: how many programs the fault needs.
    """

    error: type[TilekernError]
    code: str
    role: str = "out"
    missing: int = 0
    programs: int = 2


FAULTS = (
    Fault(WriteConflictError, "store %v to {first}"),
    Fault(OrderDependenceError, "store %v to {mine}\n%r = load {first} : i32[]"),
    Fault(OrderDependenceError, "%r = load {last} : i32[]\nstore %v to {mine}"),
    Fault(UnwrittenError, "store %v to {mine}", missing=1, programs=1),
    Fault(UnwrittenError, "%r = load {mine} : i32[]\nstore %v to {mine}", programs=1),
    Fault(OrderDependenceError, 'atomic %v to {first} {{kind="add"}}\n%r = load {first} : i32[]', "zeros", programs=1),
    Fault(
        OrderDependenceError,
        'atomic %v to {first} {{kind="add"}}\natomic %v to {first} {{kind="max"}}',
        "zeros",
        programs=1,
    ),
)


def check(program: Program) -> None:
    """Plant each fault that the program's grid allows.

    Raises:
      AssertionError: the interpreter does not find one.
    """
    grid = program.func.grid
    for fault in FAULTS:
        if math.prod(grid) < fault.programs:
            continue
        text = _planted(to_text(program.func), grid, fault)
        try:
            interpret(parse(text), *program.arrays, orders=1)
        except fault.error:
            continue
        raise AssertionError(f"the interpreter finds no {fault.error.__name__} in\n{text}")


def _planted(text: str, grid: tuple[int, ...], fault: Fault) -> str:
    """The text of the program with a fault."""
    head, body = text.split(") {\n", 1)
    indices = _INDICES.findall(body.split("\n", 1)[0]) if grid else []
    shape = ", ".join(map(str, [fault.missing + 1, *grid]))
    places = {"mine": indices, "first": ["0"] * len(grid), "last": [str(tiles - 1) for tiles in grid]}
    elements = {name: f"%fault[{', '.join(['0', *place])}]" for name, place in places.items()}
    code = ["%v = constant 0 : i32[]", *fault.code.format(**elements).splitlines()]
    lines = "".join(f"  {line}\n" for line in code).replace("%v", "%fault_v").replace("%r", "%fault_r")
    return f"{head}, %fault: ref<i32[{shape}], {fault.role}>) {{\n{body.rstrip().removesuffix('}')}{lines}}}\n"
