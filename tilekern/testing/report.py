"""The report of a check: a table of targets and dtypes, and a progress bar."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from tilekern.testing.comparison import Outcome


@dataclass
class _Row:
    examples: int = 0
    error: float = 0.0
    unsteady: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])


@dataclass
class Report:
    """The outcomes of a check; prints as a table.

    Attributes:
      name: of the function.
      examples: the number of calls that were compared.
      rejected: the number of drawn calls that the function does not take, by the error.
      skipped: the targets that cannot run here, with the reason.
    """

    name: str
    examples: int = 0
    rejected: Counter[str] = field(default_factory=Counter[str])
    skipped: Mapping[str, str] = field(default_factory=dict[str, str])
    _rows: dict[tuple[str, str], _Row] = field(default_factory=dict[tuple[str, str], _Row])

    def add(self, outcomes: Iterable[Outcome]) -> None:
        """Count the outcomes of one call."""
        self.examples += 1
        for outcome in outcomes:
            row = self._rows.setdefault((outcome.where, outcome.dtype), _Row())
            if outcome.refused:
                row.refused[outcome.refused] += 1
                continue
            row.examples += 1
            row.error, row.unsteady = max(row.error, outcome.error), row.unsteady + outcome.unsteady

    @property
    def targets(self) -> tuple[str, ...]:
        """The places in which a call ran: "interpreter", "here", and names of targets."""
        return tuple(dict.fromkeys(where for (where, _), row in self._rows.items() if row.examples))

    def __str__(self) -> str:
        rows = [
            (where, dtype, str(r.examples), f"{r.error:.2f}", str(sum(r.refused.values()) or ""), str(r.unsteady or ""))
            for (where, dtype), r in sorted(self._rows.items())
        ]
        head = ("target", "dtype", "examples", "worst error", "refused", "unsteady")
        lines = [f"{self.name}: {self.examples} calls", *table([head, *rows], left=2)]
        lines += [f"skipped {target}: {why}" for target, why in self.skipped.items()]
        for (where, dtype), row in sorted(self._rows.items()):
            lines += [f"{where} refuses {dtype} ({count}): {why}" for why, count in row.refused.most_common(2)]
        lines += [f"not taken ({count}): {why}" for why, count in self.rejected.most_common(3)]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON, with the keys name, examples, rows (for each target and dtype), skipped, not_taken."""
        rows = [
            {"target": where, "dtype": dtype, "examples": r.examples, "worst_error": r.error, "unsteady": r.unsteady,
             "refused": dict(r.refused)}
            for (where, dtype), r in sorted(self._rows.items())
        ]  # fmt: skip
        rejected = dict(self.rejected.most_common())
        return {"name": self.name, "examples": self.examples, "rows": rows, "skipped": dict(self.skipped),
                "not_taken": rejected}  # fmt: skip


def table(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Rows in columns; the first `left` columns are texts, the others are numbers, which stand at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            x.ljust(w) if n < left else x.rjust(w) for n, (x, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


class Progress:
    """A bar on a terminal; nothing elsewhere."""

    _WIDTH = 30

    def __init__(self, name: str, total: int, shown: bool = True, stream: TextIO | None = None) -> None:
        self._name, self._total, self._stream = name, max(total, 1), stream or sys.stderr
        self._shown = shown and self._stream.isatty()

    def show(self, done: int, what: str = "") -> None:
        """Show how much is done."""
        if not self._shown:
            return
        filled = min(self._WIDTH, self._WIDTH * done // self._total)
        bar = "█" * filled + "░" * (self._WIDTH - filled)
        self._stream.write(f"\r\x1b[2K{self._name} {bar} {done}/{self._total} {what}"[:120])
        self._stream.flush()

    def close(self) -> None:
        """Remove the bar."""
        if self._shown:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
