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
from tilekern.testing.programs.coverage import drawn


def add(commands: Any) -> None:
    """Add the command `fuzz`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "fuzz", help="run random programs and random calls of the library on every backend"
    )
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--minutes", type=float, metavar="N", help="how long")
    how.add_argument("--coverage", type=int, metavar="N", help="run nothing: tally which ops N random programs have")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="another seed gives other programs (0)")
    parser.add_argument("--targets", metavar="NAMES", help='as in "cpu:llvm,tpu,derivatives,library"; by default all')
    parser.add_argument("--out", type=Path, default=Path("fuzz"), metavar="FOLDER", help="of the findings (fuzz)")
    parser.add_argument("--resume", action="store_true", help="go on with the run of the folder")
    parser.add_argument("--stop", action="store_true", help="end with the first finding")
    parser.add_argument("--no-shrink", action="store_true", help="leave programs that are wrong as large as they are")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Fuzz, or only draw programs, and print the tally. Exit code: 0, or 1 if the fuzzer found a fault."""
    if options.coverage is not None:
        tally = drawn(options.coverage)
        print("\n".join([str(tally), *(f"missing: {cell}" for cell in tally.missing)]))  # noqa: T201
        return 0
    shown = sys.stderr.isatty()

    def progress(line: str) -> None:
        sys.stderr.write(f"\r\x1b[2K{line}")
        sys.stderr.flush()

    result = fuzz(
        options.minutes,
        seed=options.seed,
        targets=arguments.names(options.targets),
        folder=options.out,
        resume=options.resume,
        stop=options.stop,
        shrink=not options.no_shrink,
        progress=progress if shown else None,
    )
    if shown:
        progress("")
    print(json.dumps(asdict(result)) if options.json else result)  # noqa: T201
    return 1 if result.findings else 0
