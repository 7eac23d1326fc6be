"""Instructions that compute in registers. Semantics: PTX ISA 9.0, section 9.7.1 to 9.7.9."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import ml_dtypes
import numpy as np

from tilekern.ir.core import Array
from tilekern.lower.triton.ptx.machine import Execute, Machine
from tilekern.lower.triton.ptx.parse import Instruction, Number, Operand, PtxError, Register, Vector

DTYPES: dict[str, Any] = {
    "pred": np.bool_, "b1": np.bool_,
    "f16": np.float16, "f32": np.float32, "f64": np.float64, "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "tf32": np.float32,
    **{f"{kind}{bits}": np.dtype(f"u{bits // 8}") for kind in "ub" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
}  # fmt: skip
_PACKED = {"f16x2": "f16", "bf16x2": "bf16", "u16x2": "u16", "s16x2": "s16"}


def dtype_of(name: str) -> np.dtype[Any]:
    """The dtype of a type's name, as `s32`."""
    if name not in DTYPES:
        raise PtxError(f"type {name} is not known")
    return np.dtype(DTYPES[name])


def last_type(instruction: Instruction) -> str:
    """The last type in an opcode."""
    name = next((m for m in reversed(instruction.modifiers) if m in DTYPES or m in _PACKED), None)
    if name is None:
        raise PtxError("the type of this instruction is not known")
    return name


def value(machine: Machine, operand: Operand, ids: Array, dtype: np.dtype[Any]) -> Array:
    """An operand as numbers; a literal in hexadecimal has the bits of a float."""
    if isinstance(operand, Number) and operand.width and operand.width != dtype.itemsize * 8:
        wide = np.array([operand.bits], f"u{operand.width // 8}").view(f"f{operand.width // 8}")
        return np.full(len(ids), wide[0]).astype(dtype)
    if dtype == np.bool_:
        return machine.read(operand, ids, 1)
    bits = machine.read(operand, ids, dtype.itemsize * 8)
    if bits.dtype.itemsize != dtype.itemsize:  # a wider register, of which the low bits count
        bits = bits.astype(f"u{dtype.itemsize}")
    return bits.view(dtype)


def _halves(machine: Machine, operand: Operand, ids: Array, name: str) -> Array:
    """The two numbers of each thread's register, the lower half first; `name` is the type of the pair, as `f16x2`."""
    return machine.read(operand, ids, 32).view(np.uint16).view(dtype_of(_PACKED[name]))


def set_value(machine: Machine, operand: Operand, ids: Array, values: Array) -> None:
    """Write numbers to a register, which may be wider; signed numbers extend their sign."""
    if isinstance(operand, Register):
        width = machine.registers[operand.name].dtype.itemsize
        if values.dtype.itemsize < width and values.dtype != np.bool_:
            signed = values.dtype.kind == "i"
            kind = values if values.dtype.kind in "iu" else values.view(f"u{values.dtype.itemsize}")
            values = kind.astype(f"{'i' if signed else 'u'}{width}")
    machine.write(operand, ids, values)


def _wide(x: Array) -> Array:
    """Narrow floats as float32, in which one op is exact before its rounding."""
    return x.astype(np.float32) if x.dtype.itemsize < 4 and x.dtype.kind not in "iub" else x


def _fma(a: Array, b: Array, c: Array) -> Array:
    if a.dtype == np.float64:
        return a * b + c  # two roundings; no program here needs one
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(a.dtype)


def _product(a: Array, b: Array, c: Array | None = None) -> Array:
    return a * b if c is None else _fma(a, b, c)


def _shift_right(a: Array, n: Array) -> Array:
    bits = a.dtype.itemsize * 8
    n = n.astype(np.uint32)
    large = n >= bits
    shifted = a >> np.minimum(n, bits - 1).astype(a.dtype)
    return np.where(large, shifted >> np.array(bits - 1, a.dtype) if a.dtype.kind == "i" else 0, shifted).astype(
        a.dtype
    )


def _shift_left(a: Array, n: Array) -> Array:
    bits = a.dtype.itemsize * 8
    n = n.astype(np.uint32)
    return np.where(n >= bits, 0, a << np.minimum(n, bits - 1).astype(a.dtype)).astype(a.dtype)


