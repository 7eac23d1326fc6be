"""Which levels `make test-levels` runs on which machine."""

from __future__ import annotations

import pytest

pytest.importorskip("llvmlite", reason="needs llvmlite")

from tests.levels import NAMES, ROOT, _commands, runs, same_code
from tilekern.lower.llvm.runtime.machine import LEVELS, Machine, at_level, describe

ARM = describe("aarch64-unknown-linux-gnu", "neoverse-n1", {"neon": True})
ZEN3 = describe("x86_64-unknown-linux-gnu", "znver3", dict.fromkeys((*LEVELS["x86-64-v3"], "vaes"), True))


def chosen(machine: Machine) -> list[str]:
    """The levels that are run."""
    return [run.level for run in runs(machine) if not run.skipped]


def test_levels_of_this_machine_and_levels_beyond_it_are_skipped() -> None:
    assert chosen(ARM) == []
    assert chosen(ZEN3) == ["XLA at AVX"]
    assert chosen(at_level("x86-64-v4")) == ["x86-64-v3", "XLA at AVX", "XLA at AVX2"]
    assert chosen(at_level("x86-64-v4+bf16+amx"))[:3] == ["x86-64-v3", "x86-64-v4", "x86-64-v4+bf16"]


def test_a_skip_names_what_is_needed() -> None:
    reasons = {run.level: run.skipped for run in runs(ZEN3)}
    assert reasons["x86-64-v3"] == "its code is that of this machine, znver3: `make test` runs it"
    assert reasons["x86-64-v4"] == "needs a CPU of x86-64-v4, this one is znver3"
    assert "is the level of this machine" in reasons["XLA at AVX2"]
    assert {run.skipped for run in runs(ARM) if run.level.startswith("XLA")} == {
        "needs an x86-64, this machine is aarch64-unknown-linux-gnu"
    }


def test_each_level_has_a_name() -> None:
    assert tuple(run.level for run in runs(ARM)) == NAMES


def test_levels_that_differ_in_code() -> None:
    assert same_code(at_level("x86-64-v3"), ZEN3)
    assert not same_code(at_level("x86-64-v4"), at_level("x86-64-v4+bf16"))


@pytest.mark.parametrize("whole", [False, True])
def test_the_tests_that_are_run_exist(whole: bool) -> None:
    for run in runs(at_level("x86-64-v4+bf16+amx")):
        assert all((ROOT / test).exists() for test in (*run.sample, *run.tests))
        tests, *fuzzer = _commands(run, whole, 2)
        assert ("all" in tests) == whole
        if whole:
            (programs,) = fuzzer
            assert programs[programs.index("--targets") + 1] == run.target
        else:
            assert not fuzzer
            file, _, test = tests[-1].partition("::")
            assert f"def {test}(" in (ROOT / file).read_text()
