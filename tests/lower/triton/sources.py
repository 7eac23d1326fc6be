"""Small programs in Triton, written by hand."""

from collections.abc import Sequence
from textwrap import dedent, indent
from typing import Any

import numpy as np

from tilekern.ir.types import DTYPES, dtype_name
from tilekern.lower.triton.interpret import interpret
from tilekern.lower.triton.program import Argument, Program, Result
from tilekern.source import Loc

HEADER = """\
import triton
import triton.language as tl
from triton.language.extra import libdevice

"""
LOC = Loc("user.py", 7, function="scale")


def result(shape: Sequence[int], dtype: str, final: str = "", **options: Any) -> Result:
    """A `Result`, by the short names of its dtypes."""
    return Result(tuple(shape), DTYPES[dtype], DTYPES[final or dtype], **options)


def program(
    body: str, inputs: Sequence[np.ndarray], results: Sequence[Result], *, programs: int = 1, functions: str = ""
) -> Program:
    """The program of a kernel `scale(x0, x1, …, y0, y1, …)`; every line of its text comes from line 7 of user.py."""
    arguments = [Argument(f"x{n}", x.dtype) for n, x in enumerate(inputs)]
    arguments += [Argument(f"y{n}", r.dtype) for n, r in enumerate(results)]
    entry = f"@triton.jit\ndef scale({', '.join(a.name for a in arguments)}):\n{indent(dedent(body).strip(), '    ')}\n"
    text = HEADER + dedent(functions).lstrip() + "\n" + entry
    return Program(
        "scale",
        text,
        tuple(arguments),
        tuple(range(len(inputs))),
        (),
        tuple(results),
        programs,
        num_warps=4,
        num_stages=3,
        lines=dict.fromkeys(range(1, text.count("\n") + 1), LOC),
        loc=LOC,
    )


def run(body: str, inputs: Sequence[np.ndarray], results: Sequence[Result], **options: Any) -> list[np.ndarray]:
    """The results of a program of `program` in Triton's interpreter."""
    return interpret(program(body, inputs, results, **options), inputs)


TILE = "i = tl.arange(0, 8)[:, None] * 8 + tl.arange(0, 8)[None, :]\nx = tl.load(x0 + i)\n"
"""The elements of an 8 × 8 array and their places."""


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal numbers of equal dtype, NaN for NaN."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    wrong = ~((found == expected) | ((found != found) & (expected != expected)))
    assert not wrong.any(), f"{found[wrong]} instead of {expected[wrong]}"


def apply(expression: str, *inputs: np.ndarray, dtype: str = "", functions: str = "") -> np.ndarray:
    """An expression of x, y, …: tiles of 64 elements."""
    names = "xyz"[: len(inputs)]
    loads = "".join(f"{name} = tl.load(x{n} + i)\n" for n, name in enumerate(names))
    body = f"i = tl.arange(0, 64)\n{loads}tl.store(y0 + i, {expression})"
    out = result([64], dtype or dtype_name(inputs[0].dtype))
    return run(body, inputs, [out], functions=functions)[0]
