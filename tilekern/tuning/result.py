"""The result of tuning: a table for people, and entries for a file."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any, Literal

from tilekern.kernel.choice import Tunable
from tilekern.kernel.tuned import Entry, Key, Tuned
from tilekern.testing.report import table
from tilekern.tuning.candidates import EMITTER, Settings
from tilekern.tuning.search import Outcome


@dataclass(frozen=True)
class Row:
    """A kernel that was tuned.

    Attributes:
      key: the calls for which the settings are.
      own: the settings of its schedule.
      outcome: the end of the search.
      by: the source of the times.
    """

    key: Key
    own: Settings
    outcome: Outcome
    by: Literal["measurement", "estimate"]

    @property
    def entry(self) -> Entry:
        """The entry for a file."""
        outcome, today = self.outcome, time.strftime("%Y-%m-%d")
        sure = outcome.confidence
        return Entry(
            self.key, _blocks(outcome.best), self.by, outcome.seconds, outcome.own_seconds, sure, today, self.emitter
        )

    @property
    def emitter(self) -> str:
        """The fastest emitter; "" where there was none to choose."""
        return str(self.outcome.best.get(EMITTER, ""))


@dataclass(frozen=True)
class Result:
    """The fastest settings of kernels; prints as a table.

    Attributes:
      rows: one for each kernel that was tuned: the kernel itself, then those of its gradient.
    """

    rows: tuple[Row, ...]

    @property
    def tuned(self) -> Tuned:
        """The table for calls, `with result.tuned: ...`, of the kernels for which something faster was found."""
        return Tuned(tuple(row.entry for row in self.rows if dict(row.outcome.best) != dict(row.own)))

    @property
    def best(self) -> dict[str, Tunable]:
        """The fastest settings of the kernel itself."""
        return dict(_blocks(self.rows[0].outcome.best))

    @property
    def emitter(self) -> str:
        """The fastest emitter of the kernel itself, which `best` is for; "" where there was none to choose."""
        return self.rows[0].emitter

    @property
    def gain(self) -> float:
        """How many times faster the kernel itself is with `best` than with the settings of its schedule."""
        return self.rows[0].outcome.gain

    def save(self, path: str | PathLike[str]) -> None:
        """Write the settings to a file for `tk.tuned`, beside those that it has for other kernels.

        Raises:
          tilekern.errors.LoadError: the file exists, and holds something else.
          tilekern.errors.ArgumentError: it cannot be written.
        """
        self.tuned.save(path)

    def as_dict(self) -> list[dict[str, Any]]:
        """The rows as numbers and texts, for JSON."""
        return [
            {
                **asdict(row.key),
                "by": row.by,
                "default": dict(row.own),
                **asdict(row.outcome),
                "gain": row.outcome.gain,
            }
            for row in self.rows
        ]

    def __str__(self) -> str:
        head = ("kernel", "target", "default", "best", "gain", "confidence")
        lines = table([head, *map(_cells, self.rows)], left=2)
        for row in self.rows:
            outcome = row.outcome
            lines.append(f"{row.key.kernel}: {outcome.tried} tried; {_shown(row.own)} → {_shown(outcome.best)}")
            lines += [f"  left out ({count}): {reason}" for reason, count in list(outcome.refused.items())[:3]]
        return "\n".join(lines)


def _blocks(settings: Settings) -> tuple[tuple[str, Tunable], ...]:
    """The settings without the emitter."""
    return tuple((name, value) for name, value in settings.items() if name != EMITTER)


def _cells(row: Row) -> tuple[str, ...]:
    from tilekern.estimate.quantities import duration, percent  # which imports all backends

    outcome = row.outcome
    own = "refused" if outcome.own_seconds is None else duration(outcome.own_seconds)
    sure = "estimate" if row.by == "estimate" else "" if outcome.confidence is None else percent(outcome.confidence)
    name = f"{row.key.kernel} (gradient)" if row.key.gradient else row.key.kernel
    return name, row.key.target, own, duration(outcome.seconds), f"{outcome.gain:.2f}×", sure


def _shown(settings: Settings) -> str:
    return ", ".join(f"{name} = {value!r}" for name, value in settings.items()) or "no settings"
