"""Resource ceilings of the library's kernels on GPUs: tables next to the kernels, `kernels/<name>/resources.txt`.

One line for each case and dtype, and for each target two numbers: registers of a thread, and bytes of shared memory.
"case:kernel" names a kernel of the gradient instead of the forward kernel.
"""

from __future__ import annotations

import importlib
from pathlib import Path

KERNELS = Path(__file__).parents[3] / "kernels"
TARGETS = ("cuda:sm_80", "cuda:sm_90", "cuda:sm_100")

# Warps get registers in units of eight for each thread: rounding a ceiling up to such a unit costs nothing.
UNIT = 8

Key = tuple[str, str, str]
"""Case, dtype, target."""

_HEAD = """\
# The most that a program may take: registers of a thread, bytes of shared memory. Nothing is ever spilled.
# `UPDATE_GOLDEN=1` writes what tests/lower/triton/test_library.py finds; read the diff.
"""


def read(kernel: str) -> dict[Key, tuple[int, int]]:
    """The ceilings of a kernel, for the targets that have its dtypes."""
    file = KERNELS / kernel / "resources.txt"
    rows = [line.split() for line in file.read_text().splitlines() if line[0] != "#"] if file.exists() else []
    return {
        (case, dtype, target): (int(numbers[2 * n]), int(numbers[2 * n + 1]))
        for case, dtype, *numbers in rows
        for n, target in enumerate(TARGETS)
        if numbers[2 * n] != "0"
    }


def write(kernel: str, ceilings: dict[Key, tuple[int, int]]) -> None:
    """The text of the file; unknown ceilings are 0."""
    cases = [case.name for case in importlib.import_module(f"tilekern.kernels.{kernel}.cases").CASES]

    def place(row: tuple[str, str]) -> tuple[bool, int, tuple[str, str]]:
        name, _, kind = row[0].partition(":")
        return bool(kind), cases.index(name) if name in cases else len(cases), row

    rows = sorted({(case, dtype) for case, dtype, _ in ceilings}, key=place)
    name = max(len(case) for case, _ in rows)
    text = _HEAD + f"# {'case':{name - 2}}  dtype     " + "".join(f"{target:>14}" for target in TARGETS) + "\n"
    for case, dtype in rows:
        numbers = [ceilings.get((case, dtype, target), (0, 0)) for target in TARGETS]
        text += f"{case:{name}}  {dtype:10}" + "".join(f"{r:>7}{shared:>7}" for r, shared in numbers) + "\n"
    (KERNELS / kernel / "resources.txt").write_text(text)


def record(kernel: str, key: Key, registers: int, shared_bytes: int) -> None:
    """Set a ceiling to the measured resources."""
    write(kernel, {**read(kernel), key: (min(-(-registers // UNIT) * UNIT, 255), shared_bytes)})
