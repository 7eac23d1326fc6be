"""The file by which `perf` knows code that was compiled in a process: `jit-PID.dump`, with names, lines and the code.

`tools/perf/Documentation/jitdump-specification.txt` of Linux has the format, version 1. `perf record -k mono` notes
that the process maps the file, and `perf inject --jit` makes an ELF file of each function, with a table of lines.

A region has no place of its own in the format. So the file of code in a region is `REGION/FILE` in the folder of the
dump, a link to the user's file, by which tools find the source, too.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import os
import re
import struct
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import BinaryIO

from tilekern.errors import SettingError
from tilekern.lower.llvm.compile.object_file import Line, ObjectFile, Symbol
from tilekern.lower.llvm.debug_lines import REGION
from tilekern.source import Loc

_MAGIC, _VERSION, _HEADER = 0x4A695444, 1, struct.Struct("<IIIIIIQQ")
_PREFIX, _CODE_LOAD, _DEBUG_INFO = struct.Struct("<IIQ"), 0, 2
_LOAD, _INFO, _ENTRY = struct.Struct("<IIQQQQ"), struct.Struct("<QQ"), struct.Struct("<QII")


def write(names: Sequence[str], functions: Sequence[Symbol], object_file: ObjectFile, base: int, loc: Loc) -> None:
    """Append functions of loaded code to the dump of this process.

    Args:
      names: what `perf` shows for each function.
      functions: the functions, of one section.
      object_file: the file that they were loaded from.
      base: the address of their section.
      loc: the place of the kernel, for code that has none of its own.
    """
    dump = _dump_of(os.getpid(), object_file.machine)
    for name, function in zip(names, functions, strict=True):
        entries = [
            _ENTRY.pack(base + start, place.line, 0) + dump.path_of(place)
            for start, place in places_of(function, object_file.lines, loc)
        ]
        code = ctypes.string_at(base + function.start, function.size)
        dump.append(name, base + function.start, code, entries)


def places_of(function: Symbol, lines: Sequence[Line], loc: Loc) -> list[tuple[int, Loc]]:
    """Where the place of a function's code changes: the offset in the section, and the place from there on.

    LLVM knows no line of code that serves several. Such code has the place `loc` of the kernel, unless all other code
    of the function has one place. The last place is at the function's end: `perf` ends the table of lines there. A
    function without lines has no places.
    """
    end = function.start + function.size
    inside = [line for line in lines if line.section == function.section and function.start <= line.start < end]
    of_lines = {_place(line) for line in inside if line.number}
    unknown = next(iter(of_lines)) if len(of_lines) == 1 else Loc(loc.file, loc.line)
    places: dict[int, Loc] = {}
    for line in inside:
        places[line.start] = _place(line) if line.number else unknown  # the last of several at one instruction counts
    changes = [place != before for place, before in zip(places.values(), (None, *places.values()), strict=False)]
    starts = list(itertools.compress(places.items(), changes))
    return [*starts, *((end, place) for _, place in starts[-1:])]


def _place(line: Line) -> Loc:
    if line.directory.startswith(REGION):
        return Loc(line.file, line.number, region=line.directory.removeprefix(REGION))
    return Loc(os.path.join(line.directory, line.file), line.number)


@functools.cache
def _dump_of(pid: int, machine: int) -> Dump:
    return Dump(pid, machine)


class Dump:
    """The dump of a process, in a folder `tilekern-perf-PID-...` of its own, of which `perf` notes the name."""

    def __init__(self, pid: int, machine: int) -> None:
        self._pid, self._lock, self._count = pid, threading.Lock(), 0
        # Not "/tmp/perf-...": `perf` takes each file below for a map.
        self._folder = tempfile.mkdtemp(prefix=f"tilekern-perf-{pid}-")
        # Open as long as the process lives: kernels are added at any time.
        self._file: BinaryIO = open(f"{self._folder}/jit-{pid}.dump", "w+b")  # noqa: SIM115 -- see above
        self._file.write(_HEADER.pack(_MAGIC, _VERSION, _HEADER.size, machine, 0, pid, time.monotonic_ns(), 0))
        self._file.flush()
        # `perf record` notes files that are mapped to be executed: so `perf inject` finds the dump.
        try:
            self._mark = mmap.mmap(self._file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
        except PermissionError as error:
            raise SettingError(
                "perf cannot learn of the code in this process",
                expected="a folder for temporary files that is mounted without noexec",
                got=f"tempfile.gettempdir() = {tempfile.gettempdir()}",
                fix="set TMPDIR to another folder, or leave perf out of TILEKERN_DEBUG",
            ) from error

    def append(self, name: str, address: int, code: bytes, entries: Sequence[bytes]) -> None:
        """Append a function: first its lines, then its code."""
        with self._lock:
            if entries:
                self._record(_DEBUG_INFO, _INFO.pack(address, len(entries)) + b"".join(entries))
            numbers = self._pid, threading.get_native_id(), address, address, len(code), self._count
            self._record(_CODE_LOAD, _LOAD.pack(*numbers) + name.encode("ascii", "replace") + b"\0" + code)
            self._count += 1
            self._file.flush()

    def _record(self, kind: int, data: bytes) -> None:
        self._file.write(_PREFIX.pack(kind, _PREFIX.size + len(data), time.monotonic_ns()) + data)

    def path_of(self, place: Loc) -> bytes:
        """The file of a place: the user's, or in a region a link to it; ends with a zero."""
        file = place.file
        if place.region:
            names = [re.sub(r"[^\w.-]|^\.+$", "_", name) for name in place.region.split("/")]
            folder = os.path.join(self._folder, *names)
            file = os.path.join(folder, os.path.basename(place.file))
            os.makedirs(folder, mode=0o700, exist_ok=True)
            if not os.path.lexists(file):
                os.symlink(place.file, file)
        return os.fsencode(file) + b"\0"
