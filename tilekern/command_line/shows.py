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
from tilekern.kernel.composite import called
from tilekern.kernel.interface import of_flat_arrays
from tilekern.kernel.primitive import Calls
from tilekern.kernel.stages import Traced
from tilekern.lower.target import DEFAULT, Target, resolve

_WHAT = ("ir", "text", "plan", "asm", "resources")

# The languages of the compiler's output, the nearest to the machine first.
_LANGUAGES = ("sass", "ptx", "s", "llvm", "hlo")

_COLOURS = (
    (re.compile(r"(#.*|//.*)$", re.MULTILINE), "90"),
    (re.compile(r"(%[\w.]+)"), "36"),
    (re.compile(r"\b(func|load|store|fold|while|switch|hoist|dot|yield|def|for|if|return|atomic_\w+)\b"), "1"),
    (re.compile(r"\b((?:f|bf|i|u)\d+(?:e\dm\d\w*)?\[[\d, ]*\])"), "33"),
)


def add(commands: Any) -> None:
    """Add the command `show`."""
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


def run(options: argparse.Namespace) -> int:
    """Print the requested view of each kernel. Exit code: 0."""
    kernel, types = arguments.function(options.function), arguments.types(options.shapes)
    view = options.what or ("text" if options.target else "ir")
    with jax.enable_x64(arguments.has_64_bits(types)):
        call = partial(kernel, **arguments.statics(options.static))
        target = resolve(options.target) if options.target else DEFAULT
        kernels = traced_kernels(call, options.function, types, target)
        shown = "\n\n".join(_shown(k, view, options.target or "cpu", options.language) for k in kernels)
    if options.json:
        print(json.dumps({"function": options.function, "target": options.target, "what": view, "text": shown}))  # noqa: T201
    else:
        print(coloured(shown) if sys.stdout.isatty() else shown)  # noqa: T201
    return 0


def traced_kernels(function: Callable[..., Any], name: str, types: Sequence[Any], target: Target) -> list[Traced]:
    """The kernels that a function calls on a target, in order, as functions of flat arrays.

    Raises:
      ArgumentError: it calls none.
    """
    kernels = called_kernels(function, name, types, target)
    return [Traced(kernel, of_flat_arrays(kernel, own_target), own_target) for kernel, own_target in kernels]


def called_kernels(function: Callable[..., Any], name: str, types: Sequence[Any], target: Target) -> Calls:
    """The kernels that a function calls on a target, in order, each with its own target.

    Raises:
      ArgumentError: it calls none.
    """
    kernels = called(jax.make_jaxpr(function)(*types), target)
    if not kernels:
        raise ArgumentError(
            f"{name} calls no kernel",
            expected="a kernel, an op, or a function that calls some",
            got=f"a function that calls none for these arrays on {target.name}",
            fix="name the function that calls the kernel",
        )
    return kernels


def _shown(traced: Traced, view: str, target: str, language: str | None) -> str:
    if view == "ir":
        return str(traced).rstrip()
    lowered = traced.lower(target)
    match view:
        case "text" | "plan":
            return str(getattr(lowered, view))
        case "resources":
            return str(lowered.compile().resources)
        case _:
            return _assembly(lowered.compile().asm, language)


def _assembly(asm: Any, language: str | None) -> str:
    languages = [name for name in asm if isinstance(asm[name], str) and asm[name]]
    choice = language or next((name for name in _LANGUAGES if name in languages), "")
    if choice in languages:
        return str(asm[choice])
    raise ArgumentError(
        f"the compiler gives no {choice or 'text'}",
        expected=f"one of {', '.join(languages)}",
        got=f"--language {choice}",
        fix="name one of these",
    )


def coloured(text: str) -> str:
    """Text with colours for a terminal: comments, values, ops, types."""
    lines: list[str] = []
    for line in text.splitlines():
        comment = _COLOURS[0][0].search(line)
        code, comment_text = (line[: comment.start()], line[comment.start() :]) if comment else (line, "")
        for pattern, colour in _COLOURS[1:]:
            code = pattern.sub(f"\x1b[{colour}m\\1\x1b[0m", code)
        lines.append(code + (f"\x1b[90m{comment_text}\x1b[0m" if comment_text else ""))
    return "\n".join(lines)
