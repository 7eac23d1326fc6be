"""The result of an estimate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape

from tilekern.estimate.drawings import STYLE, bars, roofline
from tilekern.estimate.quantities import amount, duration, percent

NEAR = 0.85
"""A unit that is busy for at least this part of the time is called the bottleneck; below it, waiting is."""


@dataclass(frozen=True)
class Estimate:
    """The estimated time of one call of a kernel, and where the time goes.

    Attributes:
      kernel: its name.
      target: the target that the kernel was lowered to.
      device: the machine whose clocks and rates count, "H100" for "cuda:sm_90".
      seconds: the time of the whole call, without the launch by the host.
      bounds: for "matrix" and "memory" the seconds that the unit needs at least for the useful work.
      busy: for each unit the part of `seconds`, 0 to 1, in which it is busy. "matrix": matrix units; "vector":
        arithmetic on vectors; "special": exponentials, roots and the like; "issue": issue of instructions; "shared":
        shared memory and L1 of a GPU, loads and stores of vector memory of a TPU, caches of a CPU; "memory": HBM, or
        the main memory of a CPU. A unit that the target does not report is missing.
      bytes_moved: bytes that the programs load and store, each time that they do.
      bytes_required: bytes of the arrays, each counted once; less if all loads together are less than an array.
      flops_done: operations of matrix products that the target executes, padding and repeated passes included; None if
        it does not tell.
      flops_useful: operations of the matrix products of the block IR, without lanes outside of the grid.
      occupancy: the part of a multiprocessor's threads that are resident, 0 to 1; None where there is no such thing.
      waves: how often all multiprocessors, or threads of a CPU, are filled with programs; None where there is no such
        thing.
      assumed: the assumptions of the model, a sentence each.
      unknown: what the model does not see, a sentence each.

    Example:
      >>> forecast = Estimate("copy", "tpu:v5e", "TPU v5e", 2e-6, {"memory": 1e-6}, {"memory": 0.5}, 800, 800, None, 0)
      >>> forecast.share, forecast.bottleneck
      (0.5, 'waits, memory')
    """

    kernel: str
    target: str
    device: str
    seconds: float
    bounds: Mapping[str, float]
    busy: Mapping[str, float]
    bytes_moved: int
    bytes_required: int
    flops_done: int | None
    flops_useful: int
    occupancy: float | None = None
    waves: float | None = None
    assumed: tuple[str, ...] = field(default=())
    unknown: tuple[str, ...] = field(default=())

    @property
    def bound(self) -> float:
        """The lower bound of the time by the roofline, in seconds: the larger of `bounds`."""
        return max(self.bounds.values(), default=0.0)

    @property
    def bound_by(self) -> str:
        """The unit that sets `bound`: "matrix" or "memory"."""
        return max(self.bounds, key=lambda unit: self.bounds[unit], default="")

    @property
    def share(self) -> float:
        """`bound` over `seconds`: 1 is a kernel as fast as its device allows."""
        return self.bound / self.seconds if self.seconds else 0.0

    @property
    def bottleneck(self) -> str:
        """The busiest unit; "waits, matrix", say, if even that unit is busy for less than `NEAR` of the time."""
        busiest = max(self.busy, key=lambda unit: self.busy[unit], default="")
        return busiest if self.busy.get(busiest, 0.0) >= NEAR else f"waits, {busiest}"

    def _repr_html_(self) -> str:
        pictures = f"{bars(self.busy)}{roofline(self)}"
        return f"<style>{STYLE}</style><div class=tilekern><pre>{escape(str(self))}</pre>{pictures}</div>"

    def __str__(self) -> str:
        share = f"{percent(self.share)} of the bound, {duration(self.bound)} by {self.bound_by}"
        lines = [f"{self.kernel} on {self.target} ({self.device}): {duration(self.seconds)}, {share}"]
        lines.append("  busy: " + ", ".join(f"{unit} {percent(part)}" for unit, part in self.busy.items()))
        lines.append(f"  bytes: {amount(self.bytes_moved)}B moved, {amount(self.bytes_required)}B required")
        done = "" if self.flops_done is None else f"{amount(self.flops_done)}flop done, "
        lines.append(f"  matrix products: {done}{amount(self.flops_useful)}flop useful")
        if self.occupancy is not None:
            lines.append(f"  occupancy: {percent(self.occupancy)}")
        if self.waves is not None:
            lines.append(f"  waves: {self.waves:.2f}")
        lines += [f"  assumed: {sentence}" for sentence in self.assumed]
        lines += [f"  unknown: {sentence}" for sentence in self.unknown]
        return "\n".join(lines)
