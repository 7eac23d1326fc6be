"""One line of the benchmark: what was measured, and whether it keeps its limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Result:
    """A measured number, and the limit that holds for it or for its relation to a baseline.

    Attributes:
      name: what was measured.
      unit: of `value` and `baseline`: "ms", "µs", "s" or "MB".
      value: tilekern's number.
      limit: of what `relation` says.
      relation: "ratio" value / baseline, "difference" value - baseline, or "value" (a baseline is then only shown).
      baseline: the other's number.
    """

    name: str
    unit: str
    value: float
    limit: float
    relation: Literal["ratio", "difference", "value"]
    baseline: float | None = None

    @property
    def judged(self) -> float:
        """The number that the limit is for."""
        if self.relation == "value":
            return self.value
        assert self.baseline is not None
        return self.value / self.baseline if self.relation == "ratio" else self.value - self.baseline

    @property
    def passed(self) -> bool:
        """Whether the limit is kept."""
        return self.judged <= self.limit

    def cells(self) -> tuple[str, ...]:
        """The cells of the table, see `HEADER`."""
        unit = "×" if self.relation == "ratio" else f" {self.unit}"
        baseline = "" if self.baseline is None else f"{self.baseline:.2f} {self.unit}"
        verdict = "pass" if self.passed else "FAIL"
        return (
            self.name,
            f"{self.value:.2f} {self.unit}",
            baseline,
            self.relation,
            f"{self.judged:.2f}{unit}",
            f"{self.limit:g}{unit}",
            verdict,
        )


HEADER = ("benchmark", "tilekern", "baseline", "judged", "is", "limit", "")


def table(results: list[Result]) -> str:
    """The results as aligned text."""
    rows = [HEADER, *(result.cells() for result in results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
