"""`show`: the block IR of a kernel, the program of a backend, its plan, its machine code, its resources."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from tilekern.command_line import arguments
from tilekern.errors import ArgumentError
from tilekern.kernel.function_family import called
from tilekern.kernel.interface import of_flat_arrays
from tilekern.kernel.stages import Traced
from tilekern.lower.target import DEFAULT, Target, resolve

_WHAT = ("ir", "text", "plan", "asm", "resources")

# Of the compiler's output, the language that is nearest to the machine.
_LANGUAGES = ("sass", "ptx", "s", "llvm", "hlo")

_COLOURS = (
    (re.compile(r"(#.*|//.*)$", re.MULTILINE), "90"),
    (re.compile(r"(%[\w.]+)"), "36"),
    (re.compile(r"\b(func|load|store|fold|while|switch|hoist|dot|yield|def|for|if|return|atomic_\w+)\b"), "1"),
    (re.compile(r"\b((?:f|bf|i|u)\d+(?:e\dm\d\w*)?\[[\d, ]*\])"), "33"),
)


def add(commands: Any) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "show", help="print a kernel's block IR, or what a backend makes of it"
    )
    arguments.add_function(parser)
    parser.add_argument("--shapes", required=True, metavar="TYPES", help='types of the arrays: "f32[128,64], i32[]"')
    parser.add_argument("--target", metavar="NAME", help='for example "cuda:sm_90"; left out, the block IR is shown')
    parser.add_argument("--what", choices=_WHAT, help="by default the text of the target's program, or else the IR")
    parser.add_argument("--language", metavar="NAME", help="of the compiler's output, with --what asm: ptx, llvm, s …")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Print what is asked for."""
    kernel, types = arguments.function(given.function), arguments.types(given.shapes)
    what = given.what or ("text" if given.target else "ir")
    with jax.enable_x64(arguments.has_64_bits(types)):
        call = partial(kernel, **arguments.statics(given.static))
        kernels = _traced(call, types, resolve(given.target) if given.target else DEFAULT)
        if not kernels:
            raise ArgumentError(
                f"{given.function} calls no kernel",
                expected="a kernel, an op, or a function that calls some",
                got=repr(kernel),
                fix="name the function that calls the kernel",
            )
        shown = "\n\n".join(_shown(k, what, given.target or "cpu", given.language) for k in kernels)
    if given.json:
        print(json.dumps({"function": given.function, "target": given.target, "what": what, "text": shown}))  # noqa: T201
    else:
        print(coloured(shown) if sys.stdout.isatty() else shown)  # noqa: T201
    return 0


def _traced(function: Callable[..., Any], types: Sequence[Any], target: Target) -> list[Traced]:
    """The kernels that a function calls on a target, in order."""
    kernels = called(jax.make_jaxpr(function)(*types), target)
    return [Traced(kernel, of_flat_arrays(kernel, wanted), wanted) for kernel, wanted in kernels]


def _shown(traced: Traced, what: str, target: str, language: str | None) -> str:
    if what == "ir":
        return str(traced).rstrip()
    lowered = traced.lower(target)
    match what:
        case "text" | "plan":
            return str(getattr(lowered, what))
        case "resources":
            return str(lowered.compile().resources)
        case _:
            return _assembly(lowered.compile().asm, language)


def _assembly(asm: Any, language: str | None) -> str:
    known = [name for name in asm if isinstance(asm[name], str) and asm[name]]
    found = language or next((name for name in _LANGUAGES if name in known), "")
    if found in known:
        return str(asm[found])
    raise ArgumentError(
        f"the compiler gives no {found or 'text'}",
        expected=f"one of {', '.join(known)}",
        got=f"--language {found}",
        fix="name one of these",
    )


def coloured(text: str) -> str:
    """Text with colours for a terminal: comments, values, ops, types."""
    lines: list[str] = []
    for line in text.splitlines():
        comment = _COLOURS[0][0].search(line)
        code, rest = (line[: comment.start()], line[comment.start() :]) if comment else (line, "")
        for pattern, colour in _COLOURS[1:]:
            code = pattern.sub(f"\x1b[{colour}m\\1\x1b[0m", code)
        lines.append(code + (f"\x1b[90m{rest}\x1b[0m" if rest else ""))
    return "\n".join(lines)
