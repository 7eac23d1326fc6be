"""`check`: `tilekern.testing.check` from the command line."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import jax

from tilekern.command_line import arguments
from tilekern.testing.check import CheckError, available, check


def add(commands: Any) -> None:
    """Add the command `check`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "check", help="compare a kernel on every backend, by random calls, with each other and a reference"
    )
    arguments.add_function(parser)
    parser.add_argument("--reference", metavar="MODULE:FUNCTION", help="the same function in plain JAX")
    parser.add_argument(
        "--shapes",
        action="append",
        metavar="TYPES",
        help='arguments that it takes: "f32[128,64], i32[]"; may be repeated',
    )
    parser.add_argument(
        "--targets", metavar="NAMES", help='as in "cpu:llvm,cuda:sm_90"; by default one of each backend'
    )
    parser.add_argument("--examples", type=int, default=40, metavar="N", help="random calls (40)")
    parser.add_argument("--seed", type=int, metavar="N", help="another seed gives other calls")
    parser.add_argument("--devices", type=int, metavar="N", help="virtual devices, among which calls are divided")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Check a kernel and print the report. Exit code: 0, 1 if a result is wrong, 3 if no target can run here."""
    if options.devices:
        jax.config.update("jax_num_cpu_devices", options.devices)
    kernel = arguments.function(options.function)
    reference = arguments.function(options.reference) if options.reference else None
    cases = None if options.shapes is None else [arguments.types(text) for text in options.shapes]
    targets = arguments.names(options.targets)
    runs, skipped = available(targets)
    if not runs:
        for target, why in skipped.items():
            print(f"skipped {target}: {why}", file=sys.stderr)  # noqa: T201
        return 3
    try:
        report = check(
            kernel,
            reference,
            targets=targets,
            cases=cases,
            max_examples=options.examples,
            seed=options.seed,
            **arguments.statics(options.static),
        )
    except CheckError as error:
        failure = {"passed": False, "message": str(error), "script": error.script, **error.report.as_dict()}
        print(json.dumps(failure) if options.json else error)  # noqa: T201
        return 1
    print(json.dumps({"passed": True, **report.as_dict()}) if options.json else report)  # noqa: T201
    return 0
