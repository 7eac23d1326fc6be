"""The parts of `make test-full`, and how a run goes on where another one stopped."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests import full
from tests.full import ALONE, BY_FUNCTION, ROOT, Outcome, Part, main, parts
from tests.levels import NAMES


def test_each_test_file_is_in_one_part() -> None:
    named = [argument for part in parts() for argument in part.command if argument.endswith(".py")]
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted([*named, *BY_FUNCTION]) == sorted(files)
    assert set(ALONE) <= {part.name for part in parts()}


@pytest.mark.parametrize("file", BY_FUNCTION)
def test_each_test_of_a_long_file_is_a_part(file: str) -> None:
    names = [part.command[-1] for part in parts() if part.name.startswith(file)]
    tests = [name for name in vars(importlib.import_module(file[:-3].replace("/", "."))) if name.startswith("test_")]
    assert names == [f"{file}::{test}" for test in tests]


def test_each_level_of_cpus_is_a_part() -> None:
    assert [part.command[-3] for part in parts() if part.name.startswith("code for ")] == list(NAMES)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of outcomes of three parts, of which the second one fails."""
    outcomes = {"one": "pass", "two": "print('FAILED it'); raise SystemExit(1)", "three": "pass"}
    parts = [Part(name, ("-c", code)) for name, code in outcomes.items()]
    monkeypatch.setattr(full, "parts", lambda jobs, seeds: parts)
    monkeypatch.setattr(full, "STATE", tmp_path / "build" / "state.json")
    monkeypatch.setattr(full, "_commit", lambda: "abc")
    return full.STATE


def test_a_run_goes_on_where_another_one_stopped(state: Path, monkeypatch: Any, capsys: Any) -> None:
    assert main(["--only", "one|two"]) == 1
    assert "two: failed at abc" in capsys.readouterr().out
    monkeypatch.setattr(full, "_run", lambda part, commit: Outcome(commit, True, 1.0, (part.name,)))
    assert main([]) == 0
    said = capsys.readouterr().out
    assert "one ..." not in said and "two ..." in said and "three ..." in said
    assert "3 of 3 parts have passed at abc" in said


def test_what_passed_at_an_earlier_commit_counts_if_asked(state: Path, monkeypatch: Any, capsys: Any) -> None:
    main([])
    monkeypatch.setattr(full, "_commit", lambda: "def")
    assert main(["--list"]) == 1
    assert "0 of 3 parts have passed at def" in capsys.readouterr().out
    assert main(["--list", "--earlier"]) == 1
    assert "2 of 3 parts have passed at def or before" in capsys.readouterr().out


def test_random_programs_have_other_seeds_at_each_commit() -> None:
    assert full.seeds_of("a45e30f") == full.seeds_of("a45e30f+") != full.seeds_of("d9f390e")
    assert all("--seeds 17" in " ".join(part.command) for part in parts(seeds=17) if "pytest" in part.command)


def test_failures_are_named(state: Path, capsys: Any) -> None:
    main([])
    assert full.load()["two"].summary == ("FAILED it",)
    assert not full.load()["two"].passed
    assert "FAILED it" in (state.with_suffix("") / "two.txt").read_text()
