"""The plan of the portable backend in words: how many programs XLA computes at once, and their loops."""

from __future__ import annotations

from math import prod

from tilekern.ir.core import Func
from tilekern.ir.quote import visible
from tilekern.lower.plan_text import axis_text, loop_lines, section
from tilekern.lower.xla.plan.batching import Segment, plan_batches


def describe(func: Func) -> str:
    """The plan, for people to read."""
    segments = plan_batches(func).segments
    axes = [(a, ", then ".join(map(_batch, s)) or "none") for a, s in zip(func.axes, segments, strict=True)]
    lines = [f"{visible(func.name)} on cpu:xla: {prod(func.grid):,} programs"]
    lines += section("programs", (f"{a.name}: {axis_text(a)}: {batches}" for a, batches in axes))
    lines += section("loops", loop_lines(func))
    return "\n".join(lines)


def _batch(segment: Segment) -> str:
    times = f", {segment.chunks:,} times" if segment.chunks > 1 else ""
    return f"{segment.count:,} at once{times}"
