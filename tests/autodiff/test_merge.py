"""Merged additions: random Funcs add up to the same sums before and after, and additions that may not move stay."""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random
from typing import Any

import numpy as np

from tests.ir.funcs import Lanes, Source, access_of, func, ref, tile
from tilekern.autodiff.merge import merge
from tilekern.ir.analysis.sites import sites
from tilekern.ir.control import Switch
from tilekern.ir.core import Axis, Func, Value
from tilekern.ir.interpret import interpret
from tilekern.ir.memory import Atomic
from tilekern.ir.shape import Broadcast
from tilekern.ir.types import I32
from tilekern.ir.verify import verify
from tilekern.passes import pipeline

# Axes of the same tiles, and one that is longer.
_AXES = (*[Axis("k", 8, 4)] * 4, Axis("m", 12, 4))

# By depth: numbers of statements, and their kinds.
_CHOICES = (
    ((1, 1, 2), ("add",)),
    ((1, 1, 2), ("add", "add", "fold")),
    ((2, 3), ("add", "fold", "fold", "fold", "switch")),
)


class _Drawn:
    """The body of one random Func: additions to `total`, in folds and in switches."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.x, self.total = ref("x", (16,), dtype=I32), ref("total", (16,), "sum", I32)

    def func(self) -> Func:
        return func("f", (self.x, self.total), (Axis("i", 3),), partial(self._block, depth=2))

    def _block(self, b: Source, *indices: Value, depth: int) -> None:
        kinds = (
            ("add", "fold", "fold", "fold", "switch") if depth == 2 else ("add", "add", "fold") if depth else ("add",)
        )
        for _ in range(self._random.choice((2, 3) if depth == 2 else (1, 1, 2))):
            kind = self._random.choice(kinds)
            getattr(self, f"_{kind}")(b, *indices, depth=depth)

    def _add(self, b: Source, *indices: Value, depth: int) -> None:
        choose = self._random.choice
        lanes = tile(choose(indices[-1:] * 3 + indices[:1]), 4, choose((0, 0, 0, 0, 4)))
        value = b.load(self.x, choose((lanes, tile(choose(indices), 4))))
        mask = b.ew("lt", value, b.const(choose((-2, 3)), (4,))) if choose((True, False)) else None
        if choose((True, False)):
            value = b.ew("mul", value, b.op(Broadcast, choose(indices), shape=(4,), dims=()))
        _add_to(b, self.total, value, lanes, mask)

    def _fold(self, b: Source, *indices: Value, depth: int) -> None:
        axis, reverse = self._random.choice(_AXES), self._random.random() < 0.3

        def step(k: Value) -> tuple[Value, ...]:
            self._block(b, *indices, k, depth=depth - 1)
            return ()

        b.fold(axis, b.const(0), b.const(axis.extent), (), step, reverse)

    def _switch(self, b: Source, *indices: Value, depth: int) -> None:
        def branch() -> tuple[Value, ...]:
            self._block(b, *indices, depth=depth - 1)
            return ()

        b.add(Switch(operands=(indices[-1],), regions=tuple(b.block((), branch) for _ in range(2)), loc=b.loc()))


def _add_to(b: Source, total: Value, value: Value, lanes: Lanes, mask: Value | None = None) -> None:
    access, positions = access_of((lanes,))
    operands = (total, value, *positions, *(() if mask is None else (mask,)))
    b.add(Atomic(operands=operands, access=access, masked=mask is not None, kind="add", loc=b.loc()))


def test_merged_additions_add_up_to_the_same_sums() -> None:
    x, tally = np.arange(-8, 8, dtype=np.int32), Counter[str]()
    for seed in range(60):
        before = _Drawn(Random(seed)).func()
        verify(before)
        after = merge(pipeline.run(before))
        verify(after)
        (expected,), (merged,) = (interpret(f, x, orders=1) for f in (before, after))
        np.testing.assert_array_equal(merged, expected, f"seed {seed}\n{before}\n{after}")
        tally["merged" if len(sites(after)) < len(sites(before)) else "left"] += 1
        tally["masked"] += any(site.op.masked for site in sites(before)) and len(sites(after)) < len(sites(before))
    assert min(tally.values()) > 8, tally


def _sites_after(body: Any) -> int:
    total = ref("total", (16,), "sum", I32)
    merged = merge(pipeline.run(func("f", (total,), (Axis("i", 3),), partial(body, total))))
    verify(merged)
    return len(sites(merged))


def test_additions_in_two_folds_of_the_same_tiles_are_merged() -> None:
    def body(total: Value, b: Source, _: Value) -> None:
        for axis in _AXES[-3:]:
            b.fold(axis, b.const(0), b.const(axis.extent), (), partial(step, b, total))

    def step(b: Source, total: Value, k: Value) -> tuple[Value, ...]:
        _add_to(b, total, b.const(1, (4,)), tile(k, 4))
        return ()

    assert _sites_after(body) == 2


def test_additions_in_two_switches_stay() -> None:
    def body(total: Value, b: Source, i: Value) -> None:
        for number in (1, 2):
            regions = tuple(b.block((), partial(branch, b, total, i, n)) for n in (number, 0))
            b.add(Switch(operands=(b.ew("rem", i, b.const(number + 1)),), regions=regions, loc=b.loc()))

    def branch(b: Source, total: Value, i: Value, number: int) -> tuple[Value, ...]:
        if number:
            _add_to(b, total, b.const(number, (4,)), tile(i, 4))
        return ()

    assert _sites_after(body) == 2
