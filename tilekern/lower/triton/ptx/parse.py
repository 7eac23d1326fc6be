"""Parse the PTX of one entry function into instructions.

The text is what Triton's compiler gives to the assembler. The grammar: PTX ISA 9.0, chapters 4 and 5.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tilekern.ir.records import record


class PtxError(Exception):
    """A program does something that it must not do, or that the interpreter does not know.

    Attributes:
      at: the instruction in words, and `source`, its line of the Triton source; set where the instruction is run.
    """

    at = ""
    source = 0


class OutsideError(PtxError):
    """An access outside of every array, or of shared memory."""


class ConflictError(PtxError):
    """Two thread blocks store to one place."""


@record
class Register:
    """A register, or a special register as `%tid.x`."""

    name: str


@record
class Number:
    """A literal: its bits, and how many there are; 0 bits wide is an integer of any width."""

    bits: int
    width: int = 0


@record
class Symbol:
    """A name of a parameter, of shared memory, or of a label."""

    name: str


@record
class Vector:
    """Operands in braces."""

    parts: tuple[Operand, ...]


@record
class Memory:
    """An address in brackets: a base and an offset in bytes; for tensors also coordinates, innermost dim first."""

    base: Operand
    offset: int = 0
    coordinates: Vector | None = None


@record
class Negated:
    """A predicate behind an exclamation mark."""

    register: Register


type Operand = Register | Number | Symbol | Vector | Memory | Negated


@record
class Instruction:
    """One instruction.

    Attributes:
      name: the opcode before the first dot, as `add`.
      modifiers: the parts of the opcode behind it, as `("rn", "f32")`.
      operands: the operands; a pair `a|b` counts as two operands.
      guard: the predicate in front, or None.
      line: line of the PTX; the first is number 1.
      source: line of the Triton source, by `.loc`; 0 if none is known.
    """

    name: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Register | Negated | None
    line: int
    source: int

    @property
    def opcode(self) -> str:
        """The whole opcode."""
        return ".".join((self.name, *self.modifiers))


@record
class Entry:
    """An entry function.

    Attributes:
      name: its name.
      parameters: the names of its parameters, in order.
      instructions: its instructions; the index of one is its address.
      labels: the address of each label.
      widths: bits of each register; 1 for a predicate.
      targets: for each table of `brx.idx`, its labels.
      shared: the offset in bytes of each name in shared memory.
      local: the offset in bytes of each name in the local memory of a thread.
      local_bytes: size of the local memory of a thread.
      constants: the bytes of each array of the module, by name.
      threads: threads of a block, by `.reqntid`; 0 if it does not say.
    """

    name: str
    parameters: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    widths: dict[str, int]
    shared: dict[str, int]
    targets: dict[str, tuple[str, ...]]
    local: dict[str, int]
    local_bytes: int
    constants: dict[str, bytes]
    threads: int


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)[^{]*\{", re.DOTALL)
_PARAMETER = re.compile(r"\.param\b[^,]*?([\w$]+)(?:\[\d+\])?\s*(?:,|$)", re.DOTALL)
_SHARED = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d*)\]")
_LOCAL = re.compile(r"\.local\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d+)\]")
_CONSTANT = re.compile(r"\.(?:global|const)\s+\.align\s+\d+\s+\.b8\s+([\w$]+)\[\d+\]\s*=\s*\{([^}]*)\}")
# Of a line of the user, the place where it is inlined is in the Triton source.
_LOC = re.compile(r"\.loc\s+\d+\s+(\d+)\s+\d+(?:[^\n]*\binlined_at\s+\d+\s+(\d+)\s+\d+)?[^\n]*\n")
_LABEL = re.compile(r"([\w$]+)\s*:(?!:)")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.DOTALL)
_OPERAND = re.compile(r"\s*(\{[^}]*\}|\[[^\]]*\]|[^,]+)")
_FLOAT = re.compile(r"0([fFdD])([0-9a-fA-F]+)$")


def parse(text: str) -> Entry:
    """The one entry function of a PTX module.

    Raises:
      PtxError: the module has none, or a statement that is not known.
    """
    # Comments become as many line ends as they have, so that lines keep their numbers.
    text = _COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), text)
    head = _ENTRY.search(text)
    if head is None:
        raise PtxError("the module has no entry function")
    parameters = tuple(match[1] for match in _PARAMETER.finditer(head[2].strip()))
    shared, end = dict[str, int](), 0
    for align, name, size in _SHARED.findall(text):
        end = -(-end // int(align)) * int(align)
        shared[name], end = end, end + int(size or 0)
    body = _Body(text, head.end())
    body.run()
    threads = re.search(r"\.reqntid\s+(\d+)", head[0])
    return Entry(
        head[1],
        parameters,
        tuple(body.instructions),
        body.labels,
        body.widths,
        shared,
        body.targets,
        body.local,
        body.local_bytes,
        {name: bytes(int(x, 0) for x in numbers.split(",")) for name, numbers in _CONSTANT.findall(text)},
        int(threads[1]) if threads else 0,
    )


class _Body:
    """The statements behind the opening brace of a function, up to its closing brace.

    Blocks in braces have registers and labels of their own, which are renamed here.
    """

    def __init__(self, text: str, start: int) -> None:
        self._text, self._at = text, start
        self._scopes: list[dict[str, str]] = [{}]
        self._blocks = self._source = 0
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.widths: dict[str, int] = {}
        self.targets: dict[str, tuple[str, ...]] = {}
        self.local: dict[str, int] = {}
        self.local_bytes = 0
        self._label = ""

    def run(self) -> None:
        """Parse up to the closing brace of the function."""
        text = self._text
        while True:
            while text[self._at].isspace():
                self._at += 1
            if text[self._at] == "{":
                self._open()
            elif text[self._at] == "}":
                self._scopes.pop()
                self._at += 1
                if not self._scopes:
                    return
            elif loc := _LOC.match(text, self._at):
                self._source, self._at = int(loc[2] or loc[1]), loc.end()
            elif label := _LABEL.match(text, self._at):
                self.labels[self._name(label[1])] = len(self.instructions)
                self._label, self._at = label[1], label.end()
            else:
                end = text.index(";", self._at)
                self._statement(text[self._at : end].strip(), text.count("\n", 0, self._at) + 1)
                self._at = end + 1

    def _open(self) -> None:
        """Enter a block; its labels are named at once, for jumps stand before and behind them."""
        self._blocks += 1
        close = self._text.index("}", self._at)
        inside = re.sub(r"\{[^{}\n]*\}", "", self._text[self._at + 1 : close])
        names = [label[1] for label in _LABEL.finditer(inside)]
        self._scopes.append({name: f"{name}@{self._blocks}" for name in names})
        self._at += 1

    def _name(self, name: str) -> str:
        return next((scope[name] for scope in reversed(self._scopes) if name in scope), name)

    def _statement(self, text: str, line: int) -> None:
        if registers := _REGISTERS.match(text):
            self._registers(registers[1], registers[2])
            return
        if text.startswith(".branchtargets"):
            names = text.removeprefix(".branchtargets").split(",")
            self.targets[self._label] = tuple(self._name(name.strip()) for name in names)
        if local := _LOCAL.match(text):
            start = -(-self.local_bytes // int(local[1])) * int(local[1])
            self.local[local[2]], self.local_bytes = start, start + int(local[3])
        if text.startswith("."):
            return
        guard = None
        if text.startswith("@"):
            first, text = text.split(None, 1)
            guard = self._operand(first[1:])
            assert isinstance(guard, (Register, Negated))
        opcode, _, rest = text.partition(" ") if " " in text.split("\t")[0] else text.partition("\t")
        name, *modifiers = opcode.strip().split(".")
        operands = [self._operand(part) for group in _OPERAND.findall(rest) for part in _split_pair(group.strip())]
        self.instructions.append(Instruction(name, tuple(modifiers), tuple(operands), guard, line, self._source))

    def _registers(self, kind: str, names: str) -> None:
        width = 1 if kind == "pred" else int(kind[1:])
        for name in names.split(","):
            name = name.strip()
            if many := re.fullmatch(r"(\S+?)<(\d+)>", name):
                self.widths.update({f"{many[1]}{n}": width for n in range(int(many[2]))})
                continue
            if len(self._scopes) > 1:
                self._scopes[-1][name] = f"{name}@{self._blocks}"
            self.widths[self._name(name)] = width

    def _operand(self, text: str) -> Operand:
        text = text.strip()
        if text.startswith("!"):
            register = self._operand(text[1:])
            assert isinstance(register, Register)
            return Negated(register)
        if text.startswith("{"):
            return Vector(tuple(self._operand(part) for part in text[1:-1].split(",") if part.strip()))
        if text.startswith("["):
            return self._memory(text[1:-1])
        if number := _FLOAT.match(text):
            return Number(int(number[2], 16), 32 if number[1] in "fF" else 64)
        if re.match(r"-?\d", text):
            return Number(int(text.rstrip("U"), 0))
        name = self._name(text)
        return Register(name) if text.startswith("%") or name in self.widths else Symbol(name)

    def _memory(self, text: str) -> Memory:
        base, _, coordinates = text.partition(",")
        name, _, offset = base.partition("+")
        vector = self._operand(coordinates) if coordinates else None
        assert vector is None or isinstance(vector, Vector)
        return Memory(self._operand(name), int(offset.strip() or "0", 0), vector)


def _split_pair(text: str) -> Sequence[str]:
    return text.split("|") if "|" in text else (text,)
