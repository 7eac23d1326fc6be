"""Golden cycles: for small cases, the cycles of our kernels that a change may not exceed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.tpu_static.cases import SMALL
from bench.tpu_static.compare import versions
from tilekern.estimate.tpu.estimate import estimate

SLACK = 1.05

KERNEL_CASES = {case.name: case for case in SMALL}


def cycles(kernel_case: str, chip: str) -> int:
    """The cycles of all kernels of a case, a key of `KERNEL_CASES`, on a chip; XLA's kernels around ours included."""
    return sum(kernel.cycles for kernel in estimate(KERNEL_CASES[kernel_case].ours(chip), chip))


class Golden:
    """A file of cycles by "case chip", and of the versions that the cycles hold for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        contents: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.versions: Mapping[str, str] = contents.get("versions", {})
        self.cycles: dict[str, int] = contents.get("cycles", {})

    def unfit(self) -> str:
        """The reason why the numbers do not hold here; "" if they do."""
        here = versions()["libtpu"]
        golden = self.versions.get("libtpu")
        return "" if golden in (None, here) else f"the cycles are those of libtpu {golden}, installed is {here}"

    def check(self, key: str, count: int) -> str:
        """The complaint about a number of cycles; "" if there is none."""
        if key not in self.cycles:
            return f"{key} has no number yet; UPDATE_GOLDEN=1 writes it"
        limit = math.floor(self.cycles[key] * SLACK)
        if count <= limit:
            return ""
        return (
            f"{key} takes {count} cycles, {count / self.cycles[key]:.3f} × the {self.cycles[key]} of {self.path.name}"
        )

    def update(self, key: str, count: int) -> None:
        """Write a number; numbers of another libtpu are removed."""
        valid = self.cycles if not self.unfit() else {}
        self.cycles, self.versions = dict(sorted({**valid, key: count}.items())), versions()
        self.path.write_text(json.dumps({"versions": self.versions, "cycles": self.cycles}, indent=1) + "\n")
