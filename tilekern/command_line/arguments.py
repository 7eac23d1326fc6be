"""Arguments of the command line: names of functions, types of arrays, static arguments."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from tilekern.errors import ArgumentError
from tilekern.kernel import CustomOp, Kernel
from tilekern.testing.values import dtype_of

# The most digits of a dim: 2^63 has 19.
_DIGITS = 19

_TYPE = re.compile(r"\s*(?:(?P<none>None)|(?P<dtype>\w+)\s*\[(?P<dims>[0-9,\s]*)\])\s*(?:,|$)")


def add_function(parser: argparse.ArgumentParser) -> None:
    """Add the name of the function, and its static arguments."""
    parser.add_argument("function", metavar="MODULE:KERNEL", help="a kernel, op or function; MODULE may be a file.py")
    parser.add_argument(
        "--static", action="append", default=[], metavar="K=V", help="a static argument or block, as a Python literal"
    )


def function(name: str) -> Any:
    """The function with the name `module:function` or `file.py:function`.

    Raises:
      ArgumentError: the module does not exist, fails when it is imported, or has no such function.
    """
    module_name, colon, attribute = name.rpartition(":")
    if not colon or not module_name or not attribute:
        raise ArgumentError(
            "this is no name of a kernel",
            expected="MODULE:KERNEL, as in my_package.kernels:my_kernel or kernels.py:my_kernel",
            got=repr(name),
            fix="put a colon between the module and the kernel",
        )
    module = _module(module_name)
    target: Any = module
    for part in attribute.split("."):
        target = getattr(target, part, None)
    if not callable(target):
        names = [n for n in dir(module) if isinstance(getattr(module, n), Kernel | CustomOp) and n[0] != "_"]
        raise ArgumentError(
            f"{module_name} has no function {attribute!r}",
            expected=f"one of its kernels: {', '.join(names)}" if names else "a kernel, op or function in that module",
            got=repr(target) if target is not None else "nothing of this name",
            fix="correct the name",
        )
    return target


def _module(name: str) -> Any:
    try:
        return _from_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    except Exception as error:  # whatever the module's code raises
        raise ArgumentError(
            f"the module {name} cannot be imported",
            expected="a module that Python can import from here, or the path of a file",
            got=f"{type(error).__name__}: {error}",
            fix="check the name and the working directory, and that `python -c` can import it",
        ) from error


def _from_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.absolute()))
    spec.loader.exec_module(module)
    return module


def types(text: str) -> tuple[jax.ShapeDtypeStruct | None, ...]:
    """The types of arrays in a text, written as in the IR: "f32[128,64], None, i32[]" has two types and None.

    None stands for an argument that is left out.

    Raises:
      ArgumentError: the text is no list of types.
    """
    array_types: list[jax.ShapeDtypeStruct | None] = []
    place = 0
    while place < len(text):
        match = _TYPE.match(text, place)
        if match is None or any(len(d.strip()) > _DIGITS for d in (match["dims"] or "").split(",")):
            raise ArgumentError(
                "these are no types of arrays",
                expected='a dtype and dims for each array, as in --shapes "f32[128,64], i32[]"',
                got=f"{text[place : place + 40]!r}",
                fix="write dims in brackets, with commas",
            )
        if match["none"]:
            array_types.append(None)
        else:
            dims = tuple(int(d) for d in match["dims"].split(",") if d.strip())
            with jax.enable_x64(True):
                array_types.append(jax.ShapeDtypeStruct(dims, dtype_of(match["dtype"])))
        place = match.end()
    return tuple(array_types)


def has_64_bits(arguments: Sequence[Any]) -> bool:
    """True if an array has 64 bits, which JAX must be told to take."""
    return any(x is not None and x.dtype.itemsize == 8 for x in arguments)


def statics(texts: Sequence[str]) -> dict[str, Any]:
    """Static arguments from `name=value`: a Python literal, or else text.

    Raises:
      ArgumentError: a text has no name before a `=`.
    """
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ArgumentError(
                "this is no static argument",
                expected="--static NAME=VALUE",
                got=repr(text),
                fix='write, for example, --static "eps=1e-5"',
            )
        try:
            values[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):  # Python's parser has limits of depth
            values[name] = value
    return values


def names(text: str | None) -> list[str] | None:
    """The names in a text: "a, b" -> ["a", "b"]; None for None."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]
