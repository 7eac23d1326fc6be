"""Prints and assertions.

A print copies its operands to scratch memory and calls the host (`runtime.host_print`). An assertion that fails leaves
its number in an extra result of the program, which `call` looks at.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tilekern.ir.core import Value, round_up
from tilekern.ir.debug import Print
from tilekern.ir.types import BOOL
from tilekern.lower.llvm.element_index import Coords
from tilekern.lower.llvm.emit.elements import Elements
from tilekern.lower.llvm.emit.loop_nests import for_each_vector
from tilekern.lower.llvm.ir_values import PTR, VOID, Reg
from tilekern.lower.llvm.plan.steps import Step
from tilekern.lower.llvm.runtime.host_print import HOST_PRINT, Message, PrintedValue

_ALIGNMENT = 64


def scratch_bytes(op: Print) -> int:
    """The bytes of the copies of a print's operands."""
    return sum(round_up(x.tile.nbytes, _ALIGNMENT) for x in op.operands)


def emit_print(e: Elements, step: Step) -> None:
    """Copy the operands of a print to scratch memory, and hand them to the host."""
    op, code = step.op, e.code
    assert isinstance(op, Print)
    memory = Reg("null", PTR) if step.temporary is None else e.buffer_address(step.temporary)
    values = list(_placed(op))
    for x, value in zip(op.operands, values, strict=True):
        _copy(e, x, code.gep(memory, value.offset))
    text = Message(op.format, tuple(values), dict(np.get_printoptions())).encoded()
    message = code.module.data("message", np.frombuffer(text + b"\0", np.uint8))
    code.call_external(HOST_PRINT, VOID, message, memory, attributes="nounwind")


def _placed(op: Print) -> Iterator[PrintedValue]:
    offset = 0
    for x in op.operands:
        yield PrintedValue(x.tile.dtype, x.tile.shape, offset)
        offset += round_up(x.tile.nbytes, _ALIGNMENT)


def _copy(e: Elements, x: Value, memory: Reg) -> None:
    def vector(coords: Coords, lanes: int) -> None:
        e.store(e.element(x, coords, lanes), memory, x.tile.shape, x.tile.dtype, coords)

    for_each_vector(e, x.tile.shape, vector)


def emit_check(e: Elements, holds: Value, number: int, flag: Reg) -> None:
    """Unless a scalar holds, leave the number of an assertion at an address, if it is the greatest there."""
    assert holds.tile.shape == () and holds.tile.dtype == BOOL
    code = e.code
    with code.when(code.binary("xor", e.element(holds, ()), 1)):
        code.do(f"{code.fresh_value()} = atomicrmw umax ptr {flag.text}, i32 {number} monotonic")
