"""The sequence of passes of each target, as names and summaries, and as what is printed of a run."""

from __future__ import annotations

import re

import pytest

from docs.sequence_tables import markdown, passes_of, table
from tilekern.ir.types import DTYPES
from tilekern.lower.lowering import lower
from tilekern.lower.target import BACKENDS, TARGETS
from tilekern.passes import pipeline
from tilekern.testing.support import sample

EVERY = [p.__name__ for p in pipeline.IMPROVE.passes]


@pytest.mark.parametrize("name", TARGETS)
def test_every_pass_has_a_summary(name: str) -> None:
    found = passes_of(TARGETS[name])
    assert [info.name for info in found[: len(EVERY)]] == EVERY
    for info in found:
        assert re.fullmatch(r"[A-Z][^\n|]+\.", info.summary), info
    assert f"| 1 | `canonicalize` ↻ | {found[0].summary} |" in table(TARGETS[name])


@pytest.mark.parametrize("name", ["cpu:llvm", "cuda:sm_90", "tpu:v5e"])
def test_the_passes_that_run_are_those_of_the_sequence(name: str, monkeypatch, capsys) -> None:
    func = pipeline.run(sample("sort", DTYPES["bf16"]))
    monkeypatch.setenv("TILEKERN_DEBUG", "ir")
    assert lower(func, TARGETS[name], {}).text
    printed = re.findall(r"^--- (\w+)$", capsys.readouterr().err, re.MULTILINE)
    own = [name for name in printed if name not in EVERY]
    sequence = iter([info.name for info in passes_of(TARGETS[name])])
    assert "expand" in own and all(name in sequence for name in own)


def test_the_documentation_has_a_table_of_each_backend() -> None:
    headings = re.findall(r"^### (\S+)$", markdown(), re.MULTILINE)
    assert headings == [backend.checked.name for backend in BACKENDS.values()]
