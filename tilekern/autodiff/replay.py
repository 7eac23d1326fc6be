"""Copies of the ops of a Func that do not depend on its linear inputs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tilekern.ir.carries import carries
from tilekern.ir.control import Fold, Switch, While
from tilekern.ir.core import Block, Builder, Op, Value
from tilekern.ir.debug import Assert, Print
from tilekern.ir.memory import WriteOp


class Replay(Builder):
    """Copies ops that do not depend on the linear inputs, with fresh values: a block may have several copies."""

    def __init__(self, active: set[Value]) -> None:
        super().__init__()
        self._active = active
        self._copies: dict[Value, Value] = {}

    def copy_of(self, value: Value) -> Value:
        """The copy of a value; a value without a copy itself."""
        return self._copies.get(value, value)

    def replay(self, block: Block) -> None:
        """Add copies of the ops of a block that depend on no linear input and store nothing."""
        for op in block.ops:
            self._replay(op)

    def _replay(self, op: Op) -> None:
        if isinstance(op, (Print, Assert)):
            return
        if isinstance(op, WriteOp):
            self.replay_write(op)
        elif isinstance(op, (Fold, While)):
            self._replay_loop(op)
        elif isinstance(op, Switch):
            self._replay_switch(op)
        elif self._active.isdisjoint(op.results):
            copied = self.add(op.copy(tuple(map(self.copy_of, op.operands))))
            self._copies.update(zip(op.results, copied, strict=True))

    def _replay_loop(self, op: Fold | While) -> None:
        inactive = [c for c in carries(op) if c.result not in self._active]
        regions: list[Block] = []
        for number, region in enumerate(op.regions):
            args = (*region.args[: len(region.args) - len(op.results)], *(c.args[number] for c in inactive))
            fresh = tuple(Value(a.type, a.name) for a in args)
            self._copies.update(zip(args, fresh, strict=True))
            results = region.results if region is not op.regions[-1] else [c.yielded for c in inactive]
            regions.append(self.block(fresh, partial(self._region, op, region, results)))
        bounds = op.operands[: len(op.operands) - len(op.results)]
        operands = (*bounds, *(c.init for c in inactive))
        copied = self.add(op.copy(tuple(map(self.copy_of, operands)), tuple(regions)))
        self._copies.update(zip((c.result for c in inactive), copied, strict=True))

    def _replay_switch(self, op: Switch) -> None:
        inactive = [n for n, r in enumerate(op.results) if r not in self._active]
        regions = tuple(
            self.block((), partial(self._region, op, region, [region.results[n] for n in inactive]))
            for region in op.regions
        )
        copied = self.add(op.copy(tuple(map(self.copy_of, op.operands)), regions))
        self._copies.update(zip((op.results[n] for n in inactive), copied, strict=True))

    def _region(self, op: Op, region: Block, results: Sequence[Value], *_: Value) -> tuple[Value, ...]:
        self.replay_region(op, region)
        return tuple(map(self.copy_of, results))

    def replay_write(self, op: WriteOp) -> None:
        """Leave a write out."""

    def replay_region(self, op: Op, region: Block) -> None:
        """Add the ops of a region of a loop or a switch."""
        self.replay(region)
