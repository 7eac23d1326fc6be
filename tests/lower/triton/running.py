"""Run Funcs through the whole backend, and check the results and the form of the emitted text."""

from __future__ import annotations

import ast
from typing import Any

import tilekern as tk
from tests.ir.funcs import assert_same
from tilekern.ir.core import Array, Func
from tilekern.ir.interpret import interpret
from tilekern.ir.parse import parse
from tilekern.lower.triton.build import build
from tilekern.lower.triton.chip import CHIPS
from tilekern.lower.triton.interpret import interpret as run
from tilekern.lower.triton.program import Program
from tilekern.passes import pipeline


def program_of(func: Func, chip: str = "cuda:sm_90", **hints: int) -> Program:
    """Build the program of a Func, and check the form of its text."""
    program = build(pipeline.run(func), CHIPS[chip], hints)
    assert_neat(program)
    return program


def assert_runs(func: Func | str, *arrays: Array, chip: str = "cuda:sm_90") -> Program:
    """Assert that the text computes the results of the Func, in any order of programs; signs of zero do not matter."""
    func = parse(func) if isinstance(func, str) else func
    program = program_of(func, chip)
    expected = interpret(func, *arrays)
    for order in ("forward", "reverse"):
        for got, wanted in zip(run(program, arrays, order=order), expected, strict=True):
            assert_same(got, wanted, zeros=False)
    return program


def assert_kernel(kernel: tk.Kernel, *arrays: Array, chip: str = "cuda:sm_90", **options: Any) -> Program:
    """Like `assert_runs`, for a kernel of the language."""
    return assert_runs(kernel.trace(*arrays, **options).ir, *arrays, chip=chip)


# --- the form of the text -------------------------------------------------------------------------------------------


def entry(program: Program) -> ast.FunctionDef:
    """The entry function of a program's text."""
    functions = [f for f in ast.parse(program.text).body if isinstance(f, ast.FunctionDef)]
    assert functions[-1].name == program.name
    return functions[-1]


def assert_neat(program: Program) -> None:
    """Assert that the text is Python without dead lines, and that its parameters agree with the launch."""
    functions = [f for f in ast.parse(program.text).body if isinstance(f, ast.FunctionDef)]
    for function in functions:
        _check_variables(function, program)
    called = {n.id for n in ast.walk(ast.parse(program.text)) if isinstance(n, ast.Name)}
    unused = [f.name for f in functions[:-1] if f.name not in called]
    assert not unused, f"nobody calls {unused} in\n{program.text}"
    assert [a.arg for a in entry(program).args.args] == [a.name for a in program.arguments]
    assert len(program.arguments) == len(program.operands) + len(program.results)
    assert ("libdevice." in program.text) == ("import libdevice" in program.text)
    last = program.text.count("\n")
    assert program.text.endswith("\n") and all(0 < line <= last for line in program.lines)


def _check_variables(function: ast.FunctionDef, program: Program) -> None:
    names = [n for n in ast.walk(function) if isinstance(n, ast.Name)]
    used = {n.id for n in names if isinstance(n.ctx, ast.Load)}
    loops = {t.id for n in ast.walk(function) if isinstance(n, ast.For) and isinstance(t := n.target, ast.Name)}
    for name in (n.id for n in names if isinstance(n.ctx, ast.Store)):
        assert name in used | loops, f"nobody reads {name} in\n{program.text}"
    for statement in ast.walk(function):
        if isinstance(statement, ast.Assign):
            assert ast.dump(statement.value) not in map(ast.dump, statement.targets), f"x = x in\n{program.text}"
        if isinstance(statement, ast.Expr):
            assert isinstance(statement.value, ast.Call), f"a statement without effect in\n{program.text}"
