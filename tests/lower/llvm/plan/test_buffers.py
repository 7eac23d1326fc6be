"""The scratch memory of a program, followed step by step: whoever reads a tile finds it there, and not another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
import pytest

import tilekern as tk
from tests.lower.library import CASES, family
from tests.lower.llvm.machines import ALL
from tests.lower.llvm.plans import every_step, planned
from tilekern.ir.control import Fold, Switch, While
from tilekern.ir.core import Block, Func, Op, Value
from tilekern.ir.shape import Reshape
from tilekern.ir.types import TileType
from tilekern.lower.llvm.plan.steps import AnyStep, Buffer, BufferCopies, Expressions, LoopNest, Plan, Step
from tilekern.lower.target import TARGETS
from tilekern.passes import pipeline
from tilekern.testing.programs.batches import sample

Tile = tuple[Value, tuple[int, ...]]
"""A value in one iteration of the loops around the block that defines it."""


@dataclass
class Memory:
    """The tiles in each range of bytes; several if they are equal."""

    ranges: dict[tuple[int, int], set[Tile]] = field(default_factory=dict)

    def write(self, buffer: Buffer, tiles: set[Tile]) -> None:
        begin, end = span(buffer)
        self.ranges = {r: t for r, t in self.ranges.items() if r[1] <= begin or end <= r[0]}
        self.ranges[begin, end] = tiles

    def read(self, buffer: Buffer) -> set[Tile]:
        return self.ranges.get(span(buffer), set())


def span(buffer: Buffer) -> tuple[int, int]:
    return buffer.root.offset, buffer.root.offset + buffer.nbytes


def overlap(a: Buffer, b: Buffer) -> bool:
    (first, end), (second, other_end) = span(a), span(b)
    return first < other_end and second < end


class Run:
    """A run of a plan without its numbers: folds have so many iterations; switches take one branch after the other."""

    def __init__(self, func: Func, plan: Plan, trips: int) -> None:
        self.plan, self.trips, self.turn = plan, trips, 0
        self.memory, self.expressions = Memory(), Expressions(func)
        self.home: dict[Value, int] = {}  # how many regions are around the definition of a value
        self.path: tuple[int, ...] = ()
        self.same: dict[Tile, Tile] = {}  # what a carry or the result of a loop is at present
        self._locate(func.body, 0)
        self.run(func.body)

    def _locate(self, block: Block, depth: int) -> None:
        self.home.update(dict.fromkeys(block.args, depth))
        for op in block.ops:
            self.home.update(dict.fromkeys(op.results, depth))
            for region in op.regions:
                self._locate(region, depth + 1)

    def tile(self, value: Value) -> Tile:
        """The tile that a value is at present."""
        op = self.expressions.definition.get(value)
        if isinstance(op, Reshape):
            (x,) = op.operands
            if x in self.expressions.buffers and self.expressions.buffers[x] is self.expressions.buffers.get(value):
                return self.tile(x)
        found = value, self.path[: self.home[value]]
        return self.same.get(found, found)

    # --- steps ---

    def run(self, block: Block) -> None:
        with self.expressions.inside(self.plan.live_in[block]):
            for step in self.plan.steps[block]:
                self.step(step)
                self.expressions.buffers.update(step.produces)
            self.yielded = [self.tile(v) for v in block.results if isinstance(v.type, TileType)]

    def step(self, step: AnyStep) -> None:
        if isinstance(step, BufferCopies):
            for source, target in step.moves:
                if source.nbytes:
                    assert span(source) == span(target) or not overlap(source, target)
                    self.memory.write(target, self.memory.read(source))
        elif isinstance(step, LoopNest):
            self.nest(step)
        elif step.op.regions:
            self.control(step)
        else:
            self.plain(step)

    def nest(self, nest: LoopNest) -> None:
        leaves = self.expressions.of(nest.space, nest.sources).leaves
        written = [m.buffer for m in nest.maps] + [buffer for _, buffer in nest.produces]
        for position in (v for op in nest.stores for v in op.positions):
            apart = self.expressions.of(position.tile.shape, [position]).leaves
            leaves |= dict.fromkeys(apart, False)
        self.check(leaves)
        for leaf, lanewise in leaves.items():
            buffer = self.expressions.buffers.get(leaf)
            if buffer is not None and not lanewise:
                assert not any(overlap(buffer, w) for w in written if w.nbytes and buffer.nbytes), leaf
        self.write([*((m.value, m.buffer) for m in nest.maps), *nest.produces])

    def plain(self, step: Step) -> None:
        tiles = [v for v in step.op.operands if isinstance(v.type, TileType)]
        written = [buffer for _, buffer in step.produces] + [s for s in (step.temporary,) if s is not None]
        for value in tiles:
            leaves = self.expressions.of(value.tile.shape, [value]).leaves
            self.check(leaves)
            read = [self.expressions.buffers[leaf] for leaf in leaves if leaf in self.expressions.buffers]
            assert not any(overlap(r, w) for r in read for w in written if r.nbytes and w.nbytes), step.op.name
        buffers = dict.fromkeys(written)
        assert not any(
            overlap(a, b) for a in buffers for b in buffers if a.root is not b.root and a.nbytes and b.nbytes
        )
        if step.accumulates:
            (target,) = {buffer.root for _, buffer in step.produces}
            (sum_,) = [v for v, _ in step.produces if v is not step.op.result]
            add = self.expressions.definition[sum_]
            init = next(v for v in add.operands if v is not step.op.result)
            assert not target.nbytes or self.tile(init) in self.memory.read(target), "what a dot adds to is not there"
        if step.temporary is not None and step.temporary.nbytes:
            self.memory.write(step.temporary, set())
        self.write(step.produces)

    def check(self, leaves: dict[Value, bool]) -> None:
        for leaf in leaves:
            buffer = self.expressions.buffers.get(leaf)
            if buffer is not None and buffer.nbytes:
                assert self.tile(leaf) in self.memory.read(buffer), f"{leaf} is not there"

    def write(self, kept: Sequence[tuple[Value, Buffer]]) -> None:
        roots: dict[Buffer, set[Tile]] = {}
        for value, buffer in kept:
            if buffer.nbytes:
                roots.setdefault(buffer.root, set()).add(self.tile(value))
        for root, tiles in roots.items():
            assert root.offset + root.nbytes <= self.plan.scratch
            self.memory.write(root, tiles)

    # --- control ---

    def control(self, step: Step) -> None:
        op = step.op
        carry_buffers = [s for v, s in zip(op.results, self.plan.carry_buffers[op], strict=True) if s is not None]
        results = [v for v in op.results if v.tile.shape]
        if isinstance(op, Switch):
            self.turn += 1
            found = self.region(op.regions[self.turn % len(op.regions)], self.turn, [])
        else:
            found = self.loop(op, [self.tile(v) for v in self.inits(op)])
        shaped = [t for t in found if t[0].tile.shape]
        for result, buffer, tile in zip(results, carry_buffers, shaped, strict=True):
            assert not buffer.nbytes or tile in self.memory.read(buffer), f"{op.name} left another tile than {tile[0]}"
            self.same[result, self.path[: self.home[result]]] = tile

    def inits(self, op: Op) -> Sequence[Value]:
        assert isinstance(op, (Fold, While))
        return op.inits if isinstance(op, Fold) else op.operands

    def loop(self, op: Op, values: list[Tile]) -> list[Tile]:
        for trip in range(self.trips + isinstance(op, While)):
            for region in op.regions:
                last = isinstance(op, While) and trip == self.trips
                if last and region is not op.regions[0]:
                    break
                found = self.region(region, trip, values)
                if not (isinstance(op, While) and region is op.condition):
                    values = found
        return values

    def region(self, region: Block, trip: int, values: list[Tile]) -> list[Tile]:
        outer, self.path = self.path, (*self.path, trip)
        carries = region.args[len(region.args) - len(values) :]
        for arg, value in zip(carries, values, strict=True):
            self.same[arg, self.path] = value
        entered = dict(self.plan.live_in[region])
        for arg, value in zip(carries, values, strict=True):
            if arg in entered and entered[arg].nbytes:
                assert value in self.memory.read(entered[arg]), f"{arg} begins as another tile than {value[0]}"
        self.run(region)
        found, self.path = list(self.yielded), outer
        return found


@pytest.mark.sweep(3)
@pytest.mark.parametrize("first", range(0, 300, 100))
def test_random_programs(first: int) -> None:
    buffers = 0
    for seed in range(first, first + 100):
        func, plan = planned(pipeline.run(sample(seed)[0].func), ALL[seed % len(ALL)])
        buffers += plan.scratch > 0
        for trips in (2, 1, 0):
            try:
                Run(func, plan, trips)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {trips} iterations: {error}") from error
    assert buffers > 25


@pytest.mark.parametrize("name", CASES)
def test_kernels(name: str) -> None:
    for case in CASES[name][:3]:
        for machine in ALL:
            func, plan = planned(family(name, case.name, "bfloat16").func(TARGETS["cpu:llvm"]), machine)
            for trips in (2, 0):
                Run(func, plan, trips)


@tk.kernel(out_type=lambda x, w: jax.ShapeDtypeStruct(x.shape, x.dtype))
def nested_sum(x: tk.Ref, w: tk.Ref, out: tk.Ref, *, reads_between: bool) -> None:
    """A sum over two loops; the inner one may read what the outer one began with."""
    i = tk.parallel(x.shape[0], 8)

    def outer(t: jax.Array, total: jax.Array) -> jax.Array:
        def inner(u: jax.Array, part: jax.Array) -> jax.Array:
            return tk.dot(total + w[u, :8] if reads_between else x[i], w[t + u], part)

        return tk.fold(tk.serial(3), inner, total)

    out[i] = tk.fold(tk.serial(3), outer, tk.zeros((i, x.shape[1])))


@pytest.mark.parametrize("reads_between", [False, True])
def test_a_sum_over_two_loops_is_copied_only_where_its_begin_is_read(reads_between: bool) -> None:
    x, w = np.ones((16, 16), np.float32), np.ones((5, 16, 16), np.float32)
    func = nested_sum.trace(x, w, reads_between=reads_between).lower("cpu:llvm").ir
    func, plan = planned(func, ALL[0])
    for trips in (3, 2, 1, 0):
        Run(func, plan, trips)
    moves = [move for step in every_step(plan) if isinstance(step, BufferCopies) for move in step.moves]
    assert any(a.root is not b.root for a, b in moves) == reads_between


def test_a_slot_in_the_wrong_place_is_found() -> None:
    """Or else the tests above prove nothing."""
    func, plan = planned(family("flash_attention", "gpt2", "float32").func(TARGETS["cpu:llvm"]), ALL[0])
    moved = {buffer.root for step in every_step(plan) for _, buffer in step.produces}
    assert len(moved) > 3
    found = 0
    for buffer in moved:
        before, buffer.offset = buffer.offset, next(s.offset for s in moved if s.offset != buffer.offset)
        try:
            Run(func, plan, 2)
        except AssertionError:
            found += 1
        buffer.offset = before
    assert found >= len(moved) - 1
    Run(func, plan, 2)
