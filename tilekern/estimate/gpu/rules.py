"""Rules of the instructions of control flow: the values that each operation computes."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from itertools import product

from tilekern.estimate.gpu.sass import Instruction
from tilekern.estimate.gpu.scalar import MASK, Bytes, Thread, Value, bits, number, signed

Rule = Callable[[Thread, Instruction], "tuple[Value | Bytes, ...] | None"]
"""Values of an instruction's results; None if no value is known."""

RULES: dict[str, Rule] = {}
"""Rules by operation."""


def evaluate(instruction: Instruction, thread: Thread) -> None:
    """Run an instruction on a thread, unless its guard is false. An instruction runs if its guard is not known."""
    if thread.holds(instruction.guard, instruction.negated) is False:
        return
    rule, values = RULES.get(instruction.name), thread.exchanged.get(instruction.address)
    if values is None and rule is not None:
        values = rule(thread, instruction)
    if values is None:
        thread.registers.update(dict.fromkeys(instruction.writes))
        return
    pairs = len(values) > len(instruction.results)
    for register, value in zip(instruction.writes if pairs else instruction.results, values, strict=False):
        thread.write(register, value)


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


def _values(thread: Thread, operands: tuple[str, ...]) -> list[int] | None:
    """Values of operands; None if any value is not known."""
    values = [value for operand in operands if (value := thread.read(operand)) is not None]
    return values if len(values) == len(operands) else None


def _integers(count: int) -> Callable[[Callable[..., tuple[int, ...]]], Rule]:
    """A decorator: the rule of a function of the values of the first `count` inputs, and of the `suffixes`."""

    def make(function: Callable[..., tuple[int, ...]]) -> Rule:
        def rule(thread: Thread, instruction: Instruction) -> tuple[Value, ...] | None:
            values = _values(thread, instruction.inputs[:count])
            return None if values is None else function(*values, suffixes=instruction.suffixes)

        return rule

    return make


_PREDICATES = ("P", "UP", "!P", "!UP")


def _word(thread: Thread, operand: str) -> int | None:
    """The value of an addend, of up to 33 bits: -x is the complement of x, plus 1. None if it is not known."""
    if not operand.startswith(("-R", "-UR")):
        return thread.read(operand)
    value = thread.read(operand[1:])
    return None if value is None else (value ^ MASK) + 1


def _sum(total: int, instruction: Instruction) -> tuple[Value, ...]:
    """A sum modulo 2^32, then 0 or 1 for each carry among the instruction's results."""
    return (total & MASK, *([int(total >> 32 > 0)] * (len(instruction.results) - 1)))


def _same(value: int) -> int:
    return value


def _reading(suffixes: tuple[str, ...]) -> Callable[[int], int]:
    """The function from bits to an operation's integers: as they are for U32, else signed."""
    return _same if "U32" in suffixes else signed


@_rule("IADD3", "UIADD3", "IADD", "VIADD")
def _add(thread: Thread, instruction: Instruction) -> tuple[Value, ...] | None:
    carries = _values(thread, tuple(o for o in instruction.inputs if o.startswith(_PREDICATES)))
    words = [_word(thread, o) for o in instruction.inputs if not o.startswith(_PREDICATES)]
    addends = [word for word in words if word is not None]
    if carries is None or len(addends) < len(words):
        return None
    if "16x2" in instruction.suffixes:  # nothing is carried from the low half
        return ((sum(addends) & 0xFFFF) + (sum(word & ~0xFFFF for word in addends) & MASK),)
    return _sum(sum(addends) + sum(carries), instruction)


@_rule("IMAD", "UIMAD")
def _multiply_add(thread: Thread, instruction: Instruction) -> tuple[Value, ...] | None:
    a, b, c, *carry = instruction.inputs
    factors, suffixes = (thread.read(a), thread.read(b)), instruction.suffixes
    if 0 in factors:
        exact = 0
    elif factors[0] is None or factors[1] is None:
        return None
    else:
        reading = _reading(suffixes)
        exact = reading(factors[0]) * reading(factors[1])
    if "WIDE" in suffixes:
        low, high = thread.pair(c)
        if low is None or high is None:
            return None
        total = exact + (high << 32 | low)
        return total & MASK, total >> 32 & MASK
    addend, carries = thread.read(c), _values(thread, tuple(carry))
    if addend is None or carries is None:
        return None
    if "HI" in suffixes:
        return ((exact >> 32) + addend & MASK,)
    return _sum((exact & MASK) + addend + (sum(carries) if "X" in suffixes else 0), instruction)


