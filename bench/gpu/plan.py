"""The plan of a run: its items, most important first, because time may run out."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.gpu import kernels, numerics, speed, trained, training, tune, warp_specialised
from bench.gpu.item import Item, Options
from bench.gpu.programs import Programs
from bench.gpu.warp_specialised import has_gluon

FIRST_BATCHES, BATCHES = 5, 20


def items(options: Options) -> list[Item]:
    """The items of the plan, or of `options.tune`, whose names match `options.only`, most important first."""
    candidates = list(tune.variants(options.tune)) if options.tune else _benchmark()
    return [item for item in candidates if re.search(options.only, item.name)]


def _benchmark() -> list[Item]:
    aimed = [speed.attention(length, 128, causal) for length in (4096, 16384) for causal in (True, False)]
    steps = [
        speed.attention_gradient(length, width, causal)
        for width in (128, 64, 256)
        for length in (4096, 16384)
        for causal in (True, False)
        if length == 4096 or width == 128
    ]
    products, rows = [speed.product(size) for size in (8192, 4096)], speed.rows()
    further_attentions = [
        speed.attention(length, width, causal)
        for width in (64, 128, 256)
        for length in (4096, 1024, 16384)
        for causal in (True, False)
        if width != 128 or length == 1024
    ]
    narrow = [step for step in steps[2:] if "d256" not in step.name]  # wider heads need too many registers
    batches = [Programs(n) for n in range(BATCHES)]
    return [
        *numerics.checks(kernels.KERNELS),
        *numerics.checks(warp_specialised.KERNELS if has_gluon() else {}),
        *speed.ceilings(),
        *aimed,
        *steps[:2],
        *products,
        *map(speed.by_gluon, (*aimed, *steps[:2], *products) if has_gluon() else ()),
        *rows[:3],
        speed.Dispatch(),
        *batches[:FIRST_BATCHES],
        *speed.others(),
        *numerics.checks(trained.KERNELS),
        *training.comparisons(),
        *rows[3:],
        *steps[2:],
        *further_attentions,
        *map(speed.by_gluon, (*narrow, *further_attentions) if has_gluon() else ()),
        *batches[FIRST_BATCHES:],
    ]


@dataclass
class Budget:
    """A budget of time.

    Attributes:
      seconds: the whole budget.
    """

    seconds: float
    _start: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """The seconds that are left."""
        return self.seconds - (time.monotonic() - self._start)

    def affords(self, item: Item) -> bool:
        """True if enough time is left for an item."""
        return self.left >= item.seconds


def missing(plan: Sequence[Item], names: Sequence[str]) -> list[Item]:
    """The items of a plan whose names are not among `names`."""
    recorded = frozenset(names)
    return [item for item in plan if item.name not in recorded]
