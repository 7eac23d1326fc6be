"""The tables that tilekern ships: each row still fits a kernel of the library, and has its estimates."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tilekern as tk
from bench import tables
from tilekern.kernel import tuned

ROWS = [row for target in tables.TARGETS for row in tables.tuned_rows(target)]


@pytest.mark.parametrize("target", tables.TARGETS)
def test_every_row_fits_a_kernel_of_the_library(target: str) -> None:
    """Else: python -m bench.tables, which tunes what is missing, and leaves out rows that fit none."""
    assert tables.stale([target]) == []


def test_every_row_has_the_estimates_of_a_gain() -> None:
    assert ROWS
    for row in ROWS:
        assert row.by == "estimate" and row.seconds > 0 and tables.is_row(row)
        assert (row.key.device, row.key.gradient, [name for name, _ in row.key.versions]) in [
            ("", False, [package]) for package in ("triton", "libtpu")
        ]


def test_tables_are_the_results_with_a_gain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {target: tuned.shipped_file(target) for target in tables.TARGETS}
    monkeypatch.setattr(tables, "shipped_file", lambda target: tmp_path / files[target].name)
    tables.write(tables.results())
    for target, file in files.items():
        again = tmp_path / file.name
        assert file.exists() == again.exists(), target
        assert not file.exists() or file.read_text() == again.read_text()


def test_a_row_that_fits_no_kernel_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS[0]
    target = row.key.target.partition("+")[0]
    monkeypatch.setattr(tables, "shipped_file", lambda target: tmp_path / target.replace(":", "-"))
    for changed in (replace(row.key, ir="0123456789abcdef"), replace(row.key, kernel="another")):
        (tmp_path / target.replace(":", "-")).unlink(missing_ok=True)
        tk.Tuned((replace(row, key=changed),)).save(tmp_path / target.replace(":", "-"))
        (stray,) = tables.stale([target])
        assert changed.kernel in stray and "of no result" in stray
    assert tables.main(["--check", "--targets", target]) == 1


def test_results_of_kernels_that_have_changed_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line for line in tables.results() if line["target"] == "tpu:v5e"][:2]
    old = {**lines[0], "entry": {**lines[0]["entry"], "ir": "0123456789abcdef"}}
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "results.jsonl")
    tables.RESULTS.write_text("".join(json.dumps(line) + "\n" for line in (old, lines[1])))
    assert tables.outdated(["tpu:v5e"]) == [f"{old['case']} on tpu:v5e"]
    assert tables.outdated(["tpu:v6e"]) == []


def test_results_are_not_made_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems: list[str] = []

    def refused(problem: tables.Problem, budget: float) -> dict[str, Any]:
        problems.append(problem.case)
        return {"case": problem.case, "target": problem.target, "key": tuned.fields_of(problem.key), "refused": "why"}

    monkeypatch.setattr(tables, "tune", refused)
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "results.jsonl")
    monkeypatch.setattr(tables, "shipped_file", lambda target: tmp_path / target.replace(":", "-"))
    for _ in range(2):
        assert tables.main(["softmax square", "softmax gpt2_logits", "--targets", "cuda:sm_90"]) == 0
    assert problems == ["softmax square", "softmax gpt2_logits"]
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [line["refused"] for line in lines] == ["why", "why"]


def test_a_name_that_is_no_case_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        tables.main(["softmax circle"])
    assert caught.value.code == 2 and "softmax circle" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        tables.main(["--budget", "0"])
    with pytest.raises(SystemExit):
        tables.main(["--targets", "cuda:sm_1"])
