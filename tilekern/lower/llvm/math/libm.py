"""Functions of float64 from C's library, called for each lane in turn.

Their errors are the library's: with glibc 2.36 below 2 units of the last place, but up to 4 for lgamma.
"""

from __future__ import annotations

from collections.abc import Callable

from tilekern.lower.llvm.ir_builder import Code
from tilekern.lower.llvm.ir_values import F64, I32, Reg, constant

_PURE = "nounwind willreturn memory(none)"

_NAMES = frozenset(
    {"pow", "atan2", "expm1", "log2", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh"}
    | {"tanh", "asinh", "acosh", "atanh", "erf"}
)
"""Functions with the same name in C, whose results are within 2 units of the last place."""


def emit_libm(code: Code, name: str, *operands: Reg) -> Reg | None:
    """Emit a function of float64; None if its name is not in `_NAMES`."""
    return call_libm(code, name, *operands) if name in _NAMES else None


def call_libm(code: Code, name: str, *operands: Reg) -> Reg:
    """Call a function of C's library, by its name."""
    return for_each_lane(code, lambda *lanes: code.call_external(name, F64, *lanes, attributes=_PURE), *operands)


def lgamma(code: Code, x: Reg) -> Reg:
    """log|Γ(x)| to the digits of float32.

    Not by C's `lgamma`, which stores the sign of Γ(x) in a variable that all threads share.
    """
    sign = code.alloca(I32)

    def lane(x: Reg) -> Reg:
        return code.call_external("lgamma_r", F64, x, sign, attributes="nounwind willreturn")

    return for_each_lane(code, lane, x)


def for_each_lane(code: Code, compute: Callable[..., Reg], *operands: Reg) -> Reg:
    """Apply a function of scalars to each lane."""
    if not operands[0].type.lanes:
        return compute(*operands)
    result = constant(0.0, operands[0].type)
    for lane in range(result.type.lanes):
        result = code.insert(result, compute(*(code.extract(x, lane) for x in operands)), lane)
    return result
