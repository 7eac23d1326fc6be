"""A compiled program and its inputs → its outputs, by interpreting its PTX."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tilekern import source
from tilekern.errors import InterpreterError, OutOfBoundsError, UnwrittenError, WriteConflictError
from tilekern.ir.core import Array
from tilekern.ir.types import kind_of, round_to
from tilekern.lower.triton.call import described
from tilekern.lower.triton.call_message import Int32, Int64, Parameter, Pointer
from tilekern.lower.triton.call_message import TensorMap as TensorMapMessage
from tilekern.lower.triton.compile.binary import Binary
from tilekern.lower.triton.program import Argument, Program, Result
from tilekern.lower.triton.ptx import arithmetic, copies, memory, products, warps
from tilekern.lower.triton.ptx.copies import TensorMap
from tilekern.lower.triton.ptx.machine import Arena, Machine
from tilekern.lower.triton.ptx.parse import ConflictError, OutsideError, PtxError, parse

TABLE = {**arithmetic.TABLE, **warps.TABLE, **memory.TABLE, **products.TABLE, **copies.TABLE}
"""The function of each instruction, by the beginning of its opcode."""

BASE = 1 << 40
"""The address of global memory."""

_GAP = 4096  # bytes between two buffers, so that an access behind an array is seen
_SWIZZLES = {0: 16, 1: 32, 2: 64, 3: 128}
_ERRORS: dict[type[PtxError], type[InterpreterError]] = {
    OutsideError: OutOfBoundsError,
    ConflictError: WriteConflictError,
}


def run_ptx(
    program: Program, binary: Binary, inputs: Sequence[Any], *, late: bool = False, races: bool = False
) -> list[Array]:
    """The outputs of a Func by its compiled program.

    Memory that nobody wrote holds NaN. Products and copies that run beside the program run at once; a program without
    races computes the same if they run as late as it allows.

    Args:
      program: the program; each of its programs is one thread block.
      binary: the same, compiled for an NVIDIA GPU of compute capability 8.0 to 9.0.
      inputs: the Func's inputs; they are not changed.
      late: run products and copies as late as possible.
      races: refuse accesses of shared memory that no barrier orders; about four times slower.

    Raises:
      OutOfBoundsError: an access is outside of every array, or of shared memory, or not aligned.
      UnwrittenError: a byte of a result is never stored.
      WriteConflictError: two thread blocks store to one byte.
      InterpreterError: a race, a deadlock, or an instruction that the interpreter does not know.
    """
    if binary.num_ctas != 1:
        with source.at(program.loc):
            raise InterpreterError(
                f"the compiled program {program.name} has clusters, which the interpreter of PTX does not know",
                got=f"{binary.num_ctas} thread blocks in a cluster",
            )
    if program.programs == 0:
        inputs = [np.asarray(x) for x in (*inputs, *program.constants)]
        buffers = [
            np.zeros(r.shape, r.dtype) if r.alias is None else inputs[program.operands[r.alias]]
            for r in program.results
        ]
        return [_output(x, r) for x, r in zip(buffers, program.results, strict=True)]
    arrays = [np.ascontiguousarray(x) for x in (*inputs, *program.constants)]
    operands = [arrays[n] for n in program.operands]
    entry = parse(binary.text("ptx"))
    arena, places, constants = _arena(program, operands, entry.constants)
    parameters = list(_parameters(places, described(program, binary).parameters, program.arguments))
    # Behind them come pointers to scratch memory, which a program without scratch does not read.
    parameters += [0] * (len(entry.parameters) - len(parameters))
    machine = Machine(entry, program.programs, binary.shared_bytes, arena, parameters, TABLE, late, races, constants)
    try:
        with np.errstate(all="ignore"):
            machine.run()
    except PtxError as error:
        _raise(program, error)
    results = list(zip(places[len(operands) :], program.results, strict=True))
    for number, (place, result) in enumerate(results):
        _require_written(program, arena, place, result, number)
    return [_output(_buffer(arena, place, result), result) for place, result in results]


def _raise(program: Program, error: PtxError) -> None:
    """Raise a fault at the user's line."""
    with source.at(program.lines.get(error.source, program.loc)):
        raise _ERRORS.get(type(error), InterpreterError)(
            f"the compiled program {program.name} is wrong, or unknown to the interpreter",
            got=f"{error}" + (f", at {error.at}" if error.at else ""),
        ) from error


def _require_written(program: Program, arena: Arena, place: int, result: Result, number: int) -> None:
    start = place - BASE
    unwritten = arena.owners[start : start + result.nbytes] < 0
    if unwritten.any() and not result.zeroed and result.alias is None:
        with source.at(program.loc):
            raise UnwrittenError(
                f"the compiled program {program.name} leaves a part of a result unwritten",
                got=f"{np.count_nonzero(unwritten)} of {result.nbytes} bytes of result {number}",
            )


def _arena(
    program: Program, operands: Sequence[Array], constants: Mapping[str, bytes]
) -> tuple[Arena, list[int], dict[str, int]]:
    """Memory with all buffers and gaps between them, and the address of each buffer and of each constant."""
    places, end = list[int](), _GAP
    for size, alias in [(x.nbytes, None) for x in operands] + [(r.nbytes, r.alias) for r in program.results]:
        places.append(BASE + end if alias is None else places[alias])
        end += (-(-size // 256) * 256 + _GAP) * (alias is None)
    addresses = dict[str, int]()
    for name, data in constants.items():
        addresses[name] = BASE + end
        end += -(-len(data) // 256) * 256 + _GAP
    arena = Arena("global", BASE, end)
    for name, data in constants.items():
        part = slice(addresses[name] - BASE, addresses[name] - BASE + len(data))
        arena.bytes[part], arena.open[part] = np.frombuffer(data, np.uint8), True
    for x, place in zip(operands, places, strict=False):
        part = slice(place - BASE, place - BASE + x.nbytes)
        arena.bytes[part], arena.open[part] = x.reshape(-1).view(np.uint8), True
    for result, place in zip(program.results, places[len(operands) :], strict=True):
        part = slice(place - BASE, place - BASE + result.nbytes)
        arena.open[part] = True
        if result.zeroed:
            arena.bytes[part] = 0
    return arena, places, addresses


def _parameters(
    places: Sequence[int], parameters: Sequence[Parameter], arguments: Sequence[Argument]
) -> Iterator[int | TensorMap]:
    """The parameters of the entry function, in order. Numbers follow the descriptor whose shape they are."""
    buffers = iter(zip(places, arguments, strict=True))
    for parameter in parameters:
        match parameter:
            case Int32() | Int64():
                yield parameter.value & 0xFFFFFFFFFFFFFFFF
            case Pointer():
                yield next(buffers)[0]
            case TensorMapMessage():
                place, argument = next(buffers)
                size = argument.dtype.itemsize
                strides = tuple(s * size for s in parameter.strides)
                yield TensorMap(place, parameter.shape, strides, parameter.block, _SWIZZLES[parameter.swizzle], size)


def _buffer(arena: Arena, place: int, result: Result) -> Array:
    start = place - BASE
    return arena.bytes[start : start + result.nbytes].copy().view(result.dtype).reshape(result.shape)


def _output(buffer: Array, result: Result) -> Array:
    """An output from its buffer: partial sums are added up, and converted to the final dtype."""
    if result.partial_sums:
        buffer = buffer.sum(axis=0, dtype=buffer.dtype)
    return round_to(buffer, result.final) if kind_of(result.final) == "float" else buffer.astype(result.final)
