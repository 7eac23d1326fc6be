"""Tests of code for CPUs at lesser levels than this machine's, whose own level `make test` tests.

    python -m tests.levels          a sample at each level: of the tests of the CPU backends, and of random programs
    python -m tests.levels --all    all cases of these tests, and ten minutes of the fuzzer
    python -m tests.levels --only "XLA at AVX2"    one level

The random programs of the sample have fixed seeds, so that a commit that passes today passes tomorrow.

Code by LLVM is restricted by `TILEKERN_CPU`, code by XLA by `--xla_cpu_max_isa`. A level is skipped, with the
reason, if its code is that of this machine, or if this machine lacks it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tilekern.lower.llvm.runtime.machine import LEVELS, SETTING, Machine, at_level

ROOT = Path(__file__).parents[1]

LLVM_TESTS = ("emit", "gemm", "legalize", "math", "plan", "test_determinism.py", "test_memory_bounds.py")
"""Parts of `tests/lower/llvm` that `--all` runs; other parts are about the runtime and the toolchain."""

LLVM_SAMPLE = ("emit/test_lane_counts.py", "math", "plan/test_moved_tiles.py", "test_determinism.py")
"""Parts of `LLVM_TESTS` of which an ordinary run takes a sample. The others run code of each level in `make test`, too:
`tests/lower/llvm/machines.py` names the CPUs.
"""

XLA_LEVELS = {"AVX": "x86-64-v2 and AVX", "AVX2": "x86-64-v3"}
"""XLA's names of instruction sets that it may be restricted to. At `SSE4_2` it has no code that converts float16."""

NAMES = (*LEVELS, *(f"XLA at {isa}" for isa in XLA_LEVELS))
"""The levels as `--only` names them."""

_PROGRAMS = "tests/lower/test_random_programs.py"
_RANDOM = {
    "cpu:llvm": f"{_PROGRAMS}::test_llvm_code_agrees_with_the_interpreter",
    "cpu:xla": f"{_PROGRAMS}::test_the_xla_backend_agrees_with_the_interpreter",
}
"""For each target the test of its random programs."""


@dataclass(frozen=True)
class Run:
    """A run of tests at a level, or the reason for none.

    Attributes:
      level: LLVM's or XLA's name of the level.
      setting: the environment variable that restricts code to the level, and its value.
      sample: files and folders of tests, of which an ordinary run takes a sample.
      tests: those of which `--all` runs all cases.
      target: the target that the fuzzer runs.
      skipped: the reason to run nothing, "" for none.
    """

    level: str
    setting: tuple[str, str]
    sample: tuple[str, ...]
    tests: tuple[str, ...]
    target: str
    skipped: str = ""


def _llvm(parts: Sequence[str]) -> tuple[str, ...]:
    """The paths of parts of `tests/lower/llvm`."""
    return tuple(f"tests/lower/llvm/{part}" for part in parts)


def same_code(level: Machine, machine: Machine) -> bool:
    """True if a level's code differs from that of the machine by its CPU's schedule and lesser features only."""
    return replace(level, cpu=machine.cpu, features=machine.features) == machine


def runs(machine: Machine) -> Iterator[Run]:
    """One run for each level, by LLVM and by XLA, on a machine."""
    for level in LEVELS:
        run = Run(level, (SETTING, level), _llvm(LLVM_SAMPLE), _llvm(LLVM_TESTS), "cpu:llvm")
        if not at_level(level).runs_on(machine):
            yield replace(run, skipped=f"needs a CPU of {level}, this one is {machine.cpu}")
        elif same_code(at_level(level), machine):
            yield replace(run, skipped=f"its code is that of this machine, {machine.cpu}: `make test` runs it")
        else:
            yield run
    for isa, meaning in XLA_LEVELS.items():
        tests = ("tests/lower/xla",)
        run = Run(f"XLA at {isa}", ("XLA_FLAGS", f"--xla_cpu_max_isa={isa}"), tests, tests, "cpu:xla")
        if not machine.is_x86:
            yield replace(run, skipped=f"needs an x86-64, this machine is {machine.triple}")
        elif isa == "AVX2" and machine.vector_bytes == 32:
            yield replace(run, skipped=f"{meaning} is the level of this machine, {machine.cpu}: `make test` runs it")
        else:
            yield run


def main(arguments: Sequence[str]) -> int:
    """Do what the command line says; return the exit status: 1 if a test failed or the fuzzer found something."""
    parser = argparse.ArgumentParser(prog="python -m tests.levels", description="test code of lesser CPUs")
    parser.add_argument("--all", action="store_true", help="all cases, and ten minutes of the fuzzer a level")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="test processes (default: 2)")
    parser.add_argument("--only", choices=NAMES, metavar="LEVEL", help=f"one of {', '.join(NAMES)}")
    options = parser.parse_args(arguments)
    failed = list[str]()
    for run in _chosen(options.only):
        _say(f"{run.level}: {f'skipped, {run.skipped}' if run.skipped else run.setting[1]}")
        if not run.skipped and not all(_passes(run, command) for command in _commands(run, options.all, options.jobs)):
            failed.append(run.level)
    _say(f"levels with failures: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def _chosen(only: str | None) -> Iterator[Run]:
    """The runs on this machine, or the run of the level `only`."""
    from tilekern.lower.llvm.compile import toolchain  # needs llvmlite, which `tests.full` need not have

    return (run for run in runs(toolchain.host()) if only in (None, run.level))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _commands(run: Run, whole: bool, jobs: int) -> Iterator[list[str]]:
    """The tests and the fuzzer of a run, as arguments of `python -m`."""
    # One run of a sample: a process takes longer to start than to run most of the tests.
    cases = ["--sweep", "all", *run.tests] if whole else ["-m", "not slow", *run.sample, _RANDOM[run.target]]
    yield ["pytest", "-q", "-n", str(jobs), "--dist", "worksteal", *cases]
    if whole:
        yield ["tilekern", "fuzz", "--minutes", "10", "--targets", run.target, "--stop", "--out", "build/fuzz-levels"]


def _passes(run: Run, command: list[str]) -> bool:
    name, value = run.setting
    value = f"{os.environ.get(name, '')} {value}".strip() if name == "XLA_FLAGS" else value
    environment = {**os.environ, name: value, "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=environment, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
