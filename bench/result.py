"""A line of the benchmark table: a measured number, its limit, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Result:
    """A measured number, and a limit for it or for its relation to a baseline.

    Attributes:
      name: the name of the measurement.
      unit: the unit of `value` and `baseline`: "ms", "µs", "s", "MB", "GB/s" or "GFLOP/s".
      value: the number for tilekern.
      limit: the limit of the judged number, which `relation` selects; None if the result is shown without a verdict.
      relation: "ratio", value / baseline, is at most the limit. "difference", value - baseline, is at most the limit.
        "value", the value itself, is at most the limit, and a baseline is only shown. "share", value / baseline, is at
        least the limit.
      baseline: the number for the peer.
      by_round: the median over rounds of the ratio within a round, which replaces value / baseline; None to keep that.
    """

    name: str
    unit: str
    value: float
    limit: float | None
    relation: Literal["ratio", "difference", "value", "share"]
    baseline: float | None = None
    by_round: float | None = None

    @property
    def judged(self) -> float:
        """The number that is compared with the limit."""
        if self.relation == "value":
            return self.value
        assert self.baseline is not None
        if self.relation == "difference":
            return self.value - self.baseline
        return self.value / self.baseline if self.by_round is None else self.by_round

    @property
    def passed(self) -> bool:
        """True if the limit is kept, or if the result has none."""
        if self.limit is None:
            return True
        return self.judged >= self.limit if self.relation == "share" else self.judged <= self.limit

    @property
    def bound(self) -> str:
        """The limit with its relation and unit, as "≥ 0.75×"; "" if there is none."""
        if self.limit is None:
            return ""
        return f"{'≥ ' if self.relation == 'share' else ''}{self.limit:g}{self._unit}"

    @property
    def _unit(self) -> str:
        return "×" if self.relation in ("ratio", "share") else f" {self.unit}"

    def cells(self) -> tuple[str, ...]:
        """The cells of the table, see `HEADER`."""
        baseline = "" if self.baseline is None else f"{self.baseline:.2f} {self.unit}"
        verdict = "" if self.limit is None else "pass" if self.passed else "FAIL"
        return (
            self.name,
            f"{self.value:.2f} {self.unit}",
            baseline,
            self.relation,
            f"{self.judged:.2f}{self._unit}",
            self.bound,
            verdict,
        )


HEADER = ("benchmark", "tilekern", "baseline", "judged", "is", "limit", "")


def table(results: list[Result]) -> str:
    """The results as aligned text."""
    rows = [HEADER, *(result.cells() for result in results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def missed(results: list[Result]) -> str:
    """A line for each limit that is not kept."""
    return "".join(f"NOT MET: {r.name}: {r.judged:.3g}, limit {r.bound}\n" for r in results if not r.passed)
