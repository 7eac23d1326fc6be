"""Follows the scratch buffers of a plan in the order of the emitter, and checks each read. See `verify_plan`."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from tilekern import source
from tilekern.ir.analysis.backward_slice import backward_slice
from tilekern.ir.control import Fold, Switch, While
from tilekern.ir.core import Op, Value
from tilekern.lower.mosaic.plan.grid_loops import GridLoop
from tilekern.lower.mosaic.plan.kernel_plan import KernelPlan
from tilekern.lower.mosaic.plan.plan_rules import require
from tilekern.lower.mosaic.plan.vector_forms import is_vector, shape_in


def check_carries(plan: KernelPlan) -> None:
    """Check that each read of a scratch buffer finds the value that the reader expects.

    Raises:
      PlanError: a read finds another value, or a value of another type.
    """
    _check_types(plan)
    follower = _Follower(plan)
    if plan.grid_loop is None:
        follower.ops(plan.func.body.ops)
    else:
        follower.grid_loop(plan.grid_loop)


def _check_types(plan: KernelPlan) -> None:
    for value, number in plan.scratch_index.items():
        scratch, tile = plan.scratch[number], value.tile
        shape = shape_in(plan.forms.carried(value), *tile.shape) if is_vector(value) else tile.shape
        got = f"{list(scratch.shape)} {scratch.dtype} in buffer {number}"
        fits = scratch.shape == shape and scratch.dtype.itemsize >= tile.dtype.itemsize and prod(shape) >= tile.size
        require(fits, "a buffer has another type than its value", f"{list(shape)} for {value.type}", got)


class _Follower:
    """Follows the ops. `_held` has the value that each buffer holds; a carry stands for its fold's result."""

    def __init__(self, plan: KernelPlan) -> None:
        self._plan, self._number = plan, plan.scratch_index
        self._held: dict[int, Value] = {}

    def ops(self, ops: Iterable[Op]) -> None:
        """Follow ops, and each loop twice: an iteration begins with the buffers that the previous iteration left."""
        for op in ops:
            with source.at(op.loc):
                match op:
                    case Fold():
                        self._fold(op)
                    case While():
                        for _ in range(2):
                            self.ops(op.condition.ops)
                            self.ops(op.body.ops)
                    case Switch():
                        self._switch(op)
                    case _:
                        pass

    def _expect(self, values: Iterable[Value], reader: str) -> None:
        for value in values:
            if value in self._number:
                held = self._held.get(self._number[value])
                expected = f"{value.name or 'a value'}: {value.type} in buffer {self._number[value]}"
                got = "nothing" if held is None else f"{held.name or 'another value'}: {held.type}"
                require(held is value, f"{reader} what a buffer does not hold", expected, got)

    def _write(self, values: Iterable[Value]) -> None:
        self._held.update((self._number[value], value) for value in values if value in self._number)

    def _fold(self, op: Fold) -> None:
        for init, result in zip(op.inits, op.results, strict=True):
            if result in self._number and self._number.get(init) == self._number[result]:
                self._expect([init], "a loop begins with")  # without a copy
            self._write([result])
        for _ in range(2):
            before = dict(self._held)
            self._expect(op.results, "an iteration reads")
            self.ops(op.body.ops)
            self._write(op.results)
            if before == self._held:
                return

    def _switch(self, op: Switch) -> None:
        before, left = self._held, list[dict[int, Value]]()
        for region in op.regions:
            self._held = dict(before)
            self.ops(region.ops)
            left.append(self._held)
        self._held = {n: v for n, v in left[0].items() if all(held.get(n) is v for held in left)}

    def grid_loop(self, loop: GridLoop) -> None:
        """Follow the first step, two steps that run each loop of the chain, and the last step."""
        carries = loop.chain[0].results
        for fold in loop.chain:
            same = [self._number.get(r) for r in fold.results] == [self._number.get(r) for r in carries]
            require(same, "a loop of a chain has other buffers", "those of the first one", "others")
            missing = [r for r in fold.results if r.tile.size and r not in self._number]
            require(not missing, "a step keeps no carry", "a buffer for each carry", f"none for {len(missing)}")
        self.ops(backward_slice(loop.before, [*loop.chain[0].inits, *loop.saved]))
        self._write(loop.saved)
        self._write(carries)
        for _ in range(2):
            for fold in loop.chain:
                used = [*(v for op in fold.body.ops for v in op.uses()), *fold.body.results]
                self._expect(loop.saved, "a step reads")
                self.ops(backward_slice(loop.before, used, set(loop.saved)))
                self._expect(carries, "a step reads")
                self.ops(fold.body.ops)
                self._write(carries)
        self._expect(carries, "the last step reads")
        self.ops(backward_slice(loop.before, [v for op in loop.after for v in op.uses()], set(loop.saved)))
        self.ops(loop.after)
