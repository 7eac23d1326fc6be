"""Random tile programs on the device against the interpreter of the block IR."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from bench.gpu.item import Item, Record
from tilekern.errors import TargetError, TilekernError, UnsupportedError
from tilekern.lower.lowering import Lowering, lower
from tilekern.lower.target import Target, on_platform
from tilekern.passes import pipeline
from tilekern.testing.programs import Program, assert_agrees, build

BATCH = 10


@dataclass(frozen=True)
class Programs(Item):
    """A batch of random programs.

    Attributes:
      number: number of the batch.
    """

    number: int
    seconds: float = 8.0

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] -- items are immutable
        """The unique name in the plan."""
        return f"programs {self.number}"

    def programs(self, seed: int) -> Iterator[tuple[int, Program]]:
        """The programs, each with its seed."""
        for n in range(BATCH):
            own = (seed & 0xFFFFFFFF) * 1000 + self.number * BATCH + n
            yield own, build(partial(random.Random(own).randint, 0))

    def lowerings(self, target: Target, seed: int) -> Iterator[Lowering]:
        for _, program in self.programs(seed):
            if (lowering := _lowered(program, target)) is not None:
                yield lowering

    def run(self, seed: int, prepared: Any) -> Record:
        del prepared
        target = on_platform("cuda", None)
        agree, refused, failed = 0, 0, []
        with jax.enable_x64(True):  # programs have 64-bit types
            for own, program in self.programs(seed):
                try:
                    lowering = _lowered(program, target)
                    if lowering is None:
                        refused += 1
                        continue
                    assert_agrees(program, [np.asarray(x) for x in lowering.compile()(*program.arrays)])
                    agree += 1
                except (AssertionError, TilekernError) as error:
                    failed.append(f"seed {own}: {type(error).__name__}: {error}"[:4000])
        return {"ok": not failed, "agree": agree, "refused": refused, "text": "\n\n".join(failed)}

    def launch(self, seed: int) -> None:
        with jax.enable_x64(True):
            for _, program in self.programs(seed):
                if (lowering := _lowered(program, on_platform("cuda", None))) is not None:
                    jax.block_until_ready(lowering.compile()(*program.arrays))


def _lowered(program: Program, target: Target) -> Lowering | None:
    """Lower a program for a target; None if the target refuses it."""
    try:
        return lower(pipeline.run(program.func), target, {})
    except (TargetError, UnsupportedError):
        return None
