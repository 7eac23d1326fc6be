"""The rates of this machine: measured once, then read from a file."""

from dataclasses import replace
from pathlib import Path

import pytest

from tilekern.errors import TargetError
from tilekern.estimate.cpu import rates as module
from tilekern.estimate.cpu.peak import THREADS
from tilekern.estimate.cpu.rates import Rates, measure, rates
from tilekern.lower.llvm.compile import toolchain
from tilekern.lower.llvm.runtime.machine import Machine

pytest.importorskip("llvmlite", reason="needs llvmlite")
MEASURED = Rates(4e11, 8e11, 3e11, 2e11, 1e11, THREADS, "2026-11-26")


@pytest.fixture
def machine() -> Machine:
    try:
        return toolchain.host()
    except TargetError:
        pytest.skip("needs a CPU with AVX2 or NEON")


@pytest.fixture
def measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Machine]:
    """The measurements that are made, with a cache folder of its own."""
    made: list[Machine] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "measure", lambda machine: made.append(machine) or MEASURED)
    rates.cache_clear()
    yield made
    rates.cache_clear()


def test_a_machine_is_measured_once(machine: Machine, measurements: list[Machine]) -> None:
    assert rates(machine) == MEASURED
    rates.cache_clear()
    assert rates(machine) == MEASURED and len(measurements) == 1
    rates(replace(machine, cpu="another"))
    assert len(measurements) == 2


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"float32": -1}'])
def test_a_damaged_file_is_measured_again(content: str, machine: Machine, measurements: list[Machine]) -> None:
    rates(machine)
    (file,) = Path(module.folder() or "").glob("cpu-rates-*.json")
    file.write_text(content)
    rates.cache_clear()
    assert rates(machine) == MEASURED and len(measurements) == 2


def test_a_folder_that_cannot_be_written_is_no_error(
    machine: Machine, measurements: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/self/nowhere")
    assert rates(machine) == MEASURED


@pytest.mark.slow
def test_a_farther_level_is_never_faster(machine: Machine) -> None:
    measured = measure(machine)
    assert 0 < measured.memory <= measured.l3 <= measured.l2 and measured.float32 > 1e9
