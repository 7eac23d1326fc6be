"""The text of NVIDIA's disassembler: instructions, their guards, operands and registers, and targets of branches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

ORIGIN = re.compile(r'"<tilekern [^"]*>", line (\d+)')
"""A line of the source in a comment of the disassembler."""

_FUNCTION = re.compile(r"^\s*\.text\.(\S+):|^\s*Function\s*:\s*(\S+)")
_LABEL = re.compile(r"^\s*([.$][\w.$]*):")
INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,6})\*/\s+(?:(@!?U?P[T\d]+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*(?:;|$)")
_REGISTER = re.compile(r"(?<![\w.])(U?[RP])(\d+)(\.64)?\b")
_TARGET = re.compile(r"\(([\w.$]+)\)|\b(0x[0-9a-f]+)\s*$")

_NO_RESULT = frozenset(
    """ST STG STS STL STSM STAS STTM RED REDG BRA BRX BRXU JMP EXIT CALL RET BSSY BSYNC BREAK BAR MEMBAR FENCE DEPBAR
    LDGDEPBAR NOP CCTL CCTLL LDGSTS UTMALDG UTMASTG UTMAREDG UTMAPF UTMACMDFLUSH UTMACCTL UBLKCP UBLKRED WARPGROUP
    WARPSYNC USETMAXREG ARRIVES ERRBAR NANOSLEEP YIELD KILL BPT ACQBULK PREEXIT UCGABAR_ARV UCGABAR_WAIT UTCHMMA
    UTCQMMA UTCIMMA UTCOMMA UTCBAR UTCCP UTCSHIFT WARPGROUPSET""".split()  # noqa: SIM905 -- a list would take a line for each
)
"""Operations that write no register: all of their operands are read."""

INDEXED = ("BRX", "BRXU")
"""Branches to one of a table of targets, whose index is in a register or in a uniform register."""

_PREDICATES_FIRST = re.compile(r"[A-Z0-9]*SETP$|U?PLOP3$")
_VECTOR = {"64": 2, "128": 4, "256": 8}


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      address: byte offset in the function.
      guard: predicate register that it depends on, "P0"; "" if it has none.
      negated: True if it runs where the guard is false.
      opcode: operation with all its suffixes, "FFMA.FTZ".
      operands: operands as text, results first.
      target: label or address of the instruction that a branch leads to; "" for all other instructions.
      table: labels that an indexed branch may lead to.
    """

    address: int
    guard: str
    negated: bool
    opcode: str
    operands: tuple[str, ...]
    target: str = ""
    table: tuple[str, ...] = ()

    @cached_property
    def name(self) -> str:
        """The operation without suffixes, "FFMA"."""
        return self.opcode.partition(".")[0]

    @cached_property
    def suffixes(self) -> tuple[str, ...]:
        """The suffixes, ("FTZ",)."""
        return tuple(self.opcode.split(".")[1:])

    @cached_property
    def _results(self) -> int:
        """Number of operands that are results."""
        if self.name in ("SYNCS", "USETMAXREG"):
            return 1 if re.match(r"U?P\d", "".join(self.operands[:1])) else 0
        if self.name in _NO_RESULT or not self.operands:
            return 0
        if _PREDICATES_FIRST.match(self.name):
            return 2
        if re.match(r"U?P[T\d]", self.operands[0]):  # a predicate, then a register where the operation has both
            return 2 if len(self.operands) > 1 and re.match(r"U?R[Z\d]", self.operands[1]) else 1
        count = 1
        while count < min(3, len(self.operands) - 1) and re.fullmatch(r"U?P[T\d]", self.operands[count]):
            count += 1  # carries
        return count

    @cached_property
    def results(self) -> tuple[str, ...]:
        """Operands that are results."""
        return self.operands[: self._results]

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Operands that are read."""
        return self.operands[self._results :]

    @cached_property
    def writes(self) -> tuple[str, ...]:
        """Registers that are written, and places of registers that are spilled."""
        if self.name == "STL":
            return self.spilled
        if self.name == "R2P":
            return tuple(f"P{n}" for n in range(7))
        return tuple(_expanded(self.results, self._result_width))

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Registers and places of spilled registers that are read, the guard included.

        Accumulators of asynchronous products are left out.
        """
        guard = [self.guard] if self.guard else []
        inputs = self.inputs
        if self.name in ASYNCHRONOUS:
            inputs = inputs[:-1]
        if self.name in ("UTMALDG", "UTMASTG") and (register := re.match(r"\[(U?R)(\d+)", inputs[0])):
            # The destination, the barrier, and the coordinates stand in consecutive registers.
            dims = int(self.suffixes[0][0]) if self.suffixes else 5
            guard += [f"{register[1]}{int(register[2]) + n}" for n in range(1, 2 + dims)]
        guard += self.spilled if self.name == "LDL" else ()
        return (*guard, *_expanded(inputs, self._input_width))

    @cached_property
    def spilled(self) -> tuple[str, ...]:
        """The places in local memory of an access of spilled registers, such as "local R1+8": one for each word."""
        access = next((f for o in self.operands if (f := re.match(r"\[(\w+)(?:\+(-?0x[0-9a-f]+))?\]", o))), None)
        if access is None or self.name not in ("LDL", "STL"):
            return ()
        first = int(access[2] or "0", 16)
        return tuple(f"local {access[1]}+{first + 4 * n}" for n in range(self._access_width))

    @property
    def _result_width(self) -> int:
        if self.name in ASYNCHRONOUS:
            return 0  # known after WARPGROUP.DEPBAR only
        if self.name in ("HMMA", "IMMA", "QMMA", "OMMA"):
            return 2 if "F32" not in self.suffixes and self.name == "HMMA" and "F16" in self.suffixes[-1:] else 4
        if self.name == "DMMA" or (self.name in ("IMAD", "UIMAD") and "WIDE" in self.suffixes):
            return 2
        if self.name in ("DADD", "DMUL", "DFMA"):
            return 2
        if self.name == "CS2R":
            return 1 if "32" in self.suffixes else 2
        if self.name == "LDTM":
            return int(next((s[1:] for s in self.suffixes if re.fullmatch(r"x\d+", s)), 1))
        if self.name == "LDSM":
            return int(self.suffixes[-1]) if self.suffixes[-1] in "24" else 1
        return self._access_width

    @property
    def _input_width(self) -> int:
        if self.name in ("HMMA", "IMMA", "QMMA", "OMMA") or self.name in ASYNCHRONOUS:
            return 4
        if self.name == "STSM":
            return int(self.suffixes[-1]) if self.suffixes[-1] in "24" else 1
        return self._access_width if self.name in _NO_RESULT else 1

    @property
    def _access_width(self) -> int:
        return next((_VECTOR[s] for s in self.suffixes if s in _VECTOR), 1)


