"""The whole sequence of passes of a target, from the traced Func to the emitted Func, as names and summaries."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilekern.lower.llvm import legalize as llvm
from tilekern.lower.llvm.runtime.machine import Machine
from tilekern.lower.mosaic import legalize as mosaic
from tilekern.lower.target import Target
from tilekern.lower.triton import legalize as triton
from tilekern.lower.triton.chip import chip_of
from tilekern.lower.xla import legalize as xla
from tilekern.passes.pipeline import IMPROVE, Pass, Rounds, function_of, name_of

# Every CPU has the same passes; their effect depends on the CPU.
_ANY_CPU = Machine("aarch64-unknown-linux-gnu", "generic", "", vector_bytes=16, registers=32)

_PASSES: dict[str, Callable[[Target], Sequence[Pass | Rounds]]] = {
    "xla": lambda _: xla.PASSES,
    "llvm": lambda _: llvm.passes(_ANY_CPU),
    "triton": lambda target: triton.passes(chip_of(target)),
    "mosaic": lambda target: mosaic.passes(target.name.removeprefix("tpu:")),
}


@dataclass(frozen=True)
class PassInfo:
    """One pass of a sequence.

    Attributes:
      name: the function's.
      summary: one sentence.
      rounds: the number of the group of passes that run in rounds until none changes the Func; None outside of groups.
    """

    name: str
    summary: str
    rounds: int | None = None


def passes_of(target: Target) -> tuple[PassInfo, ...]:
    """All passes that a kernel goes through for a target, in their order: passes of every target first."""
    infos: list[PassInfo] = []
    for number, entry in enumerate((IMPROVE, *_PASSES[target.backend](target))):
        group = entry.passes if isinstance(entry, Rounds) else (entry,)
        rounds = number if isinstance(entry, Rounds) else None
        infos += (PassInfo(name_of(p), _summary(p), rounds) for p in group)
    return tuple(infos)


def markdown(target: Target) -> str:
    """The sequence as a table, for the documentation; passes that run in rounds have a ↻."""
    lines = [f"| | pass | {target.name} |", "|---:|:---|:---|"]
    for number, info in enumerate(passes_of(target), 1):
        mark = "" if info.rounds is None else " ↻"
        lines.append(f"| {number} | `{info.name}`{mark} | {info.summary} |")
    return "\n".join(lines) + "\n"


def _summary(entry: Pass) -> str:
    """The first sentence of a pass, or of its module, which has the rewrites."""
    function = function_of(entry)
    own = function.__doc__ or ""
    text = sys.modules[function.__module__].__doc__ or "" if own.startswith("Apply the rewrite") else own
    sentence = re.split(r"(?<=[.:;])\s", " ".join(text.split("\n\n")[0].split()))[0]
    return sentence.rstrip(":;.") + "."
