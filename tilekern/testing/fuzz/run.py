"""The fuzzer itself: it watches the process that runs the programs, and goes on when that dies or hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilekern.errors import ArgumentError
from tilekern.testing.fuzz.findings import Finding
from tilekern.testing.fuzz.library import MODES
from tilekern.testing.fuzz.meshes import DEVICES
from tilekern.testing.fuzz.worker import (
    MESHES,
    OTHERS,
    State,
    call_on_mesh,
    library_kernel,
    names_of_modes,
    options_of,
    seed_of,
)
from tilekern.testing.programs.batches import sample

# A batch of programs that takes longer hangs, in seconds; in a short run, one that takes as long as the run.
_HANGS = 600.0
_TIMED_OUT = 124


@dataclass(frozen=True)
class Result:
    """The result of a run; prints as a table.

    Attributes:
      programs: for each mode, the number of programs.
      seconds: for each mode, the time that they took.
      refused: for each mode, the number of programs that it refused.
      findings: the files of the programs that are wrong.
    """

    programs: dict[str, int]
    seconds: dict[str, float]
    refused: dict[str, int]
    findings: tuple[str, ...]

    def __str__(self) -> str:
        width = max(map(len, self.programs), default=4)
        lines = [f"{'mode':<{width}}  programs  refused  seconds"]
        for name, count in self.programs.items():
            lines.append(f"{name:<{width}}  {count:8}  {self.refused.get(name, 0):7}  {self.seconds.get(name, 0):7.0f}")
        lines += [f"found: {path}" for path in self.findings] or ["found nothing"]
        return "\n".join(lines)


def fuzz(
    minutes: float,
    *,
    seed: int = 0,
    targets: Sequence[str] | None = None,
    folder: Path = Path("fuzz"),
    resume: bool = False,
    stop: bool = False,
    shrink: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Result:
    """Run random programs and random calls of the library on every backend.

    Programs run in a process of their own. If that dies or hangs, the programs that it ran are run one by one to find
    the guilty one.

    Args:
      minutes: how long.
      seed: another one gives other programs.
      targets: names of modes, as "cpu:llvm", "cuda:sm_90", "tpu", "passes", "derivatives", "library"; by default all.
      folder: the findings, and the state of the run.
      resume: go on with the run of the folder.
      stop: end with the first finding.
      shrink: make programs that are wrong simpler.
      progress: called with a line now and then.

    Raises:
      ArgumentError: the arguments make no sense, or there is nothing to resume.
    """
    if not minutes > 0:
        raise ArgumentError(
            "the fuzzer needs time", expected="minutes > 0", got=f"minutes = {minutes!r}", fix="give some"
        )
    names = names_of_modes(targets)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "state.json"
    if resume:
        State.load(path)
    else:
        State(seed).save(path)
    end, hangs = time.monotonic() + 60 * minutes, min(_HANGS, 60 * minutes)
    while (left := end - time.monotonic()) > 0:
        if _watch(_child(folder, names, left, stop, shrink), _environment(names), path, hangs, progress) == 0:
            break
        _blame(folder, path, _HANGS / 3, stop)
        if stop and State.load(path).findings:
            break
    state = State.load(path)
    return Result(state.done, state.seconds, state.refused, tuple(state.findings))


def _child(folder: Path, names: Sequence[str], seconds: float, stop: bool, shrink: bool) -> list[str]:
    task = json.dumps({"folder": str(folder), "names": list(names), "seconds": seconds, "stop": stop, "shrink": shrink})
    return [sys.executable, "-m", "tilekern.testing.fuzz", task]


def _environment(names: Sequence[str]) -> dict[str, str]:
    """The environment of the child: with as many devices as the meshes need."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    return {**os.environ, "XLA_FLAGS": flags} if MESHES in names else dict(os.environ)


def _watch(
    command: Sequence[str],
    environment: Mapping[str, str],
    path: Path,
    hangs: float,
    progress: Callable[[str], None] | None,
) -> int:
    """Run the child to its end; returns its status."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as child:
        last, since = None, time.monotonic()
        try:
            while (status := child.poll()) is None:
                time.sleep(0.5)
                state = State.load(path)
                if state.current != last:
                    last, since = state.current, time.monotonic()
                    if progress is not None:
                        progress(_line(state))
                # Before the first program the process imports, which takes long on a busy machine.
                if time.monotonic() - since > (_HANGS if state.current is None else hangs) * _waiting():
                    child.kill()
        finally:
            child.kill()
    return status


def _waiting() -> float:
    """How many processes want to run on each core, at least 1: a process that is not stuck takes so much longer."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def _line(state: State) -> str:
    return f"{sum(state.done.values())} programs, {len(state.findings)} findings, now {(state.current or ['done'])[0]}"


def _blame(folder: Path, path: Path, hangs: float, stop: bool) -> None:
    """Find the programs that the child died of, each in a process of its own, and wrong ones; go on behind them."""
    state = State.load(path)
    if state.current is None:
        raise RuntimeError("the process of the fuzzer died before it ran a program; see its messages above")
    (name, first, count), known = state.current, len(state.findings)
    for number in [first] if name in MODES else range(first, first + count):
        task = json.dumps({"folder": str(folder), "one": [name, number]})
        command = [sys.executable, "-m", "tilekern.testing.fuzz", task]
        try:
            done = subprocess.run(
                command, timeout=hangs * _waiting(), stdout=subprocess.DEVNULL, check=False, env=_environment([name])
            )
            status = done.returncode
        except subprocess.TimeoutExpired:
            status = _TIMED_OUT
        state = State.load(path)  # the process saves a program that is wrong
        if status != 0:
            how = f"the process ended with status {status}" if status != _TIMED_OUT else f"more than {hangs:.0f} s"
            state.findings.append(str(_guilty(state.seed, name, number, how, folder)))
            state.save(path)
        if stop and len(state.findings) > known:
            break
    state.done[name], state.current = first + count, None
    state.seconds[name] = state.seconds.get(name, 0.0) + 1.0
    state.save(path)


def _guilty(seed: int, name: str, number: int, how: str, folder: Path) -> Path:
    """Save the program, or the name of the calls of the library, that a process died of."""
    if name not in OTHERS:
        program, _ = sample(seed_of(seed, number), **options_of(name))
        return Finding(name, how, program).save(folder)
    if name == MESHES:
        path, text = folder / f"meshes-{number}.py", f"# {how}\n{call_on_mesh(seed, number)[0].script()}\n"
    else:
        kernel = library_kernel(name, number)
        path = folder / f"library-{kernel.replace(' ', '_')}-{number}.txt"
        text = f"{how}: calls of {kernel}, with seed {seed_of(seed, number)}\n"
    path.write_text(text, encoding="utf-8")
    return path
