"""Programs that a mode gets wrong, as files of text: the block IR behind lines that say how to run it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from tilekern.errors import LoadError
from tilekern.ir.parse import parse
from tilekern.testing.fuzz.modes import Mode, modes
from tilekern.testing.fuzz.wild import Wild
from tilekern.testing.programs import Program, assert_agrees

SUFFIX = ".program"


@dataclass(frozen=True)
class Finding:
    """A program that a mode gets wrong.

    Attributes:
      mode: its name.
      problem: the error, in a line.
      program: the program.
    """

    mode: str
    problem: str
    program: Program

    def __str__(self) -> str:
        tolerances = " ".join(map(repr, self.program.tolerances))
        lines = [
            f"mode: {self.mode}",
            f"seed: {self.program.seed}",
            f"tolerances: {tolerances}",
            f"problem: {self.problem}",
        ]
        return "".join(f"# {line}\n" for line in lines) + f"{self.program.func}\n"

    def save(self, folder: Path) -> Path:
        """Write the finding to a file named by a hash of its text; whole or not at all."""
        text = str(self)
        name = f"{self.mode.replace(':', '_').replace(' ', '_')}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        path, temporary = folder / f"{name}{SUFFIX}", folder / f"{name}.tmp"
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        return temporary.replace(path)


def load(path: str | Path) -> Finding:
    """The finding of a file.

    Raises:
      LoadError: the file is something else.
    """
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    heads = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# ") and ": " in line)
    try:
        func = parse("\n".join(line for line in lines if not line.startswith("# ")))
        tolerances = tuple(map(float, heads["tolerances"].split()))
        return Finding(heads["mode"], heads.get("problem", ""), Program(func, int(heads["seed"]), tolerances))
    except (KeyError, ValueError) as error:
        raise LoadError(
            f"{path} is no program of the fuzzer",
            expected="lines `# mode: …`, `# seed: …`, `# tolerances: …`, then block IR",
            got=f"{type(error).__name__}: {error}",
            fix="give a file that `python -m tilekern fuzz` wrote",
        ) from error


def mode_named(name: str) -> Mode:
    """The mode of a name.

    Raises:
      LoadError: there is none.
    """
    by_name = {mode.name: mode for mode in modes(Wild)}
    if name not in by_name:
        raise LoadError(
            "the fuzzer has no such mode",
            expected=", ".join(by_name),
            got=f"mode = {name!r}",
            fix="correct the name in the file",
        )
    return by_name[name]


def replay(path: str | Path) -> None:
    """Run a finding again.

    Raises:
      AssertionError: the program is still wrong.
    """
    finding = load(path)
    assert_agrees(finding.program, mode_named(finding.mode).run([finding.program])[0])
