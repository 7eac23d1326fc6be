"""Pieces of text: literals, shapes, and lines with their places."""

from __future__ import annotations

import ast
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ir.funcs import assert_same, edges
from tilekern.errors import TilekernError
from tilekern.ir.parse import parse
from tilekern.ir.types import DTYPES, kind_of
from tilekern.lower.triton.build import build
from tilekern.lower.triton.chip import CHIPS
from tilekern.lower.triton.emit.source_text import Expr, Writer, dtype_text, is_tight, literal, shape_text
from tilekern.passes import pipeline
from tilekern.source import UNKNOWN, Loc
from tilekern.testing.programs.batches import sample


@pytest.mark.parametrize("name", DTYPES)
def test_literals_are_the_same_numbers(name: str) -> None:
    dtype = DTYPES[name]
    for number in edges(dtype, 32):
        found = eval(literal(np.asarray(number)), {"float": float})
        wide = np.asarray(found, np.float64 if kind_of(dtype) == "float" else object)
        assert_same(wide.astype(dtype), np.asarray(number))


def test_dtypes_have_the_prefix_of_the_language() -> None:
    assert dtype_text(DTYPES["bf16"]) == "tl.bfloat16"


@given(shape=st.lists(st.integers(1, 1024), max_size=4).map(tuple))
def test_shapes(shape: tuple[int, ...]) -> None:
    assert eval(shape_text(shape)) == shape


@pytest.mark.parametrize("text", ["x", "x.y", "f(x)", "x[:, None]", "tl.load(x)", "f(x)[0]", "x.to(tl.int32)"])
def test_tight_texts_need_no_parentheses(text: str) -> None:
    assert is_tight(text)
    tree = ast.parse(f"-{text} * 2").body[0]
    assert isinstance(tree, ast.Expr) and isinstance(tree.value, ast.BinOp)


@pytest.mark.parametrize("text", ["a + b", "-a", "a if b else c", "f(x) + g(y)", "not x", "f(a) * (b)"])
def test_other_texts_need_them(text: str) -> None:
    assert not is_tight(text)
    assert Expr(text, (), tight=False).operand == f"({text})" and Expr("x", ()).operand == "x"


def test_lines_know_where_they_come_from() -> None:
    first, second = Loc("/home/user/kernels.py", 3), Loc("/home/user/kernels.py", 4)
    writer = Writer()
    writer.line("a = 1")
    writer.line("b = 2", first)
    writer.line("c = 3")
    writer.line("d = 4", first)
    writer.line("for i in range(3):", second)
    with writer.indented():
        writer.line("e = 5", second)
        writer.line("f = 6", first)
    writer.line("g = 7", first)
    assert writer.lines == [
        "    a = 1",
        "    # kernels.py:3",
        "    b = 2",
        "    c = 3",
        "    d = 4",
        "    # kernels.py:4",
        "    for i in range(3):",
        "        e = 5",
        "        # kernels.py:3",
        "        f = 6",
        "    # kernels.py:3",
        "    g = 7",
    ]
    assert writer.places == {
        1: UNKNOWN, **dict.fromkeys((2, 3, 4, 5), first), **dict.fromkeys((6, 7, 8), second),
        **dict.fromkeys((9, 10, 11, 12), first),
    }  # fmt: skip


def test_an_empty_block_passes() -> None:
    writer = Writer()
    writer.line("if x:")
    with writer.indented():
        pass
    writer.line("else:")
    with writer.indented():
        writer.line("# nothing here")
    writer.prune()
    assert writer.lines == ["    if x:", "        pass", "    else:", "        pass"]


def test_pruning_drops_what_nobody_reads() -> None:
    """Unread names go, then names that only those read, and comments without a line; other lines keep their places."""
    writer, place = Writer(), Loc("kernel.py", 7)
    writer.line("a = 1", place)
    writer.line("b = a + 1", Loc("kernel.py", 8))
    writer.line("for i in range(3):", place)
    with writer.indented():
        writer.line("c = i")
    writer.line("store(x)", place)
    writer.prune()
    expected = ["    # kernel.py:7", "    for i in range(3):", "        pass", "    # kernel.py:7", "    store(x)"]
    assert writer.lines == expected
    assert writer.places[5] == place


# An index vector that is computed where a digit of it is the place.
IN_DIGITS = """
func @f(%x: ref<f32[16], in>, %out: ref<f32[8], out>) {
  %0 = iota() {dim=0} : i32[8]
  %1 = constant 1 : i32[8]
  %2 = add(%0, %1) : i32[8]
  %3 = load %x[gather((%2 % 5), 8)] : f32[8]
  store %3 to %out[0 +: 8]
}
"""


def test_what_programs_call_tight_binds_stronger_than_any_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = set[str](), Expr.__init__

    def noting(self: Expr, *arguments: Any, **keywords: Any) -> None:
        make(self, *arguments, **keywords)
        if self.tight and self.number is None:
            made.add(self.text)

    monkeypatch.setattr(Expr, "__init__", noting)
    for seed in range(40):
        with suppress(TilekernError):
            build(pipeline.run(sample(seed)[0].func), CHIPS["cuda:sm_90"], {})
    build(pipeline.run(parse(IN_DIGITS)), CHIPS["cuda:sm_90"], {})
    loose = [
        text for text in made if not isinstance(ast.parse(f"({text.strip()}\n.x)", mode="eval").body, ast.Attribute)
    ]
    assert len(made) > 500 and not loose, loose
