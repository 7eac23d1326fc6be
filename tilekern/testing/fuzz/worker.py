"""The process that runs random programs: it may die of a program, and its state says of which."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

from tilekern.errors import ArgumentError
from tilekern.testing.check import CheckError, available, check_calls
from tilekern.testing.fuzz import library, meshes
from tilekern.testing.fuzz.findings import Finding
from tilekern.testing.fuzz.modes import REFUSALS, Mode, modes
from tilekern.testing.fuzz.wild import Wild
from tilekern.testing.programs import assert_agrees
from tilekern.testing.programs.batches import Choices, problem_of, sample, simplest, smaller

MESHES = "meshes"
"""The mode that divides random kernels among devices."""
OTHERS = (MESHES, *library.MODES)
"""The modes that run no random programs of the block IR."""

# The distance between the seeds of two runs.
_SEEDS = 10**9
_CALLS = 4  # of a prebuilt kernel at once
_DIVIDED = 8  # calls on meshes at once


@dataclass
class State:
    """How far the fuzzer is.

    Attributes:
      seed: of the run.
      done: for each mode, how many programs were run.
      seconds: for each mode, how long it ran.
      refused: for each mode, how many programs it refused.
      findings: the files of the wrong programs.
      current: the mode and the numbers of the programs that run now.
    """

    seed: int
    done: dict[str, int] = field(default_factory=dict[str, int])
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    refused: dict[str, int] = field(default_factory=dict[str, int])
    findings: list[str] = field(default_factory=list[str])
    current: tuple[str, int, int] | None = None

    def save(self, path: Path) -> None:
        """Write the state, whole or not at all."""
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self), indent=1))
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> State:
        """The state of a file.

        Raises:
          ArgumentError: it is no state.
        """
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ArgumentError(
                "there is no run to resume",
                expected=f"the state of an earlier run in {path}",
                got=f"{type(error).__name__}: {error}",
                fix="leave --resume out, or name the folder of the run: --out FOLDER",
            ) from error


def names_of_modes(targets: Sequence[str] | None) -> list[str]:
    """The names of the modes of some targets whose packages are installed; None: of all targets.

    Raises:
      ArgumentError: there is no such mode.
    """
    by_name = {mode.name: mode for mode in modes(Wild)}
    chosen = [
        name for name in (*by_name, *OTHERS) if targets is None or name.split(" ")[0] in targets or name in targets
    ]
    unknown = set(targets or ()) - {n.split(" ")[0] for n in chosen} - set(chosen)
    if unknown:
        raise ArgumentError(
            "the fuzzer has no such target",
            expected=f"some of {', '.join(dict.fromkeys(n.split(' ')[0] for n in (*by_name, *OTHERS)))}",
            got=", ".join(sorted(unknown)),
            fix="name some of these",
        )
    return [n for n in chosen if n in OTHERS or not by_name[n].package or find_spec(by_name[n].package) is not None]


def work(folder: Path, names: Sequence[str], seconds: float, *, stop: bool = False, shrink: bool = True) -> None:
    """Run random programs for some time, the mode first that ran for the shortest; the state is in the folder."""
    path = folder / "state.json"
    state, end = State.load(path), time.monotonic() + seconds
    while time.monotonic() < end and not (stop and state.findings):
        name = min(names, key=lambda n: state.seconds.get(n, 0.0))
        first, count = state.done.get(name, 0), _count(name)
        state.current = (name, first, count)
        state.save(path)
        began = time.monotonic()
        run_some(state, folder, name, first, count, shrink)
        state.seconds[name] = state.seconds.get(name, 0.0) + time.monotonic() - began
        state.done[name] = first + count
        state.current = None
        state.save(path)


def _count(name: str) -> int:
    if name in library.MODES:
        return _CALLS
    return _DIVIDED if name == MESHES else _mode(name).batch


def seed_of(seed: int, number: int) -> int:
    """The seed of a program of a run."""
    return seed * _SEEDS + number


def options_of(name: str) -> Mapping[str, Any]:
    """The options of the programs of a mode."""
    return _mode(name).options


@cache
def _mode(name: str) -> Mode:
    return next(mode for mode in modes(Wild) if mode.name == name)


def run_some(state: State, folder: Path, name: str, first: int, count: int, shrink: bool = True) -> None:
    """Run the programs `first`, `first` + 1, … of a mode, and save each wrong program."""
    if name in library.MODES:
        _call_library(state, folder, name, first)
        return
    if name == MESHES:
        for number in range(first, first + count):
            _divide(state, folder, number, shrink)
        return
    mode = _mode(name)
    samples = [sample(seed_of(state.seed, first + n), **mode.options) for n in range(count)]
    try:
        results = mode.run([program for program, _ in samples])
        for (program, _), outputs in zip(samples, results, strict=True):
            assert_agrees(program, outputs)
    except Exception as together:
        for program, choices in samples:
            problem = problem_of(program, mode.run)
            if isinstance(problem, REFUSALS):
                state.refused[name] = state.refused.get(name, 0) + 1
            elif problem is not None:
                if shrink:
                    program = simplest(choices, mode.run, problem, mode.options)
                shown = f"{type(problem).__name__}: {problem}".splitlines()[0]
                _save(state, folder, Finding(name, shown, program).save)
                return  # the others of the batch are likely wrong for the same reason
        if not isinstance(together, REFUSALS):  # only all of them together fail
            shown = f"together with others: {type(together).__name__}: {together}".splitlines()[0]
            _save(state, folder, Finding(name, shown, samples[0][0]).save)


def run_one(folder: Path, name: str, number: int) -> None:
    """Run one program of a mode, and note in the state of the folder if it is wrong."""
    state = State.load(folder / "state.json")
    run_some(state, folder, name, number, 1)
    state.save(folder / "state.json")


def _save(state: State, folder: Path, save: Callable[[Path], Path]) -> None:
    path = str(save(folder))
    if path not in state.findings:
        state.findings.append(path)


# --- meshes ---------------------------------------------------------------------------------------------------------


def call_on_mesh(seed: int, number: int) -> tuple[meshes.Divided, list[int]]:
    """A call on a mesh of a run, and the choices that make it."""
    choices = Choices(random=Random(seed_of(seed, number)))
    return meshes.draw(choices), choices.made


def _divide(state: State, folder: Path, number: int, shrink: bool) -> None:
    call, choices = call_on_mesh(state.seed, number)
    problem = _problem_on_mesh(call)
    if problem is None:
        return
    if isinstance(problem, meshes.REFUSALS):
        state.refused[MESHES] = state.refused.get(MESHES, 0) + 1
        return
    if shrink:
        call = smaller(choices, meshes.draw, lambda c: type(_problem_on_mesh(c)) is type(problem))
        problem = _problem_on_mesh(call) or problem
    shown = f"{type(problem).__name__}: {problem}".splitlines()[0]

    def save(folder: Path) -> Path:
        path = folder / f"meshes-{number}.py"
        path.write_text(f"# {shown}\n{call.script()}\n", encoding="utf-8")
        return path

    _save(state, folder, save)


def _problem_on_mesh(call: meshes.Divided) -> Exception | None:
    try:
        call.check()
    except Exception as error:
        return error
    return None


# --- the library ----------------------------------------------------------------------------------------------------


_library = cache(library.drawn)


def library_kernel(mode: str, number: int) -> str:
    """The name of the kernel that a call of the library is of."""
    names = library.MODES[mode]
    return names[number // _CALLS % len(names)]


def _call_library(state: State, folder: Path, mode: str, first: int) -> None:
    name = library_kernel(mode, first)
    function, reference, calls = _library(name)
    targets, _ = available(None)
    turn = first // _CALLS
    # A round more than turns: else five kernels on five targets would each run on one alone.
    target = targets[(turn + turn // len(library.MODES[mode])) % len(targets)]
    try:
        check_calls(function, reference, calls, [target], _CALLS, seed_of(state.seed, first))
    except CheckError as error:
        script = f"# {str(error).splitlines()[0]}\n{error.script}"

        def save(folder: Path) -> Path:
            path = folder / f"library-{name.replace(' ', '_')}-{first}.py"
            path.write_text(script, encoding="utf-8")
            return path

        _save(state, folder, save)
