"""`explain`: for each line of a kernel the code that targets made of it, its time, and changes that would help."""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax

from tilekern.command_line import arguments
from tilekern.command_line.shows import traced_kernels
from tilekern.errors import ArgumentError, TilekernError
from tilekern.estimate.explain import Explanation
from tilekern.estimate.explain.page import page
from tilekern.kernel.stages import Traced
from tilekern.lower.target import resolve


def add(commands: Any) -> None:
    """Add the command `explain`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "explain", help="say what a target made of each line of a kernel, how long it takes, and what would help"
    )
    arguments.add_function(parser)
    parser.add_argument("--shapes", required=True, metavar="TYPES", help='types of the arrays: "f32[128,64], i32[]"')
    parser.add_argument("--target", required=True, metavar="NAMES", help='as in "cuda:sm_90,tpu:v5e,cpu:llvm"')
    parser.add_argument(
        "--extent", action="append", default=[], metavar="K=V", help="the number in all elements of an input"
    )
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="for trials of changes (10, on CPUs 1)")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print JSON")
    shown.add_argument("--html", type=Path, metavar="FILE", help="write a page of its own, which loads nothing")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Explain each kernel on each target. Exit code: 0, or 2 if all targets refuse."""
    kernel, types = arguments.function(options.function), arguments.types(options.shapes)
    targets, extents = arguments.names(options.target) or [], _extents(options.extent)
    if not targets or not (options.budget is None or options.budget >= 0):
        raise ArgumentError(
            "there is nothing to explain",
            expected="a target, and a budget of 0 seconds or more",
            got=f"--target {options.target!r} --budget {options.budget}",
            fix='name a target, as in --target "cuda:sm_90,cpu:llvm"',
        )
    resolved = {name: resolve(name) for name in targets}
    explanations: list[Explanation] = []
    refusals: list[dict[str, str]] = []
    with jax.enable_x64(arguments.has_64_bits(types)):
        call = partial(kernel, **arguments.statics(options.static))
        for name, target in resolved.items():
            for traced in traced_kernels(call, options.function, types, target):
                explained = _explained(traced, name, options, extents)
                if isinstance(explained, Explanation):
                    explanations.append(explained)
                else:
                    refusals.append(explained)
    if options.json:
        print(json.dumps([*(explanation.as_dict() for explanation in explanations), *refusals]))  # noqa: T201
    if options.html and explanations:
        _write(options.html, page(explanations))
    return 0 if explanations else 2


def _explained(
    traced: Traced, target: str, options: argparse.Namespace, extents: dict[str, Any]
) -> Explanation | dict[str, str]:
    """The explanation of a kernel on a target, or the record of its refusal; printed unless JSON is asked for."""
    try:
        explanation = traced.lower(target).explain(options.budget, **extents)
    except ArgumentError:
        raise
    except TilekernError as error:
        if not options.json:
            print(f"{traced.ir.name} on {target}: refused: {type(error).__name__}: {error}\n")  # noqa: T201
        return {"kernel": traced.ir.name, "target": target, "refused": str(error)}
    if not options.json:
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        print(explanation.text(colour) + "\n")  # noqa: T201
    return explanation


def _write(path: Path, text: str) -> None:
    """Write a page.

    Raises:
      ArgumentError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ArgumentError(
            "the page cannot be written",
            expected="--html FILE in a folder that exists and can be written to",
            got=f"{type(error).__name__}: {error}",
            fix="name another file",
        ) from error


def _extents(texts: list[str]) -> dict[str, Any]:
    extents = arguments.statics(texts)
    for name, value in extents.items():
        if not isinstance(value, int | float | list):
            raise ArgumentError(
                "this is no extent",
                expected="--extent NAME=NUMBER, or a list of numbers",
                got=f"--extent {name}={value}",
                fix='write, for example, --extent "lengths=512"',
            )
    return extents
