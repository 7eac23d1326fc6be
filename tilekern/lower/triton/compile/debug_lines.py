"""The user's lines in the debug information of machine code, for Nsight and `cuda-gdb`.

Triton knows the lines of the generated source alone. This rewrites the places in LLVM's IR, behind all of its passes:

    !9 = !DILocation(line: 12, column: 8, scope: !5)                                 ; line 12 of the generated source
  →
    !9 = !DILocation(line: 33, column: 5, scope: !41, inlinedAt: !43)                ; line 33 of the user's file
    !41 = distinct !DISubprogram(name: "scores", scope: !40, file: !40, line: 33, …)  ; the region, else the function
    !43 = distinct !DILocation(line: 12, column: 8, scope: !5)

So a tool shows the user's line, which is inlined at the line of the generated source, and PTX says both:
`.loc 2 33 5, function_name …, inlined_at 1 12 8`. Places in functions that the generated source calls, such as Triton's
own, become the user's line of the call.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import threading
from collections.abc import Callable, Generator
from typing import Any

from tilekern.ir.records import record
from tilekern.lower.llvm_metadata import string
from tilekern.lower.triton.compile import toolchain
from tilekern.lower.triton.program import Program
from tilekern.source import UNKNOWN, Loc

_NODE = re.compile(r"^!(\d+) = (?:distinct )?!(DI\w+)\((.*)\)$", re.MULTILINE)
_ASSEMBLY = re.compile(r"(// begin inline asm\n\s*\.loc\b[^\n]*\n)(.*?)(?=// end inline asm)", re.DOTALL)
_LOC = re.compile(r"^\s*\.loc\b[^\n]*\n", re.MULTILINE)
_FIELD = re.compile(r'(\w+): (?:"([^"]*)"|([^,]+))')


@contextlib.contextmanager
def user_lines(program: Program, file: str) -> Generator[None]:
    """Context in which Triton, in this thread, compiles a program with the places of the user.

    Args:
      program: the program.
      file: the file name of the program's text in Triton.
    """
    runtime, thread = toolchain.triton().knobs.runtime, threading.get_ident()
    outer = runtime.add_stages_inspection_hook

    def hook(*arguments: Any) -> Any:
        """Wrap the stage that makes LLVM's IR. Without arguments the answer is a part of the key of Triton's cache."""
        answer = outer(*arguments) if outer is not None else ("", "")
        if arguments and threading.get_ident() == thread:
            _follow(arguments[1], "llir", functools.partial(with_user_lines, program=program, file=file))
            _follow(arguments[1], "ptx", _with_lines_of_calls)
        return answer

    with runtime.scope():
        runtime.add_stages_inspection_hook = hook
        yield


def _follow(stages: dict[str, Any], name: str, rewrite: Callable[[str], str]) -> None:
    """Let a stage of Triton return its text rewritten; AMD's GPUs have no stage of PTX."""
    if name not in stages:
        return
    stage = stages[name]

    def run(source: Any, metadata: Any) -> str:
        return rewrite(stage(source, metadata))

    stages[name] = run


def places(program: Program) -> list[str]:
    """The places that `with_user_lines` writes, and how it does, as a part of the key of the machine code."""
    lines = [*sorted(program.lines.items()), (0, program.loc)]
    return [_source(), *(f"{number} {loc.column} {loc.function} {loc.region} {loc}" for number, loc in lines)]


@functools.cache
def _source() -> str:
    """The text of this module; "None" in a package without sources."""
    return str(__spec__.loader.get_source(__name__))


