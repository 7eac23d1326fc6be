"""The file by which `perf` finds the names of machine code that was compiled in a process: `/tmp/perf-PID.map`."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

from tilekern.debug_options import debug_options

_FUNCTION, _SYMBOL_TABLE = 2, 2  # the types of a symbol and of a section, System V ABI, chapters 4.2 and 4.3


def record(kernel: str, code: bytes, entry: str, address: int) -> None:
    """Append the functions of loaded code to the file, if `TILEKERN_DEBUG` names `perf`.

    Args:
      kernel: stands before the name of each function.
      code: the object file, of the format ELF; others are left out.
      entry: the name of a function.
      address: of that function.
    """
    if "perf" not in debug_options() or not code.startswith(b"\x7fELF\x02"):
        return
    functions = list(_functions(code))
    base = next((address - start for name, start, _ in functions if name == entry), None)
    if base is not None:
        lines = [f"{base + start:x} {size:x} tilekern {kernel} {name}\n" for name, start, size in functions]
        with open(f"/tmp/perf-{os.getpid()}.map", "a", encoding="ascii", errors="replace") as file:
            file.write("".join(lines))


def _functions(code: bytes) -> Iterator[tuple[str, int, int]]:
    """The name, the offset in the section and the size in bytes of each function of an object file of 64 bits."""
    sections_at, size, count = (*struct.unpack_from("<Q", code, 40), *struct.unpack_from("<HH", code, 58))
    headers = [struct.unpack_from("<IIQQQQIIQQ", code, sections_at + number * size) for number in range(count)]
    for header in headers:
        if header[1] != _SYMBOL_TABLE:
            continue
        start, length, names_at = header[4], header[5], headers[header[6]][4]
        for at in range(start, start + length, 24):
            name_at, kind, _, _, value, extent = struct.unpack_from("<IBBHQQ", code, at)
            if kind & 15 == _FUNCTION:
                name = code[names_at + name_at : code.index(b"\0", names_at + name_at)]
                yield name.decode("ascii", "replace"), value, extent
