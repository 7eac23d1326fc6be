"""`targets`: the targets that this machine can run, compile and interpret, and the packages that others need."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from typing import Any

from tilekern.lower.backend import Backend, Target
from tilekern.lower.target import TARGETS, backend_of


@dataclass(frozen=True)
class Support:
    """The abilities of this machine for a target.

    Attributes:
      target: the name of the target.
      runs: True if calls run on the machine itself.
      compiles: True if programs compile here.
      interprets: True if programs run here without the hardware.
      needs: the package or the hardware that is missing for calls to run; "" if none is.
    """

    target: str
    runs: bool
    compiles: bool
    interprets: bool
    needs: str


def support(target: Target) -> Support:
    """The abilities of this machine for a target."""
    backend = backend_of(target)
    runs = backend.compiles and backend.is_here(target)
    return Support(
        target.name, runs, backend.compiles, backend.interprets, "" if runs else _missing(backend, target.name)
    )


def _missing(backend: Backend, target: str) -> str:
    """The hardware that calls of a target need, or the command that installs the package which is missing first."""
    if backend.compiles:
        return f"a {backend.hardware} of {target}"
    return backend.install + (" to compile" if backend.interprets else "")


def add(commands: Any) -> None:
    """Add the command `targets`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "targets", help="say what this machine can run, compile and interpret"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the table of targets. Exit code: 0."""
    supports = [support(target) for target in TARGETS.values()]
    if options.json:
        print(json.dumps([asdict(s) for s in supports]))  # noqa: T201
        return 0
    print(f"{'target':<14}{'runs':<7}{'compiles':<10}{'interprets':<12}needs")  # noqa: T201
    for s in supports:
        words = ["yes" if x else "no" for x in (s.runs, s.compiles, s.interprets)]
        print(f"{s.target:<14}{words[0]:<7}{words[1]:<10}{words[2]:<12}{s.needs}".rstrip())  # noqa: T201
    return 0
