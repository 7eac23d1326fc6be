"""Wrong programs made shorter op by op, behind the shrinking of the choices that made them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tilekern.ir.compute import Constant, splat
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.memory import Load, WriteOp
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.types import TileType, kind_of
from tilekern.ir.verify import verify
from tilekern.passes.dce import dce
from tilekern.testing.programs import Program

# A value in the place of another one may carry a larger rounding error than the tolerance of the output counts with.
_SLACK = 1000.0
_SECONDS = 30.0


def reduced(program: Program, fails: Callable[[Program], bool]) -> Program:
    """A shorter program that fails, too: without outputs, and with values replaced by operands or by ones.

        %2 = mul(%0, %1); store %2 to %o    →  store %0 to %o
        %2 = exp(%0); store %2 to %o        →  %2 = constant 1.0; store %2 to %o

    Args:
      program: a program that fails.
      fails: True for programs that fail in the same way.
    """
    end = time.monotonic() + _SECONDS
    tolerant = replace(program, tolerances=tuple(_SLACK * t for t in program.tolerances))
    if not fails(tolerant):
        return program
    while (shorter := next((p for p in _shorter(tolerant, end) if _runs(p) and fails(p)), None)) is not None:
        tolerant = shorter
    return replace(tolerant, tolerances=tuple(t / _SLACK for t in tolerant.tolerances))


def without(program: Program, output: Value) -> Program | None:
    """The program without an output, unless it is read."""
    func = program.func
    if any(isinstance(op, Load) and op.ref is output for op in func.walk()) or output.ref.role == "inout":
        return None

    def rule(op: Op, _: Rewriter) -> Sequence[Value] | None:
        return () if isinstance(op, WriteOp) and op.ref is output else None

    remaining = [(p, t) for p, t in zip(func.outputs, program.tolerances, strict=True) if p is not output]
    params = (*(p for p in func.params if p is not output),)
    smaller = dce(replace(Rewriter(rule).run(func), params=params))
    return Program(smaller, program.seed, tuple(t for _, t in remaining))


def _shorter(program: Program, end: float) -> Iterator[Program]:
    """Programs that are a step shorter, until the time `end` of the monotonic clock."""
    func = program.func
    for output in func.outputs if len(func.outputs) > 1 else ():
        candidate = without(program, output)
        if candidate is not None and time.monotonic() < end:
            yield candidate
    for op in reversed([*func.walk()]):
        values = _instead(op)
        if values is not None and time.monotonic() < end:
            yield replace(program, func=dce(_with_values(program, op, values)))


def _instead(op: Op) -> list[Value | Constant] | None:
    """For each result of an op an operand of its type, or a constant of ones; None if there is nothing shorter."""
    if isinstance(op, Constant) or not op.results:
        return None
    values = [_value_instead(op, result) for result in op.results]
    return None if any(value is None for value in values) else [value for value in values if value is not None]


def _value_instead(op: Op, result: Value) -> Value | Constant | None:
    same = next((operand for operand in op.operands if operand.type == result.type), None)
    # Integers may be positions, divisors and bounds of loops, for which 1 has another meaning.
    if (
        same is not None
        or not isinstance(result.type, TileType)
        or kind_of(result.type.dtype) in ("signed", "unsigned")
    ):
        return same
    return splat(1, result.type)


def _with_values(program: Program, replaced: Op, values: Sequence[Value | Constant]) -> Func:
    # The op is met as it is in the Func: nothing before it is replaced.
    def rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
        if op is not replaced:
            return None
        return [rewriter.one(v) if isinstance(v, Constant) else rewriter.value(v) for v in values]

    return Rewriter(rule).run(program.func)


def _runs(program: Program) -> bool:
    """True if a program is well formed, and the interpreter has a result for it."""
    try:
        verify(program.func)
        return len(program.expected) == len(program.tolerances)
    except Exception:  # whatever is wrong with the program, it is left out
        return False
