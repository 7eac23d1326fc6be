"""Places in the user's program."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

import tilekern
from tests.lang.checks import marked_line
from tilekern import source
from tilekern.kernels.flash_attention import flash_attention as flash_attention  # it registers its files
from tilekern.lower.triton.emit.names import assigned
from tilekern.source import UNKNOWN, Loc

PACKAGE = os.path.dirname(os.path.abspath(tilekern.__file__))


def test_the_current_place_is_the_caller() -> None:
    found = source.current()  # <-
    assert found.file == __file__
    assert found.line == marked_line(test_the_current_place_is_the_caller.__code__)
    assert found.function == "test_the_current_place_is_the_caller"
    assert str(found) == f"{__file__}:{found.line}"


def test_a_snippet_underlines_the_call() -> None:
    found = source.current()
    shown, carets = found.snippet().splitlines()
    assert shown == f"{found.line:>5} |     found = source.current()"
    assert carets.index("^") == shown.index("source.current()")
    assert carets.count("^") == len("source.current()")


def test_a_snippet_of_a_call_over_several_lines_ends_with_its_first_line() -> None:
    found = source.of_code(_spread.__code__, _spread())
    shown, carets = found.snippet().splitlines()
    assert shown.endswith("return _lasti(")
    assert carets.endswith("^" * len("_lasti("))
    assert len(carets) == len(shown)


def test_a_snippet_of_a_file_that_is_gone() -> None:
    assert Loc("/no/such/file.py", 3, 1, 5).snippet() == ""
    assert UNKNOWN.snippet() == ""


def test_at_says_on_whose_behalf() -> None:
    outer, inner = Loc("a.py", 1), Loc("b.py", 2)
    with source.at(outer):
        assert source.current() is outer
        with source.at(inner):
            assert source.current() is inner
        with source.at(UNKNOWN):
            assert source.current() is outer
        assert source.of_stack().file == __file__
    assert source.current().file == __file__


def test_at_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), source.at(Loc("a.py", 1)):
        raise KeyError
    assert source.current().file == __file__


@pytest.mark.parametrize(
    ("file", "internal"),
    [
        (os.path.join(PACKAGE, "lang", "refs.py"), True),
        (os.path.join(PACKAGE, "kernels", "matmul", "kernel.py"), False),
        (os.path.join(PACKAGE, "kernels", "flash_attention", "api.py"), True),
        (os.path.join(PACKAGE, "authoring", "elementwise.py"), True),
        ("<frozen importlib._bootstrap>", True),
        (contextlib.__file__, True),
        (functools.__file__, True),
        (os.__file__, False),
        (__file__, False),
        (PACKAGE + "_user.py", False),
        ("<stdin>", False),
    ],
)
def test_whose_file_it_is(file: str, internal: bool) -> None:
    assert source.is_internal(file) == internal


def test_packages_below_are_internal() -> None:
    assert source.is_internal(os.path.join(os.path.dirname(jax.__file__), "_src", "core.py"))


def _spread() -> int:
    return _lasti(
        1,
        2,
    )


def _lasti(*_: int) -> int:
    return sys._getframe(1).f_lasti


def _decorated(function):
    return function


@_decorated
@_decorated
def documented():  # the line of `def`
    """Function with decorators above its `def`."""


def test_a_function_is_where_its_def_is() -> None:
    place = source.of_function(documented.__code__)
    assert place.snippet().endswith("def documented():  # the line of `def`")
    assert place.function == "documented"

    with_lambda = _decorated(lambda x: x)  # <-
    line = marked_line(test_a_function_is_where_its_def_is.__code__)
    assert source.of_function(with_lambda.__code__).line == line


def test_a_def_behind_a_decorator_with_a_lambda() -> None:
    def decorate(_):
        return lambda function: function

    @decorate(lambda x: x)
    def inner(): ...  # <-

    found = source.of_function(inner.__code__)
    assert found.line == marked_line(test_a_def_behind_a_decorator_with_a_lambda.__code__)


def test_the_name_of_what_is_assigned() -> None:
    rows = source.current()
    plain: Loc = source.current()
    assert source.assigned_name(rows) == "rows"
    assert source.assigned_name(plain) == "plain"
    assert source.assigned_name([source.current()][0]) == ""


def test_no_other_file_than_source_is_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("password = 1\n")
    place = Loc(str(secret), 1, 0, 8)
    assert place.snippet() == "" and source.assigned_name(place) == "" and assigned(place) == ()
    with source.at(place):
        assert "password" not in str(tilekern.errors.VerifyError("no"))
    assert Loc("a\0b", 1).snippet() == ""
    assert Loc(os.__file__, 1).snippet(), "the file of a module"


def test_source_that_python_compiled_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "kernels.py"
    file.write_text("def f():\n    rows = 1\n")
    namespace: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), namespace)
    place = source.of_function(namespace["f"].__code__)
    assert place.snippet().endswith("def f():")
    assert source.assigned_name(Loc(str(file), 2)) == "rows" and assigned(Loc(str(file), 2)) == ("rows",)


def test_a_location_is_one_line() -> None:
    assert str(Loc("a\n\x1b[31mb größe.py", 3)) == r"a\n\x1b[31mb größe.py:3"


def test_equal_code_in_two_files_has_two_places() -> None:
    """Equality of Python's code objects ignores the file."""
    text = "def body(x, out):\n    out[...] = x[...] + 1\n"
    for file in ("first.py", "second.py"):
        namespace: dict[str, Any] = {}
        exec(compile(text, file, "exec"), namespace)
        kernel = tilekern.kernel(out_type=lambda x: x)(namespace["body"])
        func = kernel.trace(jax.ShapeDtypeStruct((4,), "float32")).ir
        assert {op.loc.file for op in func.walk() if op.loc.line} == {file}