def with_user_lines(llir: str, program: Program, file: str) -> str:
    """LLVM's IR whose places in the generated source are the user's places, inlined at the places that they were."""
    nodes = {int(match[1]): _Node.of(match) for match in _NODE.finditer(llir)}
    debug = _DebugInfo(nodes, max(map(int, re.findall(r"^!(\d+) = ", llir, re.MULTILINE)), default=0) + 1)
    replaced: dict[int, str] = {}
    for number, node in nodes.items():
        root = debug.root(node)
        if node.kind == "DILocation" and root is not None and debug.file(root) == file:
            loc = program.lines.get(int(root.fields["line"]), UNKNOWN)
            loc = loc if loc.line else program.loc
            if loc.line:
                name = loc.region or loc.function or program.name
                replaced[number] = f"!{number} = {debug.inlined(loc, name, root)}"
    moved = _NODE.sub(lambda match: replaced.get(int(match[1]), match[0]), llir)
    return "\n".join([moved, *debug.added, ""]) if debug.added else moved


def _with_lines_of_calls(ptx: str) -> str:
    """PTX in which inline assembly has the place of its first line: LLVM counts on through the following lines."""
    return _ASSEMBLY.sub(lambda match: match[1] + _LOC.sub("", match[2]), ptx)


@record
class _Node:
    """A node of LLVM's debug information.

    Attributes:
      kind: such as "DILocation".
      text: the fields as text.
      fields: the fields by name; strings without quotes.
    """

    kind: str
    text: str
    fields: dict[str, str]

    @staticmethod
    def of(match: re.Match[str]) -> _Node:
        fields = {name: string or plain for name, string, plain in _FIELD.findall(match[3])}
        return _Node(match[2], match[3], fields)


class _DebugInfo:
    """The nodes of debug information of a module, and nodes that are added to it."""

    def __init__(self, nodes: dict[int, _Node], first: int) -> None:
        self._nodes, self._next = nodes, first
        self._numbers: dict[str, int] = {}
        self.added: list[str] = []

    def _named(self, node: _Node, field: str) -> _Node | None:
        """The node that a field of another one names."""
        reference = node.fields.get(field, "")
        return self._nodes.get(int(reference[1:])) if re.fullmatch(r"!\d+", reference) else None

    def root(self, location: _Node) -> _Node | None:
        """The outermost place that a location is inlined at; the location itself if it is not inlined."""
        while "inlinedAt" in location.fields:
            caller = self._named(location, "inlinedAt")
            if caller is None:
                return None
            location = caller
        return location

    def file(self, location: _Node) -> str:
        """The file of a location, as its scope names it."""
        scope = self._named(location, "scope")
        file = None if scope is None else self._named(scope, "file")
        return "" if file is None else "/".join(filter(None, (file.fields.get("directory"), file.fields["filename"])))

    def inlined(self, loc: Loc, name: str, root: _Node) -> str:
        """The text of the node of a user's place, inlined at `root`, in a function of the given name."""
        function = self._named(root, "scope")
        while function is not None and function.kind != "DISubprogram":
            function = self._named(function, "scope")
        assert function is not None, root
        # PTX has no escapes: a character that would end the string is left out.
        directory, name_of_file = os.path.split("".join(c for c in loc.file if c != '"' and c.isprintable()))
        file = self._add(f"!DIFile(filename: {string(name_of_file)}, directory: {string(directory)})")
        # PTX takes the name of the linker.
        places = f"name: {string(name)}, linkageName: {string(name)}, scope: !{file}, file: !{file}"
        shared = f"type: {function.fields['type']}, unit: {function.fields['unit']}"
        flags = "spFlags: DISPFlagDefinition | DISPFlagOptimized"
        scope = self._add(f"distinct !DISubprogram({places}, {shared}, {flags})")
        caller = self._add(f"distinct !DILocation({root.text})")
        return f"!DILocation(line: {loc.line}, column: {loc.column + 1}, scope: !{scope}, inlinedAt: !{caller})"

    def _add(self, text: str) -> int:
        """The number of a node of this text, which is added once."""
        if text not in self._numbers:
            self._numbers[text] = self._next
            self.added.append(f"!{self._next} = {text}")
            self._next += 1
        return self._numbers[text]
