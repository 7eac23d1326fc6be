"""The page of errors: every class has an example, which raises it."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from docs.error_examples import EXAMPLES, FILE, run
from tilekern import errors
from tilekern.errors import InterpreterError, TilekernError

BASES = {TilekernError, InterpreterError}
NEEDS = {"CompileError": "triton", "PlanError": "llvmlite"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_raises_its_error(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"needs {NEEDS[name]}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    error = run(name)
    assert type(error) is getattr(errors, name), error
    if isinstance(error, TilekernError):
        assert error.loc.file in (FILE, "<tile text>"), error


def test_every_error_has_an_example() -> None:
    kinds = {kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, TilekernError)}
    assert {kind.__name__ for kind in kinds - BASES} == EXAMPLES.keys() - {"FallbackWarning"}
