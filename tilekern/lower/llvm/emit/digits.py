"""Digits of numbers in registers, of which positions of accesses consist."""

from __future__ import annotations

from tilekern.ir.memory import Term
from tilekern.lower.llvm.ir_builder import Code
from tilekern.lower.llvm.ir_values import Reg


def digit_of(code: Code, term: Term, number: Reg, negative: bool) -> Reg:
    """(number // div) % mod of a term, as in Python: rounded down.

    `negative` is True if the number may be negative.
    """
    if term.div > 1:
        quotient = code.binary("sdiv", number, term.div)
        if negative:
            short = code.compare("icmp slt", code.binary("srem", number, term.div), 0)
            quotient = code.binary("sub", quotient, code.cast("zext", short, "i64"))
        number = quotient
    if term.mod:
        number = code.binary("srem", number, term.mod)
        if negative:
            wrapped = code.binary("add", number, term.mod)
            number = code.select(code.compare("icmp slt", number, 0), wrapped, number)
    return number
