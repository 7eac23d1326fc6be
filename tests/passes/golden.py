"""Texts before and after a pass."""

from collections.abc import Callable

from tilekern.ir.core import Func
from tilekern.ir.parse import parse
from tilekern.ir.text import to_text
from tilekern.ir.verify import verify

_PARAMS = """
    %x: ref<f32[96], in>, %n: ref<i32[96], in>, %b: ref<bool[96], in>, %m: ref<f32[96, 20], in>,
    %fs: ref<f32[96], out>, %is: ref<i32[96], out>, %bs: ref<bool[96], out>, %ms: ref<f32[96, 20], out>
"""


def func_of(ops: str) -> Func:
    """A Func of a grid of 12 by 2 programs, tiles of 8 by 16, with arrays of 96 elements (`m`, `ms`: 96 by 20)."""
    return parse(f"func @f({_PARAMS}) {{ grid %i in i[96 by 8], %j in j[20 by 16]\n{ops}\n}}")


def assert_becomes(improve: Callable[[Func], Func], before: str, after: str) -> None:
    """Golden text of a pass; names that differ only in their number count as equal."""
    func = improve(func_of(before))
    verify(func)
    assert to_text(func) == to_text(func_of(after))
