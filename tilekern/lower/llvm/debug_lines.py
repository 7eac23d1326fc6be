"""The user's lines in LLVM IR, for `perf`: `TILEKERN_DEBUG=perf` gives each instruction the place of its op.

    %v7 = fmul <16 x float> %v5, %v6, !dbg !9
    !9 = !DILocation(line: 33, column: 5, scope: !8)
    !8 = !DILexicalBlockFile(scope: !6, file: !7, discriminator: 0)
    !7 = !DIFile(filename: "/home/user/attention.py", directory: "region:scores")

LLVM keeps places through its passes, and writes them into the table of lines of the object file (`object_file`). A
table of lines has no names but names of files and directories, so the region stands for the directory.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager

from tilekern.lower.llvm_metadata import string
from tilekern.source import Loc

REGION = "region:"
"""Stands before the region in the place of a directory."""

_OPEN = ", !dbg !here"  # of an instruction of a shared function, whose place depends on all calls of the function


class DebugLines:
    """The places of the instructions of a module.

    A function either has places of its own (of each op that is emitted), or is *shared*: many ops may call it. A
    shared function has a place if all ops that call it, through other functions too, are of one line and region.
    Inlined, its instructions have the place of the call.

    Attributes:
      loc: the place of the instructions that are emitted at present.
    """

    def __init__(self, loc: Loc) -> None:
        self.loc, self._default = loc, loc
        self._nodes: list[str] = []
        self._numbers: dict[str, int] = {}
        self._calls: dict[str, set[str | Loc]] = {}
        self._own: set[str] = set()
        self._module_nodes()

    @contextmanager
    def at(self, loc: Loc) -> Generator[None]:
        """Instructions that are emitted inside have this place, unless it is unknown."""
        outer = self.loc
        self.loc = loc if loc.line else outer
        yield
        self.loc = outer

    def begin(self, name: str, *, own: bool) -> None:
        """Begin a function; `own`: its instructions have places of their own."""
        self._own |= {name} if own else set()

    def suffix(self, function: str) -> str:
        """What follows the text of an instruction that is emitted at present in a function."""
        return f", !dbg !{self._location(function, self.loc)}" if function in self._own else _OPEN

    def call(self, caller: str, callee: str) -> None:
        """Note a call that is emitted at present."""
        self._calls.setdefault(callee, set()).add(self.loc if caller in self._own else caller)

    def finish(self, functions: dict[str, str]) -> tuple[list[str], list[str]]:
        """The functions with all places, and the metadata of the module."""
        texts = [self._finish(name, text) for name, text in functions.items()]
        names = "!llvm.module.flags = !{!0, !1}", "!llvm.dbg.cu = !{!2}"
        return texts, [*names, *(f"!{number} = {node}" for number, node in enumerate(self._nodes))]

    def _finish(self, name: str, text: str) -> str:
        places = set(self._places_of(name, set())) if name not in self._own else {self._default}
        if len(places) > 1 or not places:
            return text.replace(_OPEN, "")
        (loc,) = places
        text = text.replace(" {\n", f" !dbg !{self._function(name)} {{\n", 1)
        return text.replace(_OPEN, f", !dbg !{self._location(name, loc)}") if name not in self._own else text

    def _places_of(self, name: str, seen: set[str]) -> Iterable[Loc]:
        """The places of the calls of a shared function, one for each line and region."""
        seen.add(name)
        for caller in sorted(self._calls.get(name, ()), key=str):
            if isinstance(caller, Loc):
                yield Loc(caller.file, caller.line, region=caller.region)
            elif caller not in seen:
                yield from self._places_of(caller, seen)

    # --- nodes ---

    def _module_nodes(self) -> None:
        self._add('!{i32 7, !"Dwarf Version", i32 4}')  # the last version that has file names in the table of lines
        self._add('!{i32 2, !"Debug Info Version", i32 3}')
        file = f'!DIFile(filename: {string(self._default.file)}, directory: "")'
        unit = (
            'language: DW_LANG_Python, file: !3, producer: "tilekern", isOptimized: true, emissionKind: LineTablesOnly'
        )
        self._add(f"distinct !DICompileUnit({unit})")
        self._add(file)
        self._add("!DISubroutineType(types: !{})")

    def _function(self, name: str) -> int:
        place = f"scope: !3, file: !3, line: {self._default.line}"
        flags = "spFlags: DISPFlagDefinition | DISPFlagOptimized"
        return self._add(f"distinct !DISubprogram(name: {string(name)}, {place}, type: !4, unit: !2, {flags})")

    def _location(self, function: str, loc: Loc) -> int:
        region = f"{REGION}{loc.region}" if loc.region else ""
        file = self._add(f"!DIFile(filename: {string(loc.file)}, directory: {string(region)})")
        scope = self._add(f"!DILexicalBlockFile(scope: !{self._function(function)}, file: !{file}, discriminator: 0)")
        return self._add(f"!DILocation(line: {loc.line}, column: {loc.column + 1}, scope: !{scope})")

    def _add(self, text: str) -> int:
        """The number of a node of this text, which is added once."""
        if text not in self._numbers:
            self._numbers[text] = len(self._nodes)
            self._nodes.append(text)
        return self._numbers[text]
