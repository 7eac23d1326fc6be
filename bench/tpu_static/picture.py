"""The picture of a comparison: bound / time of each contestant, with a panel for each chip."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.tpu_static.compare import OURS, Record
from tilekern.estimate.tpu.chips import CHIPS

COLOURS = {
    OURS: "#0b6e4f",
    "splash": "#c8553d",
    "splash-fused": "#7d2e68",
    "flash": "#e0a458",
    "megablox": "#3d6fc8",
    "tokamax": "#58a4e0",
    "xla": "#6c757d",
}


def draw(rows: Mapping[str, Record], path: Path) -> None:
    """Write a PNG: bars of bound / time, in percent, for each case.

    Raises:
      ImportError: matplotlib is not installed (the extra `bench` has it).
    """
    figures: Any = importlib.import_module("matplotlib.figure")

    chips = [name for name in CHIPS if any(row["chip"] == name for row in rows.values())]
    cases = list(dict.fromkeys(row["case"] for row in rows.values()))
    figure = figures.Figure(figsize=(3 + 0.45 * len(cases), 3.2 * len(chips)), layout="constrained")
    panels = figure.subplots(len(chips), 1, squeeze=False, sharex=True)[:, 0]
    count = len(COLOURS)
    for panel, name in zip(panels, chips, strict=True):
        for k, (who, colour) in enumerate(COLOURS.items()):
            heights = [_percent(rows.get(f"{case} {name}"), who) for case in cases]
            places = [i + (k + 0.5) / count * 0.8 - 0.4 for i in range(len(cases))]
            panel.bar(places, heights, 0.76 / count, label=who, color=colour)
        panel.set_ylim(0, 100)
        panel.set_ylabel("% of the bound")
        panel.set_title(f"TPU {name}", loc="left")
        panel.grid(axis="y", alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), ncols=len(COLOURS), loc="outside lower center", frameon=False)
    panels[-1].set_xticks(range(len(cases)), cases, rotation=60, ha="right", fontsize=8)
    figure.suptitle("Static estimate: the least time that MXUs or HBM need, over the time of each", fontsize=10)
    figure.savefig(path, dpi=110)


def _percent(row: Record | None, who: str) -> float:
    """100 × bound / time; 0 if there is no time."""
    if row is None:
        return 0.0
    record: Record = row[OURS] if who == OURS else row["peers"].get(who, {})
    return 100 * row["bound"] / record["us"] if "us" in record else 0.0
