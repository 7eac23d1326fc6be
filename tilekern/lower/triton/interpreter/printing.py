"""`tl.device_print` in the interpreter: the text that `tk.debug_print` asks for."""

from __future__ import annotations

import inspect
from typing import Any

from tilekern.ir.core import Array
from tilekern.lower.triton.interpreter.launch import FILE
from tilekern.lower.triton.interpreter.triton_interpreter import Correction, TritonInterpreter


def _print_in_the_users_format(triton: TritonInterpreter) -> None:
    """A program prints all values of a `tk.debug_print` at once, in the format of the `tk.debug_print`.

    Triton's interpreter (3.6.0, 3.9.0) prints label, program and value, nothing for a label without a value, and both
    characters of `%%`, which on the device is one percent sign.
    """
    builder: Any = triton.module.InterpreterBuilder
    own = builder.create_print

    def create_print(self: Any, prefix: str, hex: bool, values: list[Any], signs: Any) -> None:
        printed = self.prints.get(_line())
        if printed is None:  # a program that somebody wrote by hand
            own(self, prefix.replace("%%", "%"), hex, values, signs)
            return
        for value in values:
            self.printed[printed["operand"]] = _without_padding(value.data, printed["shape"])
        if printed["last"]:
            operands = [self.printed.get(number) for number in range(1 + max(self.printed, default=-1))]
            self.printed.clear()
            print(printed["format"].format(*operands))  # noqa: T201 -- its purpose

    builder.create_print = create_print


CORRECTIONS: tuple[Correction, ...] = (_print_in_the_users_format,)


def _without_padding(x: Array, shape: list[int]) -> Array:
    """The first lanes along each dim; the interpreter has scalars as arrays of one element."""
    return x[tuple(slice(size) for size in shape)] if shape else x.reshape(())


def _line() -> int:
    """The line of the generated text that runs."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename != FILE:
        frame = frame.f_back
    assert frame is not None, "only programs print"
    return frame.f_lineno
