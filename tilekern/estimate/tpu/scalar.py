"""Semantics of the scalar instructions, on 32-bit words, pointers, predicates and unknown values.

A pointer is a Python integer far beyond 32 bits, so that it survives the compiler's shifts and sums of it. A float32 is
the word of its bits. A value that comes from data (a vector, an operand without values) is `Unknown`, and so are all
values computed from it.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable
from dataclasses import dataclass

_MASK = 0xFFFFFFFF
_POINTERS = 1 << 36  # from here on, integers are pointers; below, the sum of two 32-bit integers has room


@dataclass(frozen=True)
class Unknown:
    """A value that the dump does not tell; `reason` says where it comes from."""

    reason: str


Value = int | Unknown


def signed(x: int) -> int:
    """The 32 bits of x as a signed integer; pointers as they are."""
    if abs(x) >= _POINTERS:
        return x
    x &= _MASK
    return x - (1 << 32) if x & 0x80000000 else x


def _unsigned(x: int) -> int:
    return x & _MASK if abs(x) < _POINTERS else x


def _shift_right(x: int, n: int) -> int:
    return x >> n if abs(x) >= _POINTERS else (x & _MASK) >> n


_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}

_BINARY: dict[str, Callable[[int, int], int]] = {
    "sadd": lambda a, b: signed(a + b),
    "ssub": lambda a, b: signed(a - b),
    "smul": lambda a, b: signed((a * b) & _MASK),
    "smulhi.u32": lambda a, b: signed((_unsigned(a) * _unsigned(b)) >> 32),
    "sand": lambda a, b: signed(a & b),
    "sor": lambda a, b: signed(a | b),
    "sxor": lambda a, b: signed(a ^ b),
    "sshll": lambda a, b: signed((a << b) & _MASK if abs(a) < _POINTERS else a << b),
    "sshrl": _shift_right,
    "sshra": lambda a, b: signed(a) >> b,
    "smin": lambda a, b: min(signed(a), signed(b)),
    "smax": lambda a, b: max(signed(a), signed(b)),
    "smin.u32": lambda a, b: min(_unsigned(a), _unsigned(b)),
    "smax.u32": lambda a, b: max(_unsigned(a), _unsigned(b)),
    "scalar_lea": operator.add,
    "pxor": lambda a, b: int(bool(a) != bool(b)),
}

_FLOAT: dict[str, Callable[[float, float], float]] = {
    "sadd": operator.add,
    "ssub": operator.sub,
    "smul": operator.mul,
    "smin": min,
    "smax": max,
}

_UNARY: dict[str, Callable[[int], int]] = {
    **dict.fromkeys(("smov", "pmov", "int_to_ptr", "ptr_to_int"), lambda a: a),
    "pneg": lambda a: int(not a),
    "sclz": lambda a: 32 - (a & _MASK).bit_length(),
}


def rule(op: str) -> Callable[..., Value] | None:
    """The function of an instruction's operands that computes its result; None for an unknown instruction."""
    stem, _, dtype = op.partition(".")
    if stem in _LOGIC:
        return _LOGIC[stem]
    if stem == "scmp":
        return _comparison(dtype)
    if op == "scvt.s32.f32":
        return _strict(_converted)
    if dtype.startswith("f"):
        return _arithmetic(_FLOAT[stem]) if dtype == "f32" and stem in _FLOAT else None
    if stem in _UNARY:
        return _strict(_UNARY[stem])
    binary = _BINARY.get(op, _BINARY.get(stem))
    words = dtype in ("s32", "u32") or stem in ("scalar_lea", "pxor")
    return _strict(binary) if binary and words else None


def bits(x: float) -> int:
    """The bits of x, rounded to float32, as a signed integer."""
    try:
        return struct.unpack("<i", struct.pack("<f", x))[0]
    except OverflowError:
        return bits(math.copysign(math.inf, x))


def _converted(word: int) -> int:
    return bits(signed(word))


def _number(word: int) -> float:
    """The float32 that 32 bits stand for."""
    return struct.unpack("<f", struct.pack("<I", word & _MASK))[0]


def _arithmetic(function: Callable[[float, float], float]) -> Callable[..., Value]:
    """An operation on float32: computed in float64, then rounded; sums and products of two float32 round only once."""

    def apply(a: int, b: int) -> int:
        return bits(function(_number(a), _number(b)))

    return _strict(apply)


_VIEWS: dict[str, Callable[[int], float]] = {"s32": signed, "u32": _unsigned, "f32": _number}


def _strict(function: Callable[..., int]) -> Callable[..., Value]:
    """`function` on known operands; its result is the first operand that is unknown, if any is."""

    def apply(*operands: Value) -> Value:
        for operand in operands:
            if operand.__class__ is not int:
                return operand
        return function(*operands)

    return apply


def _comparison(dtype: str) -> Callable[..., Value] | None:
    """The comparison of a relation such as `eq.s32.totalorder`, to 0 or 1; None for an unknown relation."""
    relation, kind, *_ = dtype.split(".")
    if kind not in _VIEWS or relation not in _COMPARISONS:
        return None
    compare, view = _COMPARISONS[relation], _VIEWS[kind]

    def compared(a: int, b: int) -> int:
        return int(compare(view(a), view(b)))

    return _strict(compared)


def _select(predicate: Value, true: Value, false: Value) -> Value:
    if isinstance(predicate, Unknown):
        return predicate
    return true if predicate else false


def _or(a: Value, b: Value) -> Value:
    """The disjunction: 1 if any operand is known to be true, even if the other operand is unknown."""
    if any(x and x.__class__ is int for x in (a, b)):
        return 1
    return a if isinstance(a, Unknown) else b if isinstance(b, Unknown) else 0


def _and(a: Value, b: Value) -> Value:
    if 0 in (a, b):
        return 0
    return a if isinstance(a, Unknown) else b if isinstance(b, Unknown) else 1


def _nand(a: Value, b: Value) -> Value:
    conjunction = _and(a, b)
    return conjunction if isinstance(conjunction, Unknown) else int(not conjunction)


_LOGIC: dict[str, Callable[..., Value]] = {"scalar_select": _select, "por": _or, "pand": _and, "pnand": _nand}
