"""`fuzz`: the fuzzer from the command line."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tilekern.command_line import arguments
from tilekern.testing.fuzz import fuzz


def add(commands: Any) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "fuzz", help="run random programs and random calls of the library on every backend"
    )
    parser.add_argument("--minutes", type=float, required=True, metavar="N", help="how long")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="another seed gives other programs (0)")
    parser.add_argument("--targets", metavar="NAMES", help='as in "cpu:llvm,tpu,derivatives,library"; by default all')
    parser.add_argument("--out", type=Path, default=Path("fuzz"), metavar="FOLDER", help="of the findings (fuzz)")
    parser.add_argument("--resume", action="store_true", help="go on with the run of the folder")
    parser.add_argument("--stop", action="store_true", help="end with the first finding")
    parser.add_argument("--no-shrink", action="store_true", help="leave programs that are wrong as large as they are")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Fuzz; print the tally."""
    shown = sys.stderr.isatty()

    def progress(line: str) -> None:
        sys.stderr.write(f"\r\x1b[2K{line}")
        sys.stderr.flush()

    result = fuzz(
        given.minutes,
        seed=given.seed,
        targets=arguments.names(given.targets),
        folder=given.out,
        resume=given.resume,
        stop=given.stop,
        shrink=not given.no_shrink,
        progress=progress if shown else None,
    )
    if shown:
        progress("")
    print(json.dumps(asdict(result)) if given.json else result)  # noqa: T201
    return 1 if result.findings else 0
