"""The scalar part of libtpu's VLIW bundles, from the text that it dumps.

A line is a bundle: `0xba LB: > { %s99_s27 = sshll.u32 %s97_s26, 4 ;; %14 = sbr.rel (!%p9_p3) target bundleno = 5 }`;
`%s99_s27` is the value 99, in the register s27. Vector instructions are dropped: they take their place in a bundle, and
decide nothing else about time. Their use of the slots is in another dump (`slots.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tilekern.estimate.tpu.scalar import bits

Terms = tuple[int | str, ...]
"""An operand: a sum of integers, registers ("s27", "p3") and symbols ("#allocation4")."""


class DumpError(Exception):
    """A dump of the compiler has an unexpected form; the message quotes it."""


@dataclass(frozen=True)
class Instruction:
    """A scalar instruction, or a vector instruction with a scalar result.

    Attributes:
      op: as in the dump, e.g. "sadd.s32".
      target: the register that it writes, else the name of its value; "" if it has neither.
      operands: the operands in order; of a branch, the number of the bundle that it goes to.
      predicate: the register that must be true, or false; "" if the instruction always runs.
      negated: True if the predicate must be false.
      spaces: of a DMA, the memories that it reads and writes: "hbm", "vmem" or "smem"; else empty.
    """

    op: str
    target: str
    operands: tuple[Terms, ...]
    predicate: str = ""
    negated: bool = False
    spaces: tuple[str, str] = ("", "")


Bundle = tuple[Instruction, ...]

_LINE = re.compile(r"\s*(0x[0-9a-f]+|\d+)\s*(?:[A-Z]{2})?\s*:(?:\s|>)*\{(.*)\}\s*$")
_INSTRUCTION = re.compile(r"(?:%(\S+) = )?([a-zA-Z][\w.\-]*)\s*(.*)$")
_PREDICATE = re.compile(r"\((!?)%(\w+)(?:,\s*%(\w+))?\)")
_POINTER = re.compile(r"%(\w+) = (?:scalar_lea|int_to_ptr|inlined_call_operand)\.(\w+)")
_TERM = re.compile(r"%(\w+)|(#\w+)|\$?(-?(?:0x[0-9a-f]+|\d+))")
_SCALAR_RESULT = re.compile(r"[sp]\d+")


def parse(text: str) -> tuple[Bundle, ...]:
    """The bundles of a `packed-bundles-post-ra` dump.

    Raises:
      DumpError: a line or an operand has another form.
    """
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    spaces = dict(_POINTER.findall(text))
    bundles: list[Bundle] = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            if "{" in line:
                raise DumpError(f"not a bundle: {line.strip()[:200]}")
            continue
        if int(match[1], 0) != len(bundles):
            raise DumpError(f"expected bundle {len(bundles)}, got {match[1]}")
        parts = (_instruction(part.strip(), spaces) for part in match[2].split(";;"))
        bundles.append(tuple(part for part in parts if part is not None))
    if not bundles:
        raise DumpError(f"no bundles in: {text.strip()[:200]!r}")
    return tuple(bundles)


def _instruction(text: str, spaces: Mapping[str, str]) -> Instruction | None:
    """One instruction; None if it has no effect here, as vector instructions and phis of one register."""
    if not text:
        return None
    match = _INSTRUCTION.match(text)
    if match is None:
        raise DumpError(f"not an instruction: {text[:200]}")
    value, op, tail = match[1] or "", match[2], match[3]
    target = _register(value)
    if op == "sphi" or _is_vector(op, value):
        return None
    tail = re.sub(r"\[(?:thread|resolvable):\$\w+\]", "", tail)
    if op.startswith("inlined_call_operand"):
        number = re.search(r"index: (\d+)", tail)
        return Instruction(op, target, ((int(number[1]),),)) if number else _malformed(text)
    predicate, negated, tail = _predicate(tail, target, text)
    if op.startswith("sbr"):
        number = re.search(r"bundleno = (\d+)", tail)
        return Instruction(op, "", ((int(number[1]),),), predicate, negated) if number else _malformed(text)
    parts = _split(tail)
    operands = tuple(_terms(part, text) for part in parts)
    if op.startswith("int_to_ptr") and operands == ((target,),):
        return None  # a name for the register's value, which an instruction of the same bundle gives it
    return Instruction(op, target, operands, predicate, negated, _memories(op, parts, spaces))


def _is_vector(op: str, value: str) -> bool:
    if value and value[0] in "sp" and _SCALAR_RESULT.match(value):
        return False
    return bool(re.match(r"v(m?)\d", value)) or (op.startswith("v") and not op.startswith(("vsync", "vwait")))


def _register(value: str) -> str:
    """The register in a value's name, "s27" of "s99_s27"; the name itself if it has none."""
    return value.rpartition("_")[2]


def _predicate(tail: str, target: str, text: str) -> tuple[str, bool, str]:
    match = _PREDICATE.search(tail)
    if match is None:
        return "", False, tail
    if match[3] and _register(match[3]) != target:
        raise DumpError(f"a false predicate should leave the register as it is: {text[:200]}")
    return _register(match[2]), bool(match[1]), tail[: match.start()] + tail[match.end() :].strip().lstrip(",")


def _split(tail: str) -> list[str]:
    """The texts of the operands; a memory operand `[smem:[…]]` ends without a comma if a value to store follows."""
    tail = re.sub(r"\]\]\s+(?=[%\d\[-])", "]], ", tail.strip())
    return [part.strip() for part in re.split(r",\s*(?![^\[]*\])", tail) if part.strip()]


def _terms(operand: str, text: str) -> Terms:
    """`[smem:[#allocation6 + %s9_s28]]` is ("#allocation6", "s28"); in `5503 [#allocation0]` the symbol is a remark."""
    plain = re.sub(r"^\[smem:\[(.*)\]\]$|^\[(.*)\]$", lambda m: m[1] or m[2] or "", operand)
    terms: list[int | str] = []
    for part in re.split(r"\s\+\s", re.sub(r"^([%\w]+)\s+\[#\w+\]$", r"\1", plain)):
        match = _TERM.fullmatch(part.strip())
        if match is None:
            terms.append(_float(part, text))
        else:
            terms.append(_register(match[1]) if match[1] else match[2] or int(match[3], 0))
    return tuple(terms)


def _float(literal: str, text: str) -> int:
    """The bits of a literal such as `4.0` or `-inf`."""
    try:
        return bits(float(literal))
    except ValueError:
        raise DumpError(f"an operand of unknown form, {literal!r}: {text[:200]}") from None


def _memories(op: str, operands: list[str], spaces: Mapping[str, str]) -> tuple[str, str]:
    if not op.startswith("dma.") or op.startswith("dma.done"):
        return "", ""
    if "_to_" in op:
        source, _, target = op.split(".")[1].partition("_to_")
        return source, target
    # Of `dma.general` the pointers say it; a pointer that no instruction makes is an allocation, in VMEM.
    source, target = (spaces.get(operands[i].split()[0].lstrip("%"), "vmem") for i in (0, 2))
    return source, target


def _malformed(text: str) -> Instruction:
    raise DumpError(f"an instruction of unknown form: {text[:200]}")