ASYNCHRONOUS = frozenset(("HGMMA", "QGMMA", "IGMMA", "BGMMA"))
"""Products of warpgroups, which run beside the instructions that follow."""


def _expanded(operands: tuple[str, ...], width: int) -> Iterator[str]:
    """Registers of operands: `width` for each vector, two for an address of 64 bits, else one."""
    for operand in operands:
        address = "[" in operand
        for kind, number, pair in _REGISTER.findall(operand):
            count = 1 if "P" in kind else 2 if pair else 1 if address else width
            yield from (f"{kind}{int(number) + n}" for n in range(count))


@dataclass(frozen=True)
class Listing:
    """A disassembled function.

    Attributes:
      name: its symbol; "" if the text names none.
      code: its instructions.
      labels: for each label, the number of the instruction that follows it.
      lines: for each instruction the line of the Triton source that it comes from; 0 where the text does not tell.
    """

    name: str
    code: tuple[Instruction, ...]
    labels: dict[str, int]
    lines: tuple[int, ...] = ()

    def destination(self, instruction: Instruction) -> int:
        """The number of the instruction that a branch leads to.

        Raises:
          ValueError: no instruction has its label or address.
        """
        if instruction.target not in self.labels:
            raise ValueError(
                f"{instruction.opcode} at {instruction.address:#x} leads to {instruction.target or 'a register'!r}; "
                "expected a label or an address of the listing"
            )
        return self.labels[instruction.target]


def parse(text: str, function: str = "") -> Listing:
    """Read the text of `nvdisasm` or of `cuobjdump -sass`.

    Args:
      text: disassembly with one function, or with several.
      function: name of the function to read; may be left out if the text has only one.

    Raises:
      ValueError: no instruction was found, no such function, or several and no name.

    Example:
      >>> parse("/*0000*/ @P0 IADD3 R1, R2, 0x1, RZ ;").code[0].reads
      ('P0', 'R2')
    """
    functions = _functions(text)
    if function:
        functions = {name: lines for name, lines in functions.items() if name == function}
    if len(functions) != 1:
        names = ", ".join(_functions(text)) or "none"
        raise ValueError(f"expected the SASS of one function; got function={function!r}, and in the text: {names}")
    ((name, lines),) = functions.items()
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    origins: list[int] = []
    origin = 0
    for line in lines:
        if numbers := ORIGIN.findall(line):
            origin = int(numbers[-1])  # the last one is the place that the others are inlined at
        elif label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif match := INSTRUCTION.match(line):
            labels[hex(int(match[1], 16))] = len(code)
            code.append(_instruction(*match.groups()))
            origins.append(origin)
    return Listing(name, tuple(code), {label: n for label, n in labels.items() if n < len(code)}, tuple(origins))


def _functions(text: str) -> dict[str, list[str]]:
    """Lines of each function that has instructions, by name; "" for lines before the first name."""
    functions: dict[str, list[str]] = {"": []}
    name = ""
    for line in text.splitlines():
        if match := _FUNCTION.match(line):
            name = match[1] or match[2]
        functions.setdefault(name, []).append(line)
    return {name: lines for name, lines in functions.items() if any(map(INSTRUCTION.match, lines))}


def _instruction(address: str, guard: str | None, opcode: str, text: str) -> Instruction:
    table = tuple(re.findall(r"\.L\w+", text)) if opcode.partition(".")[0] in INDEXED else ()
    text = text.partition("(*")[0]
    operands = tuple(o.strip().replace(".reuse", "") for o in _split(re.split(r"\s[&?]", text)[0]) if o.strip())
    guard, negated = (guard or "").lstrip("@"), "!" in (guard or "")
    target = ""
    if opcode.partition(".")[0] in ("BRA", "CALL", "JMP", "BSSY") and (match := _TARGET.search(text)):
        target = match[1] or hex(int(match[2], 16))
    return Instruction(int(address, 16), guard.lstrip("!"), negated, opcode, operands, target, table)


def _split(text: str) -> Iterator[str]:
    """Operands between commas that are in no brackets."""
    depth, start = 0, 0
    for n, character in enumerate(text):
        depth += (character in "[({") - (character in "])}")
        if character == "," and depth == 0:
            yield text[start:n]
            start = n + 1
    yield text[start:]
