"""`targets`: the targets that this machine can run, compile and interpret, and the packages that others need."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from tilekern import _machine
from tilekern.lower.target import TARGETS, Target, on_platform


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
    match target.backend:
        case "xla":
            return Support(target.name, True, True, True, "")
        case "llvm":
            has = find_spec("llvmlite") is not None
            return Support(target.name, has, has, has, "" if has else "pip install 'tilekern[cpu]'")
        case "triton":
            has = find_spec("triton") is not None
            here = has and _is_a_gpu_here(target)
            needs = "" if here else f"a GPU of {target.name}" if has else "pip install 'tilekern[cuda]'"
            return Support(target.name, here, has, has, needs)
        case _:
            has = find_spec("libtpu") is not None
            here = has and _is_here(target, _machine.tpu_kind() is not None)
            needs = "" if here else f"a TPU of {target.name}" if has else "pip install 'tilekern[tpu]' to compile"
            return Support(target.name, here, has, True, needs)


def _is_a_gpu_here(target: Target) -> bool:
    if target.platform == "rocm":
        return target.name == f"rocm:{_machine.amd_architecture()}"
    return _is_here(target, _machine.compute_capability() is not None)


def _is_here(target: Target, has_platform: bool) -> bool:
    return has_platform and on_platform(target.platform, None).name == target.name


def add(commands: Any) -> None:
    """Add the command `targets`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "targets", help="say what this machine can run, compile and interpret"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the table of targets, and return the exit code."""
    supports = [support(target) for target in TARGETS.values()]
    if options.json:
        print(json.dumps([asdict(s) for s in supports]))  # noqa: T201
        return 0
    print(f"{'target':<14}{'runs':<7}{'compiles':<10}{'interprets':<12}needs")  # noqa: T201
    for s in supports:
        words = ["yes" if x else "no" for x in (s.runs, s.compiles, s.interprets)]
        print(f"{s.target:<14}{words[0]:<7}{words[1]:<10}{words[2]:<12}{s.needs}".rstrip())  # noqa: T201
    return 0
