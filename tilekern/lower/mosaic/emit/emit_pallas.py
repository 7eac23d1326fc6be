"""The body of the Pallas kernel: a program of a Func, op by op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from tilekern.ir.analysis.backward_slice import backward_slice
from tilekern.ir.control import Fold, Switch, While
from tilekern.ir.core import Block, Op, Value
from tilekern.ir.debug import Assert, Print
from tilekern.ir.memory import Atomic, Load, Store, WriteOp
from tilekern.lower.mosaic.emit import debug
from tilekern.lower.mosaic.emit.index_maps import GridStep, block_index, when
from tilekern.lower.mosaic.emit.memory import Memory
from tilekern.lower.mosaic.emit.unrolled_loop import unrolled_loop
from tilekern.lower.mosaic.emit.values import Values, from_carry
from tilekern.lower.mosaic.plan.hbm_layout import Layout
from tilekern.lower.mosaic.plan.kernel_plan import KernelPlan
from tilekern.lower.named_regions import NamedRegions
from tilekern.lower.positions import tile_range


class Emitter:
    """Emits one step of the grid.

    Args:
      plan: the plan of the kernel.
      step: the step of the grid.
      refs: the blocks of inputs by layout, of outputs by param, and the tables.
      scratch: the scratch buffers of the plan.
      interpreted: True if Pallas interprets the kernel.
    """

    def __init__(
        self,
        plan: KernelPlan,
        step: GridStep,
        refs: Mapping[str, Mapping[Any, Any]],
        scratch: Sequence[Any],
        interpreted: bool,
    ) -> None:
        self._plan, self._step, self._scratch, self._interpreted = plan, step, scratch, interpreted
        self._ranges = plan.ranges
        self._values = Values(plan.forms, step.indices, interpreted)
        self._regions = NamedRegions()
        arrays = refs["inputs"], refs["outputs"], refs["tables"]
        self._memory = Memory(
            plan.layouts, *arrays, plan.row_dma_inputs, self._ranges, self._values.scalar, self._values.row
        )
        self._use_counts = _use_counts(plan.func.body, plan.scratch_index)

    def run(self) -> None:
        """Emit the program, or one step of its grid loop."""
        grid_loop = self._plan.grid_loop
        if grid_loop is None:
            self.block(self._plan.func.body.ops)
            return
        inits = grid_loop.chain[0].inits
        saved = set(grid_loop.saved)

        def start() -> None:
            stores = [op for op in grid_loop.before if isinstance(op, WriteOp | Print | Assert)]
            self._recompute([*inits, *grid_loop.saved, *(v for op in stores for v in op.operands)], set(), stores)
            for value in grid_loop.saved:
                self._save(self._plan.scratch_index[value], value)
            for init, result in zip(inits, grid_loop.chain[0].results, strict=True):
                self._save(self._plan.scratch_index[result], init, result)

        when(self._step.first)(start)
        for fold in grid_loop.chain:

            def body(fold: Fold = fold) -> None:
                self._values.set(fold.body.args[0], self._step.tile)
                used = [v for op in fold.body.ops for v in op.uses()]
                self._recompute([*used, *fold.body.results], saved, ())
                self._iteration(fold, fold.body.args[1:])

            when(self._is_live(fold))(body)

        def finish() -> None:
            last = grid_loop.chain[-1].results
            self._load_scratch(last)
            self._recompute([v for op in grid_loop.after for v in op.uses()], saved, ())
            self.block(grid_loop.after)

        when(self._step.last)(finish)

    def _recompute(self, values: Sequence[Value], saved: set[Value], stores: Sequence[Op]) -> None:
        """Emit the ops before the grid loop that `values` depend on, and `stores`; read `saved` values from scratch."""
        grid_loop = self._plan.grid_loop
        assert grid_loop is not None
        self._load_scratch([v for v in grid_loop.saved if v in saved])
        ops = backward_slice(grid_loop.before, values, saved)
        to_emit = {*ops, *stores}
        self.block([op for op in grid_loop.before if op in to_emit])

    def _is_live(self, fold: Fold) -> Any:
        """True if the step's tile is within the bounds of a fold."""
        first, last = self._bounds(fold)
        tile = self._step.tile
        return self._step.live & (tile >= first) & (tile < last)

    # --- ops ---

    def block(self, ops: Sequence[Op]) -> None:
        """Emit ops."""
        for op in ops:
            with self._regions.around(op):
                self._emit(op)

    def _emit(self, op: Op) -> None:
        match op:
            case Load():
                self._values.set(op.result, self._memory.load(op, self._mask(op.mask)))
            case Store():
                self._memory.store(op, self._values.get(op.value, "row"), self._mask(op.mask))
            case Atomic():
                self._memory.atomic(op, self._values.get(op.value, "row"), self._mask(op.mask))
            case Print() | Assert():
                debug.emit(op, [self._values.plain(v) for v in op.operands], self._interpreted)
            case Fold():
                self._fold(op)
            case While():
                self._while(op)
            case Switch():
                self._switch(op)
            case _:
                self._values.compute(op)

    def _mask(self, mask: Value | None) -> Any:
        return None if mask is None else self._values.get(mask, "row")

    # --- control ---

    def _bounds(self, op: Fold) -> tuple[Any, Any]:
        """The first tile of a fold, and the end of its tiles."""
        bounds = tile_range(self._bound(op.start), self._bound(op.stop), op.axis)
        first, last = (np.int32(b) if isinstance(b, int) else b for b in bounds)
        return first, last

    def _bound(self, value: Value) -> Any:
        interval = self._ranges.get(value)
        if interval is not None and interval.known:
            return interval.low
        grid_loop = self._plan.grid_loop
        ahead = grid_loop is not None and self._plan.scalars.key(value) is not None
        return self._step.evaluate(value) if ahead else self._values.scalar(value)

    def _fold(self, op: Fold) -> None:
        scratch_index = self._plan.scratch_index
        for init, result in zip(op.inits, op.results, strict=True):
            if result in scratch_index and scratch_index.get(init) != scratch_index[result]:
                self._save(scratch_index[result], init, result)
        first, last = self._bounds(op)
        if op in self._plan.pipelines:
            self._pipeline(op, first, last)
            return
        scalars = [n for n, r in enumerate(op.results) if r not in scratch_index]

        def body(i: Any, carried: Sequence[Any]) -> Sequence[Any]:
            self._values.set(op.body.args[0], first + last - 1 - i if op.reverse else i)
            for n, x in zip(scalars, carried, strict=True):
                self._values.set(op.body.args[1 + n], from_carry(x, op.results[n]), self._values.carried(op.results[n]))
            return self._iteration(op, op.body.args[1:])

        inits = [self._values.as_carry(op.inits[n], op.results[n]) for n in scalars]
        finals = unrolled_loop(first, last, body, inits, self._plan.unrollings[op].factor)
        for n, x in zip(scalars, finals, strict=True):
            self._values.set(op.results[n], from_carry(x, op.results[n]), self._values.carried(op.results[n]))
        self._load_scratch([r for r in op.results if r in scratch_index and self._use_counts.get(r)])

    def _pipeline(self, op: Fold, first: Any, last: Any) -> None:
        """Emit a pipelined loop."""
        plan, pipeline = self._plan, self._plan.pipelines[op]
        index = plan.scalars.canonical(op.body.args[0])
        inputs = [layout for layout in plan.hbm_inputs if layout.window in pipeline.inputs]
        static = isinstance(first, np.integer) and isinstance(last, np.integer)
        steps = int(last - first) if static else last - first

        def tile(n: Any) -> Any:
            return last - 1 - n if op.reverse else first + n

        def spec(layout: Layout) -> pl.BlockSpec:
            def index_map(n: Any) -> tuple[Any, ...]:
                indices = {**self._step.indices, index: tile(n)}
                return block_index(layout, replace(self._step, indices=indices))

            return pl.BlockSpec(layout.block, index_map)

        def body(*refs: Any) -> None:
            self._values.set(op.body.args[0], tile(pl.program_id(0)))
            blocks = dict(zip(inputs, refs, strict=False))
            stored = dict(zip(pipeline.outputs, refs[len(inputs) :], strict=True))
            with self._memory.with_blocks(blocks, stored):
                self._iteration(op, op.body.args[1:])

        def run() -> None:
            pltpu.emit_pipeline(
                body,
                grid=(steps,),
                in_specs=[spec(layout) for layout in inputs],
                out_specs=[spec(plan.outputs[p]) for p in pipeline.outputs],
            )(*(self._memory.ref(layout) for layout in inputs), *(self._memory.ref(p) for p in pipeline.outputs))

        if static:
            if first < last:
                run()
        else:
            pl.when(first < last)(run)
        self._load_scratch([r for r in op.results if self._use_counts.get(r)])

    def _iteration(self, op: Fold, args: Sequence[Value]) -> tuple[Any, ...]:
        """Emit one iteration; carries in scratch are read first and written last, all other carries are returned."""
        scratch_index = self._plan.scratch_index
        for arg, result in zip(args, op.results, strict=True):
            if result in scratch_index and self._use_counts.get(arg):
                self._values.set(arg, self._scratch_value(scratch_index[result], result), self._values.carried(result))
        self.block(op.body.ops)
        written = [
            (scratch_index[r], v, r) for v, r in zip(op.body.results, op.results, strict=True) if r in scratch_index
        ]
        arrays = [self._values.as_carry(v, r) for _, v, r in written]
        for (number, _, _), array in zip(written, arrays, strict=True):
            self._store_scratch(number, array)
        pairs = zip(op.body.results, op.results, strict=True)
        return tuple(self._values.as_carry(v, r) for v, r in pairs if r not in scratch_index)

    def _save(self, number: int, value: Value, as_carry: Value | None = None) -> None:
        self._store_scratch(number, self._values.as_carry(value, as_carry or value))

    def _store_scratch(self, number: int, array: Any) -> None:
        scratch = self._plan.scratch[number]
        if scratch.shape:
            self._scratch[number][...] = array
        else:
            self._scratch[number][0] = array.astype(scratch.dtype)

    def _scratch_value(self, number: int, value: Value) -> Any:
        return from_carry(self._scratch[number][... if value.tile.shape else 0], value)

    def _load_scratch(self, values: Sequence[Value]) -> None:
        """Set each value that has a scratch buffer from its buffer."""
        for value in values:
            if value in self._plan.scratch_index:
                self._values.set(
                    value, self._scratch_value(self._plan.scratch_index[value], value), self._values.carried(value)
                )
            elif not value.tile.size:
                self._values.set(value, jnp.zeros(value.tile.shape, value.tile.dtype))

    def _while(self, op: While) -> None:
        def place(args: Sequence[Value], carried: Sequence[Any]) -> None:
            for arg, x, result in zip(args, carried, op.results, strict=True):
                self._values.set(arg, from_carry(x, arg), self._values.carried(result))

        def condition(carried: Sequence[Any]) -> Any:
            place(op.condition.args, carried)
            self.block(op.condition.ops)
            return self._values.scalar(op.condition.results[0])

        def body(carried: Sequence[Any]) -> Sequence[Any]:
            place(op.body.args, carried)
            self.block(op.body.ops)
            pairs = zip(op.body.results, op.results, strict=True)
            return tuple(self._values.as_carry(v, r) for v, r in pairs)

        inits = tuple(self._values.as_carry(v, r) for v, r in zip(op.operands, op.results, strict=True))
        place(op.results, lax.while_loop(condition, body, inits))

    def _switch(self, op: Switch) -> None:
        interval = self._ranges.get(op.operands[0])
        if len(op.regions) == 1 or (interval is not None and interval.known):
            number = interval.low if interval is not None and interval.known else 0
            region = op.regions[min(max(number, 0), len(op.regions) - 1)]
            self.block(region.ops)
            for result, value in zip(op.results, region.results, strict=True):
                form = self._values.carried(result)
                self._values.set(result, self._values.get(value, form), form)
            return

        def branch(region: Block) -> Callable[[], tuple[Any, ...]]:
            def emit() -> tuple[Any, ...]:
                self.block(region.ops)
                return tuple(self._values.as_carry(v, r) for v, r in zip(region.results, op.results, strict=True))

            return emit

        results = cast(Any, lax.switch(self._values.scalar(op.operands[0]), [branch(r) for r in op.regions]))
        for result, x in zip(op.results, results, strict=True):
            self._values.set(result, from_carry(x, result), self._values.carried(result))


def _use_counts(block: Block, scratch_index: Mapping[Value, int]) -> dict[Value, int]:
    """The number of uses of each value, not counting inits that are already in the scratch buffer of their carry."""
    counts: dict[Value, int] = {}

    def count(values: Sequence[Value]) -> None:
        for value in values:
            counts[value] = counts.get(value, 0) + 1

    for op in block.walk():
        if isinstance(op, Fold):
            count(op.operands[:2])
            count(
                [
                    v
                    for v, r in zip(op.inits, op.results, strict=True)
                    if v not in scratch_index or scratch_index[v] != scratch_index.get(r)
                ]
            )
        else:
            count(op.operands)
        for region in op.regions:
            count(region.results)
    return counts
