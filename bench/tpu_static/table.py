"""The text of a comparison: a line for each case and chip, then the aims."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bench.tpu_static.compare import OURS, Record

UNITS = ("mxu", "valu", "eup", "xlu", "vld", "vst")
NEAR = 1.3
"""The time of a kernel, as a multiple of its bound, that is called near."""
HEADER = (
    "case",
    "chip",
    "who",
    "µs",
    "in Pallas",
    "of bound",
    "cycles",
    "stall",
    *(f"{unit} %" for unit in UNITS),
    "spills",
    "read MB",
    "written MB",
    "VMEM MiB",
)


def table(rows: Mapping[str, Record]) -> str:
    """The whole comparison as aligned text."""
    lines: list[Sequence[str]] = [HEADER]
    failures: list[str] = []
    for key, row in rows.items():
        first = (row["case"], row["chip"])
        for name, record in {OURS: row[OURS], **row["peers"]}.items():
            if "error" in record:
                failures.append(f"{key} {record.get('setting', name)}: {record['error']}")
            lines.append((*first, *_cells(record.get("setting", name), record, row["bound"])))
            first = ("", "")
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*text, "", *(aim.text for aim in aims(rows)), *failures])


def _cells(name: str, record: Record, bound: float) -> tuple[str, ...]:
    if "error" in record:
        return (name, "failed", *[""] * (len(HEADER) - 4))
    use = (f"{100 * record['use'].get(unit, 0.0):.0f}" for unit in UNITS)
    return (
        name,
        f"{record['us']:.1f}",
        f"{record['pallas_us']:.1f}",
        f"{bound / record['us']:.2f}",
        str(record["cycles"]),
        str(record["stall"]),
        *use,
        str(record["spills"]),
        f"{record['read'] / 1e6:.1f}",
        f"{record['written'] / 1e6:.1f}",
        f"{record['vmem'] / 2**20:.1f}",
    )


class Aim:
    """A limit for our time, as a multiple of a baseline; `note` is printed after the verdict.

    Args:
      key: "case chip".
      yardstick: the name of the baseline.
      ours: our time.
      baseline: another time, in the same unit.
      limit: the largest ratio of the times.
      note: a remark.
    """

    def __init__(self, key: str, yardstick: str, ours: float, baseline: float, limit: float, note: str = "") -> None:
        self.ratio, self.limit = ours / baseline if baseline else math.nan, limit
        verdict = "met" if self.met else "NOT MET" if math.isfinite(self.ratio) else "unknown"
        self.text = f"aim: {key}: {self.ratio:.3f} × {yardstick}, at most {limit:g}: {verdict}{note}"

    @property
    def met(self) -> bool:
        """True if the limit is kept; False if a number is missing."""
        return self.ratio <= self.limit


def aims(rows: Mapping[str, Record]) -> list[Aim]:
    """The aims of the estimate: attention as fast as the best splash attention, all other kernels near the bound.

    Attention's programs are compared each from its own layout and on the same arrays, and kernels alone.
    """
    limits: list[Aim] = []
    for machine in ("v5e", "v6e", "7x"):
        name, limit = "attention s4096 d128 causal", 0.95 if machine == "v5e" else 1.0
        for case, time, how in (
            (name, "us", ""),
            (name, "pallas_us", ", kernels alone"),
            (f"{name} projected", "us", ""),
        ):
            if (key := f"{case} {machine}") in rows:
                own, splash = rows[key][OURS], rows[key]["peers"]["splash"]
                limits.append(Aim(key, f"best splash{how}", own.get(time, math.nan), splash.get(time, math.nan), limit))
    if (key := "matmul 4096 v5e") in rows:
        limits.append(Aim(key, "the MXU's time", _us(rows[key][OURS]), rows[key]["bound"], 1.08))
    further_rows = {key: row for key, row in rows.items() if not key.startswith(("attention", "backward", "decode"))}
    for key, row in further_rows.items():
        limits.append(Aim(key, "the bound", _us(row[OURS]), row["bound"], NEAR, _busiest(row[OURS])))
    return limits


def _busiest(record: Mapping[str, Any]) -> str:
    """A remark on the unit with the largest share of filled slots: if that is near 100 %, few cycles can be gained."""
    use: Mapping[str, float] = record.get("use") or {}
    unit = max(use, key=lambda name: use[name], default=None)
    return "" if unit is None else f" ({unit} {100 * use[unit]:.0f} %)"


def _us(record: Mapping[str, Any]) -> float:
    return record.get("us", math.nan)
