"""Elementwise ops, casts and selects on registers of one element, or of a vector."""

from __future__ import annotations

from tilekern.ir.compute import Bitcast, Convert, Dot, Select
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.types import BF16, BOOL, DTYPES, F16, DType, is_float8, kind_of
from tilekern.lower.llvm.element_types import register_type
from tilekern.lower.llvm.ir_builder import Code
from tilekern.lower.llvm.ir_values import Reg
from tilekern.lower.llvm.math.functions import emit_function

KINDS = (Elementwise, Select, Convert, Bitcast)
"""Ops that compute; the other virtual ops only move data."""

_INF = float("inf")
_E5M2 = DTYPES["f8e5m2"]

_FLOAT = {"add": "fadd", "sub": "fsub", "mul": "fmul", "div": "fdiv", "rem": "frem"}
_INTEGER = {"add": "add", "sub": "sub", "mul": "mul", "and": "and", "or": "or", "xor": "xor"}
_UNARY = {
    "abs": "llvm.fabs",
    "floor": "llvm.floor",
    "ceil": "llvm.ceil",
    "round_even": "llvm.roundeven",
    "round_away": "llvm.round",
    "sqrt": "llvm.sqrt",
}
_ORDERED = {"eq": "oeq", "ne": "une", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge"}
_SHIFTS = {"shift_left": "shl", "shift_right_logical": "lshr", "shift_right_arithmetic": "ashr"}


def emit(code: Code, op: Op, operands: list[Reg], flushes: bool = False) -> Reg:
    """The result of an elementwise op.

    Args:
      code: the function.
      op: legal; an `Elementwise`, `Select`, `Convert` or `Bitcast`.
      operands: registers of equally many elements.
      flushes: a cast to bfloat16 may give 0 for subnormal numbers.
    """
    match op:
        case Select():
            return code.select(*operands)
        case Convert():
            return convert(code, operands[0], op.operands[0].tile.dtype, op.dtype, flushes)
        case Bitcast():
            return code.cast("bitcast", operands[0], register_type(op.dtype).scalar)
        case _:
            assert isinstance(op, Elementwise), op.name
            return compute(code, op.function, op.operands[0].tile.dtype, *operands)


def compute(code: Code, name: str, dtype: DType, *operands: Reg) -> Reg:
    """A function of the elementwise table, of operands of a dtype."""
    if kind_of(dtype) == "float":
        return _float(code, name, *operands)
    return _integer(code, name, kind_of(dtype) == "signed", *operands)


# --- floats --------------------------------------------------------------------------------------------------------


def _float(code: Code, name: str, *operands: Reg) -> Reg:
    x = operands[0]
    if name in _FLOAT:
        return code.binary(_FLOAT[name], *operands)
    if name in _ORDERED:
        return code.compare(f"fcmp {_ORDERED[name]}", *operands)
    if name in _UNARY:
        return code.intrinsic(_UNARY[name], x)
    match name:
        case "neg":
            return code.unary("fneg", x)
        case "max" | "min":
            return extreme(code, name, *operands)
        case "is_finite":
            return code.compare("fcmp olt", code.intrinsic("llvm.fabs", x), _INF)
        case "sign":
            signed = code.select(code.compare("fcmp olt", x, 0.0), -1.0, x)
            return code.select(code.compare("fcmp ogt", x, 0.0), 1.0, signed)
        case _:
            result = emit_function(code, name, *operands)
            assert result is not None, name
            return result


def extreme(code: Code, name: str, x: Reg, y: Reg) -> Reg:
    """The larger or smaller float; NaN if one is NaN, and either of two zeros. `x` had better be ready first."""
    return code.intrinsic(f"llvm.{name}imum", x, y, flags="nsz")


# --- integers ------------------------------------------------------------------------------------------------------


def _integer(code: Code, name: str, signed: bool, *operands: Reg) -> Reg:
    x = operands[0]
    if name in _INTEGER:
        return code.binary(_INTEGER[name], *operands)
    if name in ("eq", "ne"):
        return code.compare(f"icmp {name}", *operands)
    if name in ("lt", "le", "gt", "ge"):
        return code.compare(f"icmp {'s' if signed else 'u'}{name}", *operands)
    if name in _SHIFTS:
        return _shift(code, name, *operands)
    match name:
        case "div" | "rem":
            return _quotient(code, name, signed, *operands)
        case "max" | "min":
            return code.intrinsic(f"llvm.{'s' if signed else 'u'}{name}", *operands)
        case "neg":
            return code.binary("sub", 0, x)
        case "not":
            return code.binary("xor", x, -1)
        case "abs":
            return code.intrinsic_with_flag("llvm.abs", x)
        case "clz":
            return code.intrinsic_with_flag("llvm.ctlz", x)
        case _:
            assert name == "population_count", name
            return code.intrinsic("llvm.ctpop", x)


def _quotient(code: Code, name: str, signed: bool, x: Reg, y: Reg) -> Reg:
    """Divide without traps: 1 replaces a divisor of 0, and x / -1 is computed as 0 - x."""
    divisor = code.select(code.compare("icmp eq", y, 0), 1, y)
    if not signed:
        return code.binary(f"u{name}", x, divisor)
    negates = code.compare("icmp eq", y, -1)
    quotient = code.binary(f"s{name}", x, code.select(negates, 1, divisor))
    return code.select(negates, code.binary("sub", 0, x), quotient) if name == "div" else quotient


def _shift(code: Code, name: str, x: Reg, amount: Reg) -> Reg:
    """Shift. Amounts from the number of bits on shift all bits out; an arithmetic shift then leaves the sign."""
    bits = x.type.bits
    least = code.intrinsic("llvm.umin", amount, bits - 1)
    shifted = code.binary(_SHIFTS[name], x, least)
    if name == "shift_right_arithmetic":
        return shifted
    return code.select(code.compare("icmp ult", amount, bits), shifted, 0)


# --- casts ---------------------------------------------------------------------------------------------------------


def convert(code: Code, x: Reg, source: DType, dtype: DType, flushes: bool = False) -> Reg:
    """Emit a legal cast."""
    if source == dtype:
        return x
    scalar = register_type(dtype).scalar
    kinds = kind_of(source), kind_of(dtype)
    if dtype == BOOL:
        return code.compare("fcmp une", x, 0.0) if kinds[0] == "float" else code.compare("icmp ne", x, 0)
    if source == BF16:
        wide = code.binary("shl", code.cast("zext", x, "i32"), 16)
        return code.cast("bitcast", wide, "float")
    if is_float8(source):
        return _from_float8(code, x, source)
    if dtype == BF16:
        return _to_bfloat16(code, x, flushes)
    if dtype == F16:
        # The fence keeps LLVM from folding this with a cast from float64: a cast from float64 to half has no code.
        x = code.intrinsic("llvm.arithmetic.fence", x)
    if kinds == ("float", "float"):
        return code.cast("fpext" if dtype.itemsize > source.itemsize else "fptrunc", x, scalar)
    if kinds[0] == "float":
        return code.saturating_to_int(x, scalar, signed=kinds[1] == "signed")
    if kinds[1] == "float":
        return code.cast("sitofp" if kinds[0] == "signed" else "uitofp", x, scalar)
    if dtype.itemsize < source.itemsize and source != BOOL:
        return code.cast("trunc", x, scalar)
    result = code.cast("sext" if kinds[0] == "signed" else "zext", x, scalar)
    if source == BOOL and x.type.lanes in (2, 4) and code.module.machine.vector_bytes == 64:
        # LLVM 22 turns a sum of 2 or 4 bools into a population count of an i2 or i4, which it has no code for.
        return code.binary("xor", result, code.splat(code.cast("sext", code.opaque_false(), scalar), x.type.lanes))
    return result


def _from_float8(code: Code, x: Reg, source: DType) -> Reg:
    """8-bit floats as float32, by float16, whose cast to float32 is one instruction, exact for subnormal numbers too.

    E5M2 is the upper half of float16. E4M3 has a bias of 7, float16 one of 15: as bits of a float16, a number is
    2^-8 of its value; NaN has the bits of a number then.
    """
    if source == _E5M2:
        half = code.binary("shl", code.cast("zext", x, "i16"), 8)
        return code.cast("fpext", code.cast("bitcast", half, "half"), "float")
    half = code.binary("and", code.binary("shl", code.cast("sext", x, "i16"), 7), -0x4080)  # 0xBF80
    is_nan = code.compare("icmp eq", code.binary("and", half, 0x3F80), 0x3F80)
    half = code.cast("bitcast", code.select(is_nan, 0x7E00, half), "half")
    return code.binary("fmul", code.cast("fpext", half, "float"), 256.0)


def _to_bfloat16(code: Code, x: Reg, flushes: bool) -> Reg:
    """Round to the upper 16 bits, to nearest even; NaN stays NaN."""
    if flushes and x.type.lanes in (16, 32) and code.module.machine.casts_to_bfloat16:
        return code.to_bfloat16(x)
    bits = code.cast("bitcast", x, "i32")
    high = code.binary("lshr", bits, 16)
    half = code.binary("add", code.binary("and", high, 1), 0x7FFF)
    rounded = code.binary("lshr", code.binary("add", bits, half), 16)
    result = code.select(code.compare("fcmp uno", x, 0.0), code.binary("or", high, 0x40), rounded)
    return code.cast("trunc", result, "i16")


def may_flush(func: Func) -> frozenset[Value]:
    """Casts to bfloat16 that may turn subnormal numbers into 0.

    Casts that only dots use, for the hardware's dots flush such numbers anyway; and casts of numbers that were cast
    from 8 bits, none of which is so small.
    """
    casts = [op for op in func.walk() if isinstance(op, Convert)]
    of_bytes = {op.result for op in casts if op.operands[0].tile.dtype.itemsize == 1}
    return _only_multiplied(func) | {op.result for op in casts if op.operands[0] in of_bytes}


def _only_multiplied(func: Func) -> frozenset[Value]:
    casts = {op.result for op in func.walk() if isinstance(op, Convert)}
    used_elsewhere = {v for op in func.walk() if not isinstance(op, Dot) for v in op.operands}
    used_elsewhere |= {v for op in func.walk() for region in op.regions for v in region.results}
    return frozenset(casts - used_elsewhere)