@_rule("MOV", "UMOV", "R2UR", "S2R", "S2UR", "LDC", "ULDC", "LDCU", "CS2R")
def _move(thread: Thread, instruction: Instruction) -> tuple[Value, ...] | None:
    source = instruction.inputs[0]
    if (entry := re.match(r"c\[0x2\]\s*\[(U?R\d+)\]", source)) and (offset := thread.read(entry[1])) is not None:
        return (offset // 4,)  # a table of branch targets: see `Walker`, which knows them by their number
    if source.startswith("SR_"):
        return (thread.special.get(source),)
    if len(instruction.writes) == 2:
        return thread.pair(source) if source != "SRZ" else (0, 0)
    return (thread.read(source),)


@_rule("STL")
def _spill(thread: Thread, instruction: Instruction) -> tuple[Value, ...] | None:
    source = re.match(r"R(\d+)$", instruction.inputs[-1])
    if source is None:
        return tuple(thread.read(instruction.inputs[-1]) for _ in instruction.spilled)
    return tuple(thread.read(f"R{int(source[1]) + n}") for n in range(len(instruction.spilled)))


@_rule("LDL")
def _fill(thread: Thread, instruction: Instruction) -> tuple[Value | Bytes, ...]:
    return tuple(thread.registers.get(place, 0) for place in instruction.spilled)


_PLACE = re.compile(r"\[(R\d+)\.64(?:\+(-?0x[0-9a-f]+))?\]$")


@_rule("LDG")
def _load(thread: Thread, instruction: Instruction) -> tuple[Value, ...] | None:
    """Words of global memory, or one number of 8 or 16 bits."""
    place = _PLACE.search(instruction.inputs[0])
    if not thread.memory or place is None:
        return None
    low, high = thread.pair(place[1])
    if low is None or high is None:
        return None
    address = (high << 32 | low) + int(place[2] or "0", 16)
    narrow = next((s for s in instruction.suffixes if s in ("U8", "S8", "U16", "S16")), "")
    contents = thread.load(address, int(narrow[1:]) // 8 if narrow else 4 * len(instruction.writes))
    if contents is None:
        return None
    if narrow:
        return (int.from_bytes(contents, "little", signed=narrow[0] == "S") & MASK,)
    return struct.unpack(f"<{len(contents) // 4}I", contents)


@_rule("HFMA2")
def _constant(thread: Thread, instruction: Instruction) -> tuple[Value, ...] | None:
    """A constant of two float16, by which compilers load integers: 0 * 0 + constant."""
    a, b, high, low = (*instruction.inputs, "", "", "")[:4]
    if {a.lstrip("-"), b.lstrip("-")} != {"RZ"}:
        return None
    try:
        high, low = (struct.unpack("<H", struct.pack("<e", float(x)))[0] for x in (high, low))
    except ValueError:
        return None
    return (high << 16 | low,)


@_rule("SHFL")
def _shuffle(thread: Thread, instruction: Instruction) -> tuple[Value, ...] | None:
    # The first thread reads its own value only from lane 0.
    value, lane = instruction.inputs[:2]
    return (1, thread.read(value)) if "IDX" in instruction.suffixes and thread.read(lane) == 0 else None


@_rule("ELECT")
def _elect(thread: Thread, instruction: Instruction) -> tuple[Value, ...]:
    return (1, 0)[: len(instruction.results)]


@_rule("VOTE", "VOTEU")
def _vote(thread: Thread, instruction: Instruction) -> tuple[Value, ...] | None:
    value = thread.read(instruction.inputs[0])
    if re.match(r"U?P", instruction.results[0]):
        return (value,)
    return None


@_rule("SYNCS", "USETMAXREG")
def _wait(thread: Thread, instruction: Instruction) -> tuple[Value, ...]:
    return (1,)  # the wait succeeds; the simulation knows when


@_rule("UTCATOMSWS")
def _allocate(thread: Thread, instruction: Instruction) -> tuple[Value, ...]:
    return (1, 0)[: len(instruction.results)]  # tensor memory is free


@_rule("LOP3", "ULOP3")
def _logic(thread: Thread, instruction: Instruction) -> tuple[Value, ...] | None:
    *three, table = instruction.inputs[:4]
    if (lut := thread.read(table)) is None:
        return None
    a, b, c = (thread.read(o) for o in three)
    result = 0
    for n in range(8):
        if lut >> n & 1:
            term = MASK
            for value, bit in ((a, n >> 2 & 1), (b, n >> 1 & 1), (c, n & 1)):
                if value is None:
                    if _depends(lut, (a, b, c)):
                        return None
                    continue
                term &= value if bit else ~value & MASK
            result |= term
    predicate = re.match(r"U?P", instruction.results[0])
    return (int(result != 0), result) if predicate else (result,)


def _depends(lut: int, values: tuple[Value, ...]) -> bool:
    """True if a table depends on a value that is not known; a word of zeros or of ones fixes its input."""
    for n in range(8):
        fixed = all(
            v is None or v not in (0, MASK) or (v != 0) == bool(n >> s & 1)
            for v, s in zip(values, (2, 1, 0), strict=True)
        )
        for value, shift in zip(values, (2, 1, 0), strict=True):
            if fixed and value is None and (lut >> n & 1) != (lut >> (n ^ 1 << shift) & 1):
                return True
    return False


@_rule("PLOP3", "UPLOP3")
def _predicate_logic(thread: Thread, instruction: Instruction) -> tuple[Value, ...] | None:
    choices = [(0, 1) if v is None else (int(v != 0),) for v in map(thread.read, instruction.inputs[:3])]
    indices = [a << 2 | b << 1 | c for a, b, c in product(*choices)]
    tables = _values(thread, instruction.inputs[3:5])
    return None if tables is None else tuple(_only({table >> n & 1 for n in indices}) for table in tables)


def _only(values: set[int]) -> Value:
    """The only element of a set; None if there are several."""
    return min(values) if len(values) == 1 else None


_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
}


_COMBINE: dict[str, Callable[[bool, bool], bool]] = {
    "AND": lambda a, b: a and b,
    "OR": lambda a, b: a or b,
    "XOR": lambda a, b: a != b,
}


@_rule("ISETP", "UISETP")
def _compare(thread: Thread, instruction: Instruction) -> tuple[Value, ...] | None:
    suffixes, inputs = instruction.suffixes, instruction.inputs
    third, a, b = thread.read(inputs[2]), thread.read(inputs[0]), thread.read(inputs[1])
    holds = None if a is None or b is None else _compared(thread, instruction, a, b)
    combine = next((_COMBINE[s] for s in suffixes if s in _COMBINE), _COMBINE["AND"])
    firsts, seconds = set[int](), set[int]()
    for h in (False, True) if holds is None else (holds,):
        for t in (False, True) if third is None else (bool(third),):
            firsts.add(int(combine(h, t)))
            seconds.add(int(combine(not h, t)))
    return _only(firsts), _only(seconds)


def _compared(thread: Thread, instruction: Instruction, a: int, b: int) -> bool | None:
    suffixes = instruction.suffixes
    if "U32" not in suffixes:
        a, b = signed(a), signed(b)
    holds = _COMPARE[suffixes[0]](a, b)
    if "EX" not in suffixes:
        return holds
    low = thread.read(instruction.inputs[3])  # a and b are high words, after a comparison of the low words
    if a != b:
        return holds
    return None if low is None else bool(low)


@_rule("SEL", "USEL")
def _select(thread: Thread, instruction: Instruction) -> tuple[Value, ...] | None:
    if (chosen := thread.read(instruction.inputs[2])) is None:
        return None
    return (thread.read(instruction.inputs[0 if chosen else 1]),)


@_rule("SHF", "USHF")
@_integers(3)
def _shift(low: int, by: int, high: int, suffixes: tuple[str, ...]) -> tuple[int, ...]:
    word, by = high << 32 | low, by & 63 if "W" not in suffixes else by & 31
    if "S32" in suffixes or "S64" in suffixes:
        word = signed(high) << 32 | low
    if "L" in suffixes:
        if "HI" in suffixes:
            return ((word << by) >> 32 & MASK,)
        return (low << by & MASK,)
    shifted = word >> by
    return ((shifted >> 32 if "HI" in suffixes else shifted) & MASK,)


@_rule("LEA", "ULEA")
def _scaled_add(thread: Thread, instruction: Instruction) -> tuple[Value, ...] | None:
    suffixes, inputs = instruction.suffixes, list(instruction.inputs)
    carries = [o for o in inputs if o.startswith(_PREDICATES)]
    inputs = [o for o in inputs if o not in carries]
    values, added = _values(thread, tuple(inputs)), _values(thread, tuple(carries))
    if values is None or added is None:
        return None
    if "HI" not in suffixes:
        a, b, by = (*values, 0)[:3]
        scaled = a << by & MASK
    elif "SX32" in suffixes:
        a, b, by = values[0], values[1], values[-1]
        scaled = signed(a) << by >> 32 & MASK
    else:
        a, b, c, by = values
        scaled = (c << 32 | a) << by >> 32 & MASK
    return _sum(scaled + b + sum(added), instruction)


@_rule("SGXT", "USGXT")
@_integers(2)
def _extend(value: int, width: int, suffixes: tuple[str, ...]) -> tuple[int, ...]:
    value &= (1 << width) - 1
    if "U32" not in suffixes and width and value >> width - 1:
        value -= 1 << width
    return (value & MASK,)


@_rule("IABS")
@_integers(1)
def _absolute(value: int, suffixes: tuple[str, ...]) -> tuple[int, ...]:
    return (abs(signed(value)) & MASK,)


@_rule("POPC", "UPOPC")
@_integers(1)
def _count(value: int, suffixes: tuple[str, ...]) -> tuple[int, ...]:
    return (value.bit_count(),)


@_rule("IMNMX", "VIMNMX", "UIMNMX", "VIADDMNMX")
def _least(thread: Thread, instruction: Instruction) -> tuple[Value, ...] | None:
    *values, least = instruction.inputs[: 4 if instruction.name == "VIADDMNMX" else 3]
    numbers, smallest = _values(thread, tuple(values)), thread.read(least)
    if numbers is None or smallest is None:
        return None
    if instruction.name == "VIADDMNMX":
        numbers = [numbers[0] + numbers[1] & MASK, numbers[2]]
    return ((min if smallest else max)(numbers, key=_reading(instruction.suffixes)),)


@_rule("PRMT", "UPRMT")
def _permute(thread: Thread, instruction: Instruction) -> tuple[Value | Bytes, ...] | None:
    a, selector, b = instruction.inputs[:3]
    if (chosen := thread.read(selector)) is None:
        return None
    eight_bytes = (*thread.bytes_of(a), *thread.bytes_of(b))

    def byte(n: int) -> Value:
        value, sign = eight_bytes[chosen >> 4 * n & 7], chosen >> 4 * n & 8
        return 255 * (value >> 7) if value is not None and sign else value

    result = byte(0), byte(1), byte(2), byte(3)
    octets = [value for value in result if value is not None]
    return (int.from_bytes(octets, "little") if len(octets) == 4 else result,)


@_rule("P2R")
def _pack(thread: Thread, instruction: Instruction) -> tuple[Value, ...] | None:
    mask = thread.read(instruction.inputs[2])
    if mask is None:
        return None
    packed = 0
    for n in range(7):
        value = thread.read(f"P{n}")
        if mask >> n & 1:
            if value is None:
                return None
            packed |= bool(value) << n
    return (packed,)


@_rule("R2P")
def _unpack(thread: Thread, instruction: Instruction) -> tuple[Value, ...]:
    value, mask = thread.read(instruction.operands[1]), thread.read(instruction.operands[2]) or 0
    return tuple(
        thread.read(f"P{n}") if not mask >> n & 1 else None if value is None else value >> n & 1 for n in range(7)
    )


# --- division of integers goes through float32 ------------------------------------------------------------------------


@_rule("I2F", "I2FP")
@_integers(1)
def _to_float(value: int, suffixes: tuple[str, ...]) -> tuple[int, ...]:
    return (bits(float(signed(value) if "S32" in suffixes else value)),)


@_rule("F2I")
@_integers(1)
def _to_integer(value: int, suffixes: tuple[str, ...]) -> tuple[int, ...]:
    real = number(value)
    low, high = (0, MASK) if "U32" in suffixes else (-(1 << 31), (1 << 31) - 1)
    whole = low if math.isnan(real) else high if real > high else low if real < low else math.trunc(real)
    return (whole & MASK,)


@_rule("MUFU")
def _reciprocal(thread: Thread, instruction: Instruction) -> tuple[Value, ...] | None:
    value = thread.read(instruction.inputs[0])
    if value is None or instruction.suffixes != ("RCP",) or not number(value):
        return None
    return (bits(1 / number(value)),)