def _trunc_div(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return a / b
    if np.any(b == 0):
        raise PtxError("an integer is divided by 0")
    wide = np.abs(a.astype(object)) // np.abs(b.astype(object))
    return np.where((a < 0) != (b < 0), -wide, wide).astype(a.dtype)


def _rem(a: Array, b: Array) -> Array:
    with np.errstate(over="ignore"):
        return a - _trunc_div(a, b) * b


_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "div": _trunc_div,
    "rem": _rem,
    "copysign": lambda sign, size: np.copysign(size, sign),
}
_UNARY: dict[str, Callable[[Array], Array]] = {
    "neg": lambda a: -a if a.dtype.kind != "u" else (~a + np.array(1, a.dtype)),
    "abs": np.abs,
    "not": lambda a: ~a,
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda a: 1 / a,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


def _elementwise(function: Callable[..., Array]) -> Execute:
    """An instruction `name.type d, a, ...` whose result has the type of its operands."""

    def execute(machine: Machine, instruction: Instruction, ids: Array) -> None:
        name = last_type(instruction)
        dtype = dtype_of(_PACKED.get(name, name))
        into, *operands = instruction.operands
        if name in _PACKED:
            values = [_halves(machine, x, ids, name) for x in operands]
            machine.write(into, ids, _narrow(function, values).view(np.uint32))
            return
        values = [value(machine, x, ids, dtype) for x in operands]
        set_value(machine, into, ids, _narrow(function, values))

    return execute


def _narrow(function: Callable[..., Array], values: list[Array]) -> Array:
    with np.errstate(all="ignore"):
        return np.asarray(function(*map(_wide, values))).astype(values[0].dtype)


def _extreme(machine: Machine, instruction: Instruction, ids: Array) -> None:
    """`min` and `max`: a NaN loses against a number, unless the opcode says `NaN`."""
    largest, strict = instruction.name == "max", "NaN" in instruction.modifiers

    def function(a: Array, b: Array, *more: Array) -> Array:
        if a.dtype.kind != "f":
            return np.maximum(a, b) if largest else np.minimum(a, b)
        pick = (np.maximum if largest else np.minimum) if strict else (np.fmax if largest else np.fmin)
        return pick(pick(a, b), more[0]) if more else pick(a, b)

    _elementwise(function)(machine, instruction, ids)


def _multiply(machine: Machine, instruction: Instruction, ids: Array) -> None:
    """`mul` and `mad`, of integers by their low or high half or wide."""
    name = last_type(instruction)
    if name in _PACKED or dtype_of(name).kind not in "iu":
        _elementwise(_product)(machine, instruction, ids)
        return
    dtype = dtype_of(name)
    into, a, b, *rest = instruction.operands
    bits = dtype.itemsize * 8
    x, y = (value(machine, v, ids, dtype) for v in (a, b))
    if "wide" in instruction.modifiers:
        wide = np.dtype(f"{dtype.kind}{dtype.itemsize * 2}")
        result = x.astype(wide) * y.astype(wide)
    elif "hi" in instruction.modifiers:
        wide = x.astype(object) * y.astype(object) >> bits
        result = np.array([v & ((1 << bits) - 1) for v in wide], f"u{dtype.itemsize}").view(dtype)
    else:
        result = x * y
    if rest:
        result = result + value(machine, rest[0], ids, result.dtype)
    machine.write(into, ids, result)


def _carried(machine: Machine, instruction: Instruction, ids: Array) -> None:
    """`add`, `sub` and `mad` of numbers longer than a register: `.cc` sets the carry, `addc` adds it."""
    into, a, b, *rest = instruction.operands
    dtype = dtype_of(last_type(instruction))
    bits = dtype.itemsize * 8
    x, y = (value(machine, v, ids, np.dtype(f"u{dtype.itemsize}")).astype(object) for v in (a, b))
    if rest:
        product = x * y
        x = product >> bits if "hi" in instruction.modifiers else product & ((1 << bits) - 1)
        y = value(machine, rest[0], ids, np.dtype(f"u{dtype.itemsize}")).astype(object)
    carry = machine.carry[ids].astype(object) if instruction.name.endswith("c") else 0
    total = x - y - carry if instruction.name.startswith("sub") else x + y + carry
    if "cc" in instruction.modifiers:
        machine.carry[ids] = [bool(v < 0 or v >> bits) for v in total]
    machine.write(into, ids, np.array([v & ((1 << bits) - 1) for v in total], f"u{dtype.itemsize}"))


def _shift(machine: Machine, instruction: Instruction, ids: Array) -> None:
    dtype = dtype_of(last_type(instruction))
    into, a, b = instruction.operands
    x, n = value(machine, a, ids, dtype), machine.read(b, ids, 32)
    machine.write(into, ids, _shift_left(x, n) if instruction.name == "shl" else _shift_right(x, n))


def _funnel(machine: Machine, instruction: Instruction, ids: Array) -> None:
    """`shf`: a shift of two registers together."""
    into, low, high, by = instruction.operands
    both = machine.read(high, ids, 32).astype(np.uint64) << np.uint64(32) | machine.read(low, ids, 32).astype(np.uint64)
    n = machine.read(by, ids, 32)
    n = (n & 31 if "wrap" in instruction.modifiers else np.minimum(n, 32)).astype(np.uint64)
    left = "l" in instruction.modifiers
    result = (both << n) >> np.uint64(32) if left else both >> n
    machine.write(into, ids, result.astype(np.uint32))


def _extract(machine: Machine, instruction: Instruction, ids: Array) -> None:
    """`bfe`: a field of bits; signed ones extend their sign."""
    dtype = dtype_of(last_type(instruction))
    into, a, start, count = instruction.operands
    bits = dtype.itemsize * 8
    x = value(machine, a, ids, dtype).astype(object)
    p, n = ((machine.read(v, ids, 32) & 255).astype(object) for v in (start, count))
    mask = (1 << bits) - 1
    fields = [(int(v) & mask) >> int(s) & ((1 << int(c)) - 1) for v, s, c in zip(x, p, n, strict=True)]
    if dtype.kind == "i":
        fields = [
            f - (1 << int(c)) if c and f >> (int(c) - 1) & 1 and s + c <= bits else f
            for f, s, c in zip(fields, p, n, strict=True)
        ]
    machine.write(into, ids, np.array([f & mask for f in fields], f"u{dtype.itemsize}"))


def _insert(machine: Machine, instruction: Instruction, ids: Array) -> None:
    into, a, b, start, count = instruction.operands
    width = dtype_of(last_type(instruction)).itemsize * 8
    x, y = (machine.read(v, ids, width).astype(object) for v in (a, b))
    p, n = ((machine.read(v, ids, 32) & 255).astype(object) for v in (start, count))
    full = (1 << width) - 1
    results = list[int]()
    for low, into_bits, s, c in zip(x, y, p, n, strict=True):
        mask = ((1 << int(c)) - 1) << int(s) & full
        results.append(int(into_bits) & ~mask & full | int(low) << int(s) & mask)
    machine.write(into, ids, np.array(results, f"u{width // 8}"))


def _permute(machine: Machine, instruction: Instruction, ids: Array) -> None:
    """`prmt`: four bytes of two registers, chosen by four bits each; the top bit repeats the sign."""
    into, a, b, control = instruction.operands
    x, y, c = (machine.read(v, ids, 32) for v in (a, b, control))
    source = np.stack([x, y], 1).view(np.uint8).reshape(len(ids), 8)
    picks = np.stack([c >> (4 * n) & 15 for n in range(4)], 1)
    chosen = np.take_along_axis(source, (picks & 7).astype(np.int64), 1)
    chosen = np.where(picks & 8, np.where(chosen & 128, 255, 0), chosen).astype(np.uint8)
    machine.write(into, ids, np.ascontiguousarray(chosen).view(np.uint32)[:, 0])


def _logic(machine: Machine, instruction: Instruction, ids: Array) -> None:
    """`lop3`: any function of three bits, by its table."""
    into, a, b, c, table = instruction.operands
    x, y, z = (machine.read(v, ids, 32) for v in (a, b, c))
    assert isinstance(table, Number)
    result = np.zeros(len(ids), np.uint32)
    for n in range(8):
        if table.bits >> n & 1:
            result |= (x if n & 4 else ~x) & (y if n & 2 else ~y) & (z if n & 1 else ~z)
    machine.write(into, ids, result)


def _count(machine: Machine, instruction: Instruction, ids: Array) -> None:
    """`popc`, `clz`, `brev`, `bfind`."""
    into, a = instruction.operands
    dtype = dtype_of(last_type(instruction))
    bits = dtype.itemsize * 8
    x = [int(v) for v in machine.read(a, ids, bits)]
    functions: dict[str, Callable[[int], int]] = {
        "popc": int.bit_count,
        "clz": lambda v: bits - v.bit_length(),
        "brev": lambda v: int(f"{v:0{bits}b}"[::-1], 2),
        "bfind": lambda v: v.bit_length() - 1 & 0xFFFFFFFF,
    }
    kind = f"u{dtype.itemsize}" if instruction.name == "brev" else "u4"
    machine.write(into, ids, np.array([functions[instruction.name](v) for v in x], kind))


_COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


def _holds(test: str, a: Array, b: Array) -> Array:
    """bool[threads]: whether a test, as `lt`, holds for the numbers of each thread."""
    a, b = _wide(a), _wide(b)
    unordered = (a != a) | (b != b)
    if test in ("nan", "num"):
        return unordered if test == "nan" else ~unordered
    if test in _COMPARISONS:
        return _COMPARISONS[test](a, b) & ~unordered
    return _COMPARISONS[test[:-1]](a, b) | unordered  # `ltu` and so on


def _compare_to_numbers(machine: Machine, instruction: Instruction, ids: Array) -> None:
    """`set` of pairs: 1.0 in each half for which a comparison holds, else 0."""
    test, result, name = instruction.modifiers[0], *instruction.modifiers[-2:]
    if name not in _PACKED or result not in _PACKED:
        raise PtxError("a comparison of these types is not known")
    into, *operands = instruction.operands
    a, b = (_halves(machine, x, ids, name) for x in operands)
    machine.write(into, ids, _holds(test, a, b).astype(dtype_of(_PACKED[result])).view(np.uint32))


def _compare(machine: Machine, instruction: Instruction, ids: Array) -> None:
    """`setp`: a comparison, combined with a predicate by `and`, `or`, `xor`; NaN is unequal, or true by `u`.

    The second predicate is the negated comparison of numbers; of pairs it is the comparison of the upper halves
    (PTX ISA, "Half Precision Comparison Instructions: setp").
    """
    name = last_type(instruction)
    operands = [*instruction.operands]
    combine = next((m for m in instruction.modifiers[1:] if m in ("and", "or", "xor")), None)
    into, second = operands[0], None
    if len(operands) - (combine is not None) == 4:
        second = operands.pop(1)
    test = instruction.modifiers[0]
    if name in _PACKED:
        halves = (_halves(machine, x, ids, name) for x in operands[1:3])
        results = [*_holds(test, *halves).reshape(-1, 2).T]
    else:
        holds = _holds(test, *(value(machine, x, ids, dtype_of(name)) for x in operands[1:3]))
        results = [holds, ~holds]
    if combine is not None:
        other = machine.read(operands[3], ids, 1)
        results = [_BINARY[combine](r, other) for r in results]
    machine.write(into, ids, results[0])
    if second is not None:
        machine.write(second, ids, results[1])


def _select(machine: Machine, instruction: Instruction, ids: Array) -> None:
    into, a, b, test = instruction.operands
    dtype = dtype_of(last_type(instruction))
    x, y = (value(machine, v, ids, dtype) for v in (a, b))
    set_value(machine, into, ids, np.where(machine.read(test, ids, 1), x, y).astype(dtype))


def _move(machine: Machine, instruction: Instruction, ids: Array) -> None:
    """`mov`, also of a register to its parts, and of parts to a register."""
    into, source = instruction.operands
    dtype = dtype_of(last_type(instruction))
    bits = dtype.itemsize * 8
    if isinstance(into, Vector):
        part = np.dtype(f"u{dtype.itemsize // len(into.parts)}")
        parts = machine.read(source, ids, bits).copy().view(part).reshape(len(ids), -1)
        for register, column in zip(into.parts, parts.T, strict=True):
            machine.write(register, ids, np.ascontiguousarray(column))
    elif isinstance(source, Vector):
        part = bits // len(source.parts)
        columns = [machine.read(p, ids, part) for p in source.parts]
        machine.write(into, ids, np.stack(columns, 1).view(f"u{bits // 8}")[:, 0])
    elif dtype == np.bool_:
        machine.write(into, ids, machine.read(source, ids, 1))
    else:
        machine.write(into, ids, value(machine, source, ids, dtype))


def _convert(machine: Machine, instruction: Instruction, ids: Array) -> None:
    """`cvt`: to the first type of the opcode from the second."""
    *_, to, of = (m for m in instruction.modifiers if m in DTYPES or m in _PACKED or m.endswith("x2"))
    into, *sources = instruction.operands
    if to.endswith("x2"):  # two numbers, the first one in the upper half
        dtype = dtype_of(to[:-2])
        if len(sources) == 2:
            high, low = (value(machine, s, ids, dtype_of(of)) for s in sources)
            pair = np.stack([_to_float(low, dtype, instruction), _to_float(high, dtype, instruction)], 1)
        else:  # from a pair
            half = dtype_of(of[:-2])
            packed = value(machine, sources[0], ids, np.dtype(f"u{2 * half.itemsize}")).copy()
            pair = _to_float(packed.view(half).astype(np.float32), dtype, instruction).reshape(len(ids), 2)
        machine.write(into, ids, np.ascontiguousarray(pair).view(f"u{2 * dtype.itemsize}")[:, 0])
        return
    x, dtype = value(machine, sources[0], ids, dtype_of(of)), dtype_of(to)
    if dtype.kind in "iu":
        result = x.astype(dtype) if x.dtype.kind in "iub" else _to_integer(_wide(x), dtype, instruction)
        if "sat" in instruction.modifiers and x.dtype.kind in "iu":
            limits = np.iinfo(dtype)
            result = np.clip(x.astype(np.int64), limits.min, limits.max).astype(dtype)
    else:
        result = _to_float(_rounded(_wide(x), instruction) if of == to else x, dtype, instruction)
    set_value(machine, into, ids, result)


def _rounded(x: Array, instruction: Instruction) -> Array:
    functions: dict[str, Any] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    mode = next((m for m in instruction.modifiers if m in functions), None)
    return x if mode is None else functions[mode](x)


def _to_integer(x: Array, dtype: np.dtype[Any], instruction: Instruction) -> Array:
    """Rounded and clamped; NaN becomes 0."""
    limits = np.iinfo(dtype)
    wide = np.nan_to_num(_rounded(x.astype(np.float64), instruction), nan=0, posinf=2.0**70, neginf=-(2.0**70))
    return np.array([min(max(int(v), limits.min), limits.max) for v in wide], dtype)


def _to_float(x: Array, dtype: np.dtype[Any], instruction: Instruction) -> Array:
    with np.errstate(all="ignore"):
        if "relu" in instruction.modifiers:
            x = np.maximum(x, 0)
        if "satfinite" in instruction.modifiers:
            top = float(cast(Any, ml_dtypes.finfo(dtype)).max)
            x = cast(Array, np.where(x == x, np.clip(_wide(x), -top, top), x))
        if "rna" in instruction.modifiers or (dtype == np.float32 and "tf32" in instruction.modifiers):
            bits = x.astype(np.float32).view(np.uint32)
            half = np.uint32(1 << 12) if "rna" in instruction.modifiers else np.uint32(0xFFF) + (bits >> 13 & 1)
            return ((bits + half) & np.uint32(0xFFFFE000)).view(np.float32)
        if "rz" in instruction.modifiers and dtype.itemsize < x.dtype.itemsize:
            near = x.astype(dtype)
            down = near.view(f"u{dtype.itemsize}") - 1
            return np.where(np.abs(near.astype(x.dtype)) > np.abs(x), down.view(dtype), near).astype(dtype)
        return x.astype(dtype)


TABLE: dict[str, Execute] = {
    **{name: _elementwise(function) for name, function in _BINARY.items()},
    **{name: _elementwise(function) for name, function in _UNARY.items()},
    **dict.fromkeys(("mul", "mad", "fma"), _multiply),
    **dict.fromkeys(("add.cc", "addc", "sub.cc", "subc", "mad.lo.cc", "mad.hi.cc", "madc"), _carried),
    **dict.fromkeys(("min", "max"), _extreme),
    **dict.fromkeys(("shl", "shr"), _shift),
    **dict.fromkeys(("popc", "clz", "brev", "bfind"), _count),
    "shf": _funnel, "bfe": _extract, "bfi": _insert, "prmt": _permute, "lop3": _logic, "setp": _compare,
    "set": _compare_to_numbers, "selp": _select, "mov": _move, "cvt": _convert, "cvta": _move,
}  # fmt: skip
