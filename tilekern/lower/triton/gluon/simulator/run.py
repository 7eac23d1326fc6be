"""A warp-specialised program and its inputs → its outputs."""

from __future__ import annotations

import builtins
import hashlib
import linecache
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from tilekern import source
from tilekern.ir.core import Array
from tilekern.ir.types import kind_of, round_to
from tilekern.lower.triton.gluon.rounds import WIDTH
from tilekern.lower.triton.gluon.simulator.arrays import Box, GlobalArray, Pointer
from tilekern.lower.triton.gluon.simulator.functions import scalars
from tilekern.lower.triton.gluon.simulator.language import Language
from tilekern.lower.triton.gluon.simulator.machine import FaultError, Machine
from tilekern.lower.triton.program import Argument, Program

BLOCKS = 2
"""Thread blocks that a simulated launch has at most, so that each of them computes several groups of programs."""


def simulate(program: Program, inputs: Sequence[Array], *, seed: int = 0, blocks: int = BLOCKS) -> list[Array]:
    """Run a program on the Func's inputs, and return the Func's outputs.

    Args:
      program: a program in Gluon.
      inputs: the Func's inputs; they are not changed.
      seed: decides the order in which roles, copies and products go on.
      blocks: the most thread blocks or clusters of the launch; groups of programs are spread over them.

    Raises:
      InterpreterError: two accesses of shared memory race, roles wait for one another for ever, or a barrier gets bytes
        that were not announced; at the user's line.
      OutOfBoundsError: an access is outside of its array.
      UnwrittenError: an element of a result is never stored.
      WriteConflictError: two thread blocks store one element.
    """
    arrays = [*inputs, *program.constants]
    buffers = [
        GlobalArray(a.name, np.asarray(arrays[n]), False)
        for n, a in zip(program.operands, program.arguments, strict=False)
    ]
    results = [
        GlobalArray(a.name, np.zeros(r.shape, r.dtype), True)
        for r, a in zip(program.results, program.arguments[len(buffers) :], strict=True)
    ]
    arguments = [_argument(a, x) for a, x in zip(program.arguments, [*buffers, *results], strict=True)]
    count = min(blocks, program.programs)
    file = f"<simulated {hashlib.sha256(program.text.encode()).hexdigest()[:12]}>"
    linecache.cache[file] = (len(program.text), None, program.text.splitlines(keepends=True), file)
    code = compile(program.text, file, "exec", dont_inherit=True)
    with np.errstate(all="ignore"), source.at(program.loc):
        for block in range(count):
            machine = Machine(block, count, seed + block, file, program.cluster)
            _run(program, code, machine, arguments)
        for result in results:
            result.check_written()
    return [_output(x.data.reshape(r.shape), r.final) for x, r in zip(results, program.results, strict=True)]


def _output(buffer: Array, dtype: Any) -> Array:
    return round_to(buffer, dtype) if kind_of(dtype) == "float" else buffer.astype(dtype)


def _argument(argument: Argument, array: GlobalArray) -> Any:
    return Pointer(array) if argument.descriptor is None else Box(array, argument.descriptor)


def _run(program: Program, code: Any, machine: Machine, arguments: Sequence[Any]) -> None:
    """Run one thread block, or one cluster."""
    language = Language(machine)

    def imported(name: str, globals: Any = None, locals: Any = None, names: Sequence[str] = (), level: int = 0) -> Any:
        del name, globals, locals, level
        return SimpleNamespace(**{n: language.modules[n] for n in names})

    module: dict[str, Any] = {"__name__": "simulated", "range": scalars}
    module["__builtins__"] = {**vars(builtins), "__import__": imported}
    exec(code, module)
    module[WIDTH] = machine.blocks
    try:
        module[program.name](*arguments)
        language.check_end()
    except FaultError as fault:
        _raise(program, fault)


def _raise(program: Program, fault: FaultError) -> None:
    """Raise the error at the user's line behind the generated line."""
    line = program.text.splitlines()[fault.line - 1].strip() if fault.line else ""
    place = f"line {fault.line} of the generated source: {line}" if line else ""
    error = fault.error
    with source.at(program.lines.get(fault.line, program.loc)):
        raise type(error)(
            error.summary, expected=error.expected, got=", ".join(x for x in (error.got, place) if x), fix=error.fix
        ) from fault
