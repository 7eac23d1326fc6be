"""The whole sequence of passes of a target, from the traced Func to the emitted Func, as names and summaries."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from tilekern.lower.backend import Target
from tilekern.lower.target import BACKENDS, backend_of
from tilekern.passes.pipeline import IMPROVE, Pass, Rounds, function_of, name_of


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
    own_passes = backend_of(target).passes
    for number, entry in enumerate((IMPROVE, *(own_passes(target) if own_passes is not None else ()))):
        group = entry.passes if isinstance(entry, Rounds) else (entry,)
        rounds = number if isinstance(entry, Rounds) else None
        infos += (PassInfo(name_of(p), _summary(p), rounds) for p in group)
    return tuple(infos)


def markdown() -> str:
    """The passes of each backend for its representative target: other targets leave out passes, or add some."""
    targets = [backend.checked for backend in BACKENDS.values() if backend.passes is not None]
    return "\n".join(f"### {target.name}\n\n{table(target)}" for target in targets)


def table(target: Target) -> str:
    """The sequence of a target as a table; passes that run in rounds have a ↻."""
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
