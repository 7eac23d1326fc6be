"""The sequence of passes of each target, as names and summaries, and as what is printed of a run."""

from __future__ import annotations

import re

import pytest

from tilekern.ir.types import DTYPES
from tilekern.lower.lowering import lower
from tilekern.lower.sequence import markdown, passes_of
from tilekern.lower.support import sample
from tilekern.lower.target import TARGETS
from tilekern.passes import pipeline

EVERY = [p.__name__ for p in pipeline.IMPROVE.passes]


@pytest.mark.parametrize("name", TARGETS)
def test_every_pass_has_a_summary(name: str) -> None:
    found = passes_of(TARGETS[name])
    assert [info.name for info in found[: len(EVERY)]] == EVERY
    for info in found:
        assert re.fullmatch(r"[A-Z][^\n|]+\.", info.summary), info
    assert f"| 1 | `canonicalize` ↻ | {found[0].summary} |" in markdown(TARGETS[name])


@pytest.mark.parametrize("name", ["cpu:llvm", "cuda:sm_90", "tpu:v5e"])
def test_the_passes_that_run_are_those_of_the_sequence(name: str, monkeypatch, capsys) -> None:
    func = pipeline.run(sample("sort", DTYPES["bf16"]))
    monkeypatch.setenv("TILEKERN_DEBUG", "ir")
    assert lower(func, TARGETS[name], {}).text
    printed = re.findall(r"^--- (\w+)$", capsys.readouterr().err, re.MULTILINE)
    own = [name for name in printed if name not in EVERY]
    sequence = iter([info.name for info in passes_of(TARGETS[name])])
    assert "expand" in own and all(name in sequence for name in own)
