"""Emulate float16, which TPUs lack: compute in float32 and round to float16 after each op.

Needs: a Func after `expand_bits`. Gives: a Func whose refs and tiles of float16 are of float32. Its inputs and outputs
are float32 arrays of numbers that float16 has, so the casts around the kernel are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tilekern.ir.compute import Bitcast, Constant, Convert, Dot, Reduce
from tilekern.ir.core import Block, Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.make import Make
from tilekern.ir.ordering import Scan
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.shape import Iota
from tilekern.ir.types import F16, F32, I32, Type
from tilekern.lower.rewrite.narrow_floats import decoded, encoded, rounded
from tilekern.lower.rewrite.rounding import to_float32

_I16 = np.dtype(np.int16)

# Functions whose result needs no rounding: an operand, up to its sign, or an integer that is no larger.
_EXACT = ("neg", "abs", "sign", "max", "min", "floor", "ceil", "round_even", "round_away", "rem")


def emulate_float16(func: Func) -> Func:
    """Apply the rewrite above."""
    return _Widening().widen(func)


def _widened(of: Type) -> Type:
    return replace(of, dtype=F32) if of.dtype == F16 else of


def _value(value: Value) -> Value:
    return Value(_widened(value.type), value.name) if value.type.dtype == F16 else value


class _Widening(Rewriter):
    def __init__(self) -> None:
        super().__init__(lambda op, _: None)

    def widen(self, func: Func) -> Func:
        params = tuple(map(_value, func.params))
        for old, new in zip(func.params, params, strict=True):
            self.replace(old, new)
        return self.run(func if params == func.params else replace(func, params=params))

    def copy_block(self, block: Block) -> Block:
        args = tuple(map(_value, block.args))
        if args == block.args:
            return super().copy_block(block)
        return self.block(args, lambda *new: self.inline(block, new))

    def visit(self, op: Op) -> Sequence[Value]:
        result = self._replacement(op)
        if result is None:
            return super().visit(op)
        self.replace(op.result, result)
        return [result]

    def _replacement(self, op: Op) -> Value | None:
        """The result of an op whose meaning depends on the dtype; None for all other ops."""
        make = Make(self, op)
        operands = tuple(map(self.value, op.operands))
        if isinstance(op, Bitcast) and op.operands[0].tile.dtype == F16:
            bits = make.convert(encoded(make, operands[0], F16), _I16)
            return operands[0] if op.dtype == F16 else make.bitcast(bits, op.dtype)
        if len(op.results) != 1 or op.result.tile.dtype != F16:
            wide_dot = isinstance(op, Dot) and op.operands[0].tile.dtype == F16
            return self.one(replace(op, operands=operands, precision="ieee")) if wide_dot else None
        match op:
            case Bitcast():
                bits = make.bitcast(operands[0], _I16)
                return decoded(make, make.of("and", make.convert(bits, I32), 0xFFFF), F16)
            case Constant():
                return self.one(replace(op, array=op.array.astype(np.float32)))
            case Convert():
                return self._convert(make, op, operands[0])
            case Iota():
                lanes = make.add(Iota, shape=op.shape, dtype=I32, dim=op.dim)
                return rounded(make, make.convert(lanes, F32), F16)
            case Elementwise() if op.function not in _EXACT:
                return rounded(make, make.again(op, *operands), F16)
            case Reduce() | Scan() if op.monoid not in ("max", "min"):
                return rounded(make, make.again(op, *operands), F16)
            case _:
                return None

    def _convert(self, make: Make, op: Convert, x: Value) -> Value:
        if op.operands[0].tile.dtype == F16:
            return x
        return rounded(make, to_float32(make, x), F16)
