"""`tune`: the fastest blocks of kernels, in a file; `tuned`: such files merged and compared."""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax

from tilekern.command_line import arguments
from tilekern.command_line.shows import called_kernels
from tilekern.errors import ArgumentError
from tilekern.kernel import Kernel, tuned
from tilekern.kernel.tuned import Tuned
from tilekern.tuning import Request, Result, check_budget, target_of, tune_called


def add(commands: Any) -> None:
    """Add the commands `tune` and `tuned`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "tune", help="find the fastest blocks, choices and launch options of a kernel"
    )
    arguments.add_function(parser)
    parser.add_argument("--shapes", required=True, metavar="TYPES", help='types of the arrays: "f32[128,64], i32[]"')
    parser.add_argument("--target", metavar="NAMES", help='as in "cuda:sm_90,tpu:v5e"; by default this machine')
    parser.add_argument("--budget", type=float, default=60.0, metavar="SECONDS", help="for each target (60)")
    parser.add_argument("--reference", metavar="MODULE:FUNCTION", help="the same in plain JAX, for right results")
    parser.add_argument("--gradient", action="store_true", help="tune the kernels of the gradient, too")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the settings to this file, or add them to it")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)
    files: argparse.ArgumentParser = commands.add_parser("tuned", help="merge or compare files of tuned blocks")
    files.add_argument("action", choices=("merge", "diff"))
    files.add_argument("files", nargs="+", type=Path, metavar="FILE")
    files.add_argument("--out", type=Path, metavar="FILE", help="of merge")
    files.set_defaults(run=run_files)


def run(options: argparse.Namespace) -> int:
    """Tune on each target, print the results, and save them with `--out`. Exit code: 0."""
    budget, types = check_budget(options.budget), arguments.types(options.shapes)
    names = arguments.names(options.target) or [None]
    requests = [Request(target_of(name), budget) for name in names]
    if options.out is not None:
        tuned.check_replaceable(options.out)
    with jax.enable_x64(arguments.has_64_bits(types)):
        results = [_tuned(options, types, *of_target) for of_target in zip(names, requests, strict=True)]
    if options.out is not None:
        Tuned().merge(*(result.tuned for result in results)).save(options.out)
    if options.json:
        print(json.dumps([row for result in results for row in result.as_dict()]))  # noqa: T201
    else:
        print("\n\n".join(map(str, results)))  # noqa: T201
    return 0


def _tuned(options: argparse.Namespace, types: Any, target: str | None, request: Request) -> Result:
    """The result for a kernel, or for the kernels that a function calls, each with its part of the budget."""
    function, statics = arguments.function(options.function), arguments.statics(options.static)
    if isinstance(function, Kernel):
        reference = arguments.function(options.reference) if options.reference else None
        limits = {"target": target, "budget": request.budget}
        return function.tune(*types, **limits, reference=reference, gradient=options.gradient, **statics)
    if options.reference or options.gradient:
        raise ArgumentError(
            f"{options.function} is no kernel",
            expected="a kernel, where --reference or --gradient is given",
            got=f"a function of type {type(function).__name__}",
            fix="name the kernel, or leave these options out",
        )
    kernels = called_kernels(partial(function, **statics), options.function, types, request.target)
    start = time.monotonic()
    ends = [start + request.budget * (n + 1) / len(kernels) for n in range(len(kernels))]
    rows = [tune_called(kernel, request, end) for (kernel, _), end in zip(kernels, ends, strict=True)]
    return Result(tuple(rows))


# --- files ------------------------------------------------------------------------------------------------------------


def run_files(options: argparse.Namespace) -> int:
    """Merge files, or print how two files differ. Exit code: 0, or 1 if they differ."""
    tables = [tuned.tuned(file) for file in options.files]
    if options.action == "diff":
        return _differ(options.files, tables)
    if options.out is None:
        raise ArgumentError(
            "there is no file for the merged entries",
            expected="--out FILE",
            got="no --out",
            fix="name a file; it may be one of those that are merged",
        )
    merged = Tuned().merge(*tables)
    merged.save(options.out)
    print(f"{options.out}: {len(merged.entries)} entries")  # noqa: T201
    return 0


def _differ(files: list[Path], tables: list[Tuned]) -> int:
    if len(tables) != 2:
        raise ArgumentError(
            "two files are compared",
            expected="tuned diff FILE FILE",
            got=f"{len(tables)} files",
            fix="name two files",
        )
    left, right = ({entry.key: dict(entry.settings) for entry in table.entries} for table in tables)
    lines: list[str] = []
    for key in sorted({*left, *right}, key=repr):
        if left.get(key) == right.get(key):
            continue
        extents = ", ".join(f"{name} ≤ {size}" for name, size in key.extents)
        lines.append(f"{key.kernel}{' (gradient)' if key.gradient else ''} on {key.target}, {extents}")
        lines += [f"  {mark} {side[key]}" for mark, side in (("-", left), ("+", right)) if key in side]
    print("\n".join([f"- {files[0]}", f"+ {files[1]}", *lines] if lines else ["no difference"]))  # noqa: T201
    return 1 if lines else 0
