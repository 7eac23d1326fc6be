"""Launches of the benchmark's items on a pretended GPU: the judgement, the command, and one run of it all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import __main__ as command
from bench.gpu import launch, plan, supervise
from bench.gpu.item import Item, Options
from bench.gpu.pretended import build
from bench.gpu.pretended.build import MissingError
from bench.gpu.pretended.install import check_requirements

TARGET = "cuda:sm_90"
RIGHT = {"call": "launch", "status": 0, "described": True, "function": "f"}
REFUSED = {"call": "map", "status": 1, "reason": "a stride is no multiple of 16 below 2^40"}


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(tmp_path, seed=5, seconds=1000.0, launch=TARGET)


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        ([RIGHT, RIGHT | {"function": "loop_fusion"}], ""),
        ([RIGHT, REFUSED], f"the driver refused {json.dumps(REFUSED)}"),
        ([RIGHT | {"status": 1}], f"the driver refused {json.dumps(RIGHT | {'status': 1})}"),
        ([RIGHT | {"function": "g"}], "not launched: f"),
        ([RIGHT | {"described": False}], "not launched: f"),
        ([], "not launched: f"),
    ],
)
def test_the_judgement_of_an_item(calls: list[Any], text: str) -> None:
    found = launch.judged({"f"}, calls)
    assert (found["ok"], found["text"]) == (not text, text)
    assert found["launches"] == len([c for c in calls if c["call"] == "launch" and c["described"]])


def test_calls_are_read_once(tmp_path: Path) -> None:
    path = tmp_path / "driver.jsonl"
    path.write_text('{"call": "of an earlier process"}\n')
    calls = launch._Calls(path)
    for number in range(2):
        with path.open("a") as file:
            file.write(f'{{"call": {number}}}\n')
        assert list(calls.new()) == [{"call": number}]
    assert list(launch._Calls(tmp_path / "none").new()) == []


class Raising(Item):
    name = "raising"

    def lowerings(self, target: Any, seed: int) -> Any:
        yield from ()

    def launch(self, seed: int) -> None:
        raise RuntimeError("no such buffer")


def test_an_exception_is_a_failure(options: Options) -> None:
    record = launch.launched(Raising(), options, launch._Calls(options.out / launch.RECORD))
    assert record == {"ok": False, "text": "RuntimeError: no such buffer"}


def test_every_item_can_be_launched(options: Options) -> None:
    for item in plan.items(options):
        assert type(item).launch is not Item.launch, item.name


@pytest.mark.parametrize(
    ("records", "status", "said"),
    [
        ({"dispatch": {"ok": True, "launches": 3}}, 0, "1 items, 3 launches for cuda:sm_90, 0 failures, 0 left out"),
        ({"dispatch": {"ok": False, "text": "bad"}}, 1, "FAIL dispatch: bad"),
        ({"dispatch": None}, 1, "FAIL dispatch: no result"),
        ({}, 1, "1 left out"),
    ],
)
def test_the_end_of_a_run(
    options: Options,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    records: Any,
    status: int,
    said: str,
) -> None:
    monkeypatch.setattr(launch, "check_requirements", lambda: None)
    monkeypatch.setattr(supervise, "supervise", lambda options: {"items": records})
    chosen = Options(options.out, 5, 1000.0, only="^dispatch$", launch=TARGET)
    assert launch.run(chosen) == status
    assert said in capsys.readouterr().out


def test_what_is_missing_is_named(
    options: Options, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(MissingError, match="a C compiler"):
        build.compiler()
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    with pytest.raises(MissingError, match="triton"):
        build.headers()
    assert launch.run(options) == 1
    assert capsys.readouterr().out.startswith("a pretended GPU needs ")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Options] = []
    monkeypatch.setattr(command.dry, "run", lambda options, target: 0)
    monkeypatch.setattr(command.launch, "run", lambda options: seen.append(options) or 7)
    assert command.main(["--out", str(tmp_path), "--dry", "cuda:sm_80", "--launch", "--seed", "5"]) == 7
    assert seen == [Options(tmp_path, 5, command.LAUNCH_SECONDS, launch="cuda:sm_80")]
    assert "--launch" in supervise._command(seen[0], 10.0) and "cuda:sm_80" in supervise._command(seen[0], 10.0)
    with pytest.raises(SystemExit):
        command.main(["--out", str(tmp_path), "--launch"])
    assert "--launch is an option of --dry" in capsys.readouterr().err


@pytest.mark.slow
def test_items_are_launched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel's numerics, a batch of random programs, and a comparison: all processes, as on a GPU."""
    try:
        check_requirements()
    except MissingError as missing:
        pytest.skip(f"needs {missing}")
    only = "^numerics softmax square_small|^programs 0|^rms_norm "
    assert command.main(["--out", str(tmp_path), "--dry", "--launch", "--only", only, "--seed", "5"]) == 0
    assert "3 items" in capsys.readouterr().out
