"""The form of errors, and their hierarchy."""

from __future__ import annotations

import inspect
import pickle

import pytest

from tests.lang.checks import marked_line
from tilekern import errors, source
from tilekern.errors import ArgumentError, IndexingError, TilekernError, TraceError, VerifyError

EVERY = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, TilekernError)]


def test_the_form_of_an_error() -> None:
    error = IndexingError("an index is wrong", expected="an integer", got="index 1 = 2.5 (float)", fix="use one")  # <-
    line = marked_line(test_the_form_of_an_error.__code__)
    assert str(error).splitlines() == [
        "an index is wrong",
        "  expected: an integer",
        "  got: index 1 = 2.5 (float)",
        "  fix: use one",
        f"  at {__file__}:{line} in test_the_form_of_an_error",
        *(f"  {shown}" for shown in error.loc.snippet().splitlines()),
    ]
    assert "IndexingError(" in error.loc.snippet()


def test_what_is_not_known_is_left_out() -> None:
    with source.at(source.Loc("/gone.py", 7)):
        assert str(ArgumentError("no", got="x = 1")) == "no\n  got: x = 1\n  at /gone.py:7"


def test_an_error_keeps_the_place_of_its_making() -> None:
    with source.at(source.Loc("a.py", 7, function="f")):
        error = TraceError("no")
    assert error.loc == source.Loc("a.py", 7, function="f")
    assert str(error) == "no\n  at a.py:7 in f"


@pytest.mark.parametrize("kind", EVERY)
def test_every_error_is_one_of_ours_and_documented(kind: type[TilekernError]) -> None:
    assert kind.__doc__
    assert isinstance(kind("summary"), TilekernError)
    assert kind("summary").summary == "summary"


def test_who_catches_what() -> None:
    """Errors of tilekern are also errors of Python's classes."""
    assert issubclass(errors.ArgumentError, TypeError) and issubclass(errors.ArgumentError, ValueError)
    assert issubclass(errors.TraceError, TypeError)
    assert issubclass(errors.TargetError, ValueError)
    assert issubclass(errors.NotDifferentiableError, NotImplementedError)
    assert issubclass(errors.IndexingError, TraceError)
    assert not issubclass(VerifyError, TraceError)


def test_every_error_says_so_in_its_name() -> None:
    assert not [kind.__name__ for kind in EVERY if not kind.__name__.endswith("Error")]


def test_an_old_name_is_the_new_class_and_warns() -> None:
    with pytest.warns(DeprecationWarning, match="OutOfBounds is now OutOfBoundsError"):
        assert errors.OutOfBounds is errors.OutOfBoundsError
    with pytest.raises(AttributeError, match="no attribute 'InBounds'"):
        _ = errors.InBounds


def test_errors_cross_processes() -> None:
    """pytest-xdist and multiprocessing pickle them."""
    error = IndexingError("an index is wrong", expected="an integer", got="x = 1", fix="use one")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.loc, again.fix) == (type(error), str(error), error.loc, error.fix)
