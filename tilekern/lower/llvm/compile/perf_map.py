"""The files by which `perf` finds the names of machine code that was compiled in a process, and its lines.

`/tmp/perf-PID.map` has the names for `perf report` alone; `jit_dump` has the lines, too.
"""

from __future__ import annotations

import os

from tilekern.debug_options import debug_options
from tilekern.source import Loc


def record(kernel: str, loc: Loc, code: bytes, entry: str, address: int) -> None:
    """Append the functions of loaded code to the files, if `TILEKERN_DEBUG` names `perf`.

    Args:
      kernel: stands before the name of each function.
      loc: the place of the kernel.
      code: the object file, of the format ELF; others are left out.
      entry: the name of a function.
      address: of that function.
    """
    if "perf" not in debug_options():
        return
    from tilekern.lower.llvm.compile import jit_dump  # which few processes need
    from tilekern.lower.llvm.compile.object_file import ObjectFile, is_elf

    if not is_elf(code):
        return
    object_file = ObjectFile(code)
    start = next((function for function in object_file.functions if function.name == entry), None)
    if start is None:
        return
    base = address - start.start
    functions = [function for function in object_file.functions if function.section == start.section]
    names = [f"tilekern {kernel} {function.name}" for function in functions]
    lines = [f"{base + f.start:x} {f.size:x} {name}\n" for name, f in zip(names, functions, strict=True)]
    with open(f"/tmp/perf-{os.getpid()}.map", "a", encoding="ascii", errors="replace") as file:
        file.write("".join(lines))
    jit_dump.write(names, functions, object_file, base, loc)
