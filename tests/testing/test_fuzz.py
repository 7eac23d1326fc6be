"""The fuzzer: it finds a wrong backend, makes the program small, saves it, and outlives a dead process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tilekern.errors import LoadError
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.parse import parse
from tilekern.testing.fuzz import derivatives, findings, load, replay, run, worker
from tilekern.testing.fuzz.modes import Mode, differentiated, judged, modes
from tilekern.testing.fuzz.wild import Wild
from tilekern.testing.programs import Program, assert_agrees
from tilekern.testing.programs.batches import sample

FOUND = sorted(Path(__file__).parent.joinpath("found").glob(f"*{findings.SUFFIX}"))


def negates(program: Program) -> bool:
    return any(isinstance(op, Elementwise) and op.function == "neg" for op in program.func.walk())


def test_a_wrong_backend_is_found_and_its_program_made_small(monkeypatch: Any, tmp_path: Path) -> None:
    sizes: list[int] = []

    def wrong(programs: Sequence[Program]) -> list[tuple[np.ndarray, ...]]:
        """Zeros where a program negates, which most outputs are not."""
        sizes.extend(len(list(p.func.walk())) for p in programs if negates(p))
        return [tuple(map(np.zeros_like, p.expected)) if negates(p) else p.expected for p in programs]

    monkeypatch.setattr(worker, "_mode", lambda name: Mode("orders", wrong, batch=20))
    state = worker.State(seed=1)
    while not state.findings:
        first = state.done.get("orders", 0)
        worker.run_some(state, tmp_path, "orders", first, 20)
        state.done["orders"] = first + 20
    found = load(Path(state.findings[0]))
    assert found.problem.startswith("AssertionError: ")
    assert negates(found.program)
    assert len(list(found.program.func.walk())) <= max(sizes) / 2
    with pytest.raises(AssertionError):
        assert_agrees(found.program, wrong([found.program])[0])


def test_a_finding_is_read_as_it_was_written(tmp_path: Path) -> None:
    program, _ = sample(5)
    path = findings.Finding("cpu:xla", "it was wrong", program).save(tmp_path)
    again = load(path)
    assert (again.mode, again.problem, again.program.seed) == ("cpu:xla", "it was wrong", program.seed)
    assert str(again.program.func) == str(program.func)
    assert again.program.tolerances == program.tolerances
    replay(path)


@pytest.mark.parametrize(
    "text", ["", "func @f() {\n}\n", "# mode: cpu:xla\n# seed: x\n# tolerances: 0\nfunc @f() {\n}\n"]
)
def test_another_file_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.program"
    path.write_text(text)
    with pytest.raises(LoadError, match="is no program of the fuzzer"):
        load(path)


def test_a_mode_that_is_gone_is_an_error(tmp_path: Path) -> None:
    program, _ = sample(5)
    path = findings.Finding("cpu:gcc", "", program).save(tmp_path)
    with pytest.raises(LoadError, match="no such mode"):
        replay(path)


def test_a_process_that_dies_is_blamed_on_its_program(monkeypatch: Any, tmp_path: Path) -> None:
    state = worker.State(seed=0, current=("orders", 40, 3))
    state.save(tmp_path / "state.json")

    class Done:
        def __init__(self, command: list[str], **_: Any) -> None:
            number = json.loads(command[-1])["one"][1]
            self.returncode = -6 if number == 41 else 0

    monkeypatch.setattr(run.subprocess, "run", Done)
    run._blame(tmp_path, tmp_path / "state.json", 60, stop=False)
    after = worker.State.load(tmp_path / "state.json")
    assert (after.done, after.current) == ({"orders": 43}, None)
    (found,) = after.findings
    assert load(Path(found)).problem == "the process ended with status -6"
    assert str(load(Path(found)).program.func) == str(
        sample(worker.seed_of(0, 41), **worker.options_of("orders"))[0].func
    )


@pytest.mark.parametrize("load, patience", [(0.5, 1), (8, 4)])
def test_a_process_has_more_time_where_others_want_to_run(load: float, patience: int, monkeypatch: Any) -> None:
    """Calls of 38 s of the processor took 293 s on a machine with seven processes a core, and were a finding."""
    monkeypatch.setattr(run.os, "getloadavg", lambda: (load, 0, 0))
    monkeypatch.setattr(run.os, "cpu_count", lambda: 2)
    assert run._waiting() == patience


@pytest.mark.parametrize("stop", [False, True])
def test_wrong_programs_beside_one_that_dies_are_findings(stop: bool, monkeypatch: Any, tmp_path: Path) -> None:
    """A process of its own runs each; what it finds once was forgotten."""
    worker.State(seed=0, current=("orders", 40, 3), findings=["earlier"]).save(tmp_path / "state.json")

    def run_some(state: worker.State, folder: Path, name: str, number: int, count: int) -> None:
        state.findings += [f"{name} {number}"] * (number != 40)

    class Done:
        def __init__(self, command: list[str], **_: Any) -> None:
            name, number = json.loads(command[-1])["one"]
            worker.run_one(tmp_path, name, number)
            self.returncode = 0

    monkeypatch.setattr(worker, "run_some", run_some)
    monkeypatch.setattr(run.subprocess, "run", Done)
    run._blame(tmp_path, tmp_path / "state.json", 60, stop=stop)
    assert worker.State.load(tmp_path / "state.json").findings == ["earlier", "orders 41", "orders 42"][: 3 - stop]


@pytest.mark.parametrize("mode", modes(Wild), ids=lambda mode: mode.name)
def test_every_mode_runs(mode: Mode) -> None:
    if mode.package:
        pytest.importorskip(mode.package, reason=f"needs {mode.package}")
    programs: list[Program] = [sample(seed, **mode.options)[0] for seed in (3, 4)]
    outputs = mode.run(programs)
    for program, found in zip(programs, outputs, strict=True):
        assert_agrees(program, found)


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_programs_that_the_fuzzer_found(path: Path) -> None:
    mode = findings.mode_named(load(path).mode)
    if mode.package:
        pytest.importorskip(mode.package, reason=f"needs {mode.package}")
    replay(path)


# --- what modes compare -----------------------------------------------------------------------------------------------


def test_the_interpreter_finds_the_faults_that_are_planted_in_a_program() -> None:
    programs = [sample(seed)[0] for seed in range(6)]
    for outputs, program in zip(judged(programs), programs, strict=True):
        assert_agrees(program, outputs)


LARGE = """
func @f(%x: ref<f64[64], in>, %out: ref<f64[64], out>) {
  %0 = load %x[0 +: 64] : f64[64]
  %1 = sin(%0) : f64[64]
  %2 = iota() {dim=0} : f64[64]
  %3 = constant 1e+06 : f64[64]
  %4 = mul(%2, %3) : f64[64]
  %5 = mul(%1, %4) : f64[64]
  store %5 to %out[0 +: 64]
}
"""


def test_derivatives_are_compared_in_float64() -> None:
    """In float32 the tangents of JAX would be too far off."""
    program = Program(parse(LARGE), 0, (1e-6,))
    assert len(differentiated([program])) == 1


def test_a_tangent_may_be_wrong_by_a_rounding_of_the_largest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    program, of_jax, error = Program(parse(LARGE), 0, (1e-6,)), derivatives._by_jax, 1e-5
    monkeypatch.setattr(derivatives, "_by_jax", lambda *arguments: [x + error for x in of_jax(*arguments)])
    with jax.enable_x64(True):
        derivatives.check(program)
        error = 1.0
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            derivatives.check(program)
