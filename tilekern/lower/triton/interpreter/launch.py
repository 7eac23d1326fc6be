"""A launch: the text is executed for all programs of the grid, one after the other."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np

from tilekern.ir.core import Array
from tilekern.ir.types import DTYPES
from tilekern.lower.triton.interpreter.memory import Buffer, Memory, poison
from tilekern.lower.triton.interpreter.syntax import names, parse
from tilekern.lower.triton.interpreter.triton_interpreter import TritonInterpreter
from tilekern.lower.triton.interpreter.wire import Header

FILE = "<generated>"
"""File name of the text in tracebacks."""


class Launcher:
    """Launches programs that arrive as messages: a header (`interpret._request`) and arrays."""

    def __init__(self, triton: TritonInterpreter) -> None:
        self._triton = triton
        self._names = names(triton)
        # The same program is often launched again with other arrays.
        self._module = functools.lru_cache(maxsize=64)(self._execute)

    def run(self, request: Header, arrays: Sequence[Array]) -> list[Array]:
        """Launch a program, and return the buffers of its results."""
        memory = Memory()
        buffers = _buffers(memory, request, arrays)
        results = buffers[len(request["operands"]) :]
        entry = self._module(request["text"])[request["name"]].fn
        arguments = [self._argument(a, buffer) for a, buffer in zip(request["arguments"], buffers, strict=True)]
        builder = self._triton.module.interpreter_builder
        builder.memory = memory
        builder.prints, builder.printed = dict(request["prints"]), {}
        builder.set_grid_dim(request["programs"], 1, 1)
        with np.errstate(all="ignore"):
            for number in _order(request["programs"], request["order"]):
                memory.begin(number)
                builder.set_grid_idx(number, 0, 0)
                entry(*arguments)
        for buffer in results:
            buffer.check_written()
        return [b.data.reshape(r["shape"]) for b, r in zip(results, request["results"], strict=True)]

    def _execute(self, text: str) -> dict[str, Any]:
        """The names that the text defines. Its functions are rewritten once, here."""
        module: dict[str, Any] = {"__name__": FILE, **self._names}
        exec(parse(text, FILE), module)
        for value in module.values():
            if isinstance(value, self._triton.module.InterpretedFunction):
                value.rewrite = functools.partial(_identity, value.fn)
        return module

    def _argument(self, argument: Header, buffer: Buffer) -> Any:
        """An argument of the entry function: a pointer, or a descriptor."""
        triton, language = self._triton, self._triton.language
        type_ = language.pointer_type(triton.dtype(argument["dtype"]))
        pointer = language.tensor(triton.handle(np.array([buffer.base], np.uint64), type_), type_)
        if argument["descriptor"] is None:
            return pointer
        semantic = triton.module.interpreter_semantic
        shape, strides, block = argument["descriptor"]
        *outer, _ = (semantic.to_tensor(n) for n in strides)
        return semantic.make_tensor_descriptor(
            pointer,
            [semantic.to_tensor(n) for n in shape],
            [*outer, language.constexpr(1)],
            [language.constexpr(n) for n in block],
            padding_option="zero",
        )


def _identity(function: Any) -> Any:
    return function


def _buffers(memory: Memory, request: Header, arrays: Sequence[Array]) -> list[Buffer]:
    """The buffer of each argument: operands, then results."""
    labels: list[str] = [a["name"] for a in request["arguments"]]
    operands: list[int] = request["operands"]
    aliases: list[int | None] = [r["alias"] for r in request["results"]]
    buffers = [memory.add(labels[n], arrays[array], written=n in aliases) for n, array in enumerate(operands)]
    for label, alias, result in zip(labels[len(operands) :], aliases, request["results"], strict=True):
        buffers.append(_fresh(memory, label, result) if alias is None else buffers[alias])
    return buffers


def _fresh(memory: Memory, label: str, result: Header) -> Buffer:
    """A buffer that shares no operand's memory."""
    shape: tuple[int, ...] = tuple(result["shape"])
    dtype, zeroed = DTYPES[result["dtype"]], result["zeroed"]
    data: Array = np.zeros(shape, dtype) if zeroed else poison(shape, dtype)
    return memory.add(label, data, written=True, fresh=not zeroed)


def _order(programs: int, order: str | int) -> Sequence[int]:
    match order:
        case "forward":
            return range(programs)
        case "reverse":
            return range(programs - 1, -1, -1)
        case _:
            return [int(n) for n in np.random.default_rng(int(order)).permutation(programs)]


def line_of(error: BaseException) -> int:
    """The line of the generated text that raised an error; 0 if it was raised elsewhere."""
    if isinstance(error, SyntaxError) and error.filename == FILE:
        return error.lineno or 0
    lines = [frame.lineno or 0 for frame in traceback.extract_tb(error.__traceback__) if frame.filename == FILE]
    return lines[-1] if lines else 0
