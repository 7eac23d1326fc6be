"""Estimates of compiled programs by the cycle model, and their table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bench.gpu.item import Record
from tilekern.estimate.gpu import LINES, LaunchEstimate, estimate
from tilekern.estimate.on_gpu import GPUS, launch_of
from tilekern.lower.lowering import Lowering
from tilekern.lower.triton.lowering import TritonCompiled, TritonLowering

HEADER = ("item", "program", *LINES, "cycles", "µs", "share", "bottleneck")


def estimated(lowering: TritonLowering, compiled: TritonCompiled, gpu: str = "") -> LaunchEstimate:
    """The estimate for a compiled program.

    Args:
      lowering: the program.
      compiled: its machine code.
      gpu: name of the GPU; by default the GPU that stands for the target.

    Raises:
      ValueError: the model knows no GPU of the target, or cannot follow the code.
    """
    return estimate(compiled.asm["sass"], launch_of(lowering, compiled.resources, gpu))


def described(lowering: Lowering, compiled: Any) -> Record:
    """The entries "estimate" or "unestimated" (the reason) for the record of a program; {} for other targets.

    "cycles" are of the GPU's clock, "seconds" the time of the launch.
    """
    if not isinstance(lowering, TritonLowering) or lowering.target.name not in GPUS:
        return {}
    try:
        forecast = estimated(lowering, compiled)
    except ValueError as error:
        return {"unestimated": f"{lowering.program.name}: {error}"}
    return {
        "estimate": {
            "program": lowering.program.name,
            "lines": dict(forecast.lines),
            "cycles": forecast.cycles,
            "seconds": forecast.seconds,
            "share": forecast.share,
            "bottleneck": forecast.bottleneck,
            "unknown": dict(forecast.unknown),
            "assumed": dict(forecast.assumed),
        }
    }


def rows(programs: Iterable[tuple[str, Record]]) -> list[tuple[str, ...]]:
    """The table of estimates of named programs; lines are percentages of the estimated cycles."""
    table: list[tuple[str, ...]] = [HEADER]
    for name, program in programs:
        if (forecast := program.get("estimate")) is not None:
            lines = (f"{100 * forecast['lines'][line] / forecast['cycles']:.0f} %" for line in LINES)
            share = f"{forecast['share']:.2f}" if forecast["share"] else "-"
            numbers = f"{forecast['cycles']:.0f}", f"{1e6 * forecast['seconds']:.1f}", share, forecast["bottleneck"]
            table.append((name, forecast["program"], *lines, *numbers))
    return table


def notes(programs: Iterable[tuple[str, Record]]) -> list[str]:
    """Lines on operations that the model does not know, on branches that it had to assume, and on failures."""
    lines: list[str] = []
    for name, program in programs:
        forecast = program.get("estimate", {})
        lines += [f"{name}: unknown operation {op}, {count} times" for op, count in forecast.get("unknown", {}).items()]
        lines += [f"{name}: {branch}, {assumption}" for branch, assumption in forecast.get("assumed", {}).items()]
        if reason := program.get("unestimated"):
            lines.append(f"{name}: no estimate: {reason}")
    return lines
