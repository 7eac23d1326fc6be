"""A Func as a JAX function: the grid as loops over batches of programs, control flow by `jax.lax`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tilekern.ir.analysis import ranges
from tilekern.ir.analysis.ranges import Interval
from tilekern.ir.compute import Dot
from tilekern.ir.control import Fold, Switch, While
from tilekern.ir.core import Block, Func, Op, Value
from tilekern.ir.debug import Assert, Print
from tilekern.ir.memory import Atomic, Load, Store, WriteOp
from tilekern.ir.types import BF16, accumulator, kind_of
from tilekern.lower.host_callbacks import callback_of
from tilekern.lower.named_regions import NamedRegions
from tilekern.lower.positions import tile_range
from tilekern.lower.xla.emit import access
from tilekern.lower.xla.emit.access import Batched, GridIndex
from tilekern.lower.xla.emit.atomics import atomic
from tilekern.lower.xla.emit.narrow_dots import narrow_dot
from tilekern.lower.xla.emit.ops import function_of
from tilekern.lower.xla.plan.batching import BatchPlan, Segment, plan_batches

_MOST_PATHS = 30_000_000
"""The most paths from arrays in memory to a value: with more, XLA stores the value as an array.

LLVM's vectorizer may follow every path to its end, without notes on where it has been. The 20 rounds of Threefry, in
which a word is used three times, have 4 · 10¹⁰ paths, and a loop with them did not compile in half an hour. All limits
that were tried, from 2¹⁶ to 2³⁰, mend that, and differ in where a round is cut: with this one `sample` takes 1.1 times
as long as in one loop, with the others 1.4 to 4.6 times.
"""


def run(func: Func, *inputs: jax.Array) -> tuple[jax.Array, ...]:
    """Compute the outputs of `func`, in order; traceable by JAX, on any platform."""
    return Emitter(func, plan_batches(func)).run(inputs)


class Emitter:
    """Emits one Func.

    `_arrays` is the memory: the inputs, and the outputs after the stores so far. Loops and branches that store pass the
    arrays of their outputs as loop or branch values.
    """

    def __init__(self, func: Func, schedule: BatchPlan) -> None:
        self._func, self._plan = func, schedule
        self._arrays: dict[Value, jax.Array] = {}
        self.env: dict[Value, Batched] = {}
        self._sizes: dict[int, int] = {}
        self._regions = NamedRegions()

    def run(self, inputs: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The outputs for `inputs`, in order."""
        func = self._func
        self._arrays = dict(zip(func.inputs, inputs, strict=True))
        for output in func.outputs:
            if output not in self._arrays:
                # A sum of narrow floats accumulates in a wide dtype, and is rounded once.
                wide = output.ref.role == "sum" and kind_of(output.ref.dtype) == "float"
                dtype = accumulator(output.ref.dtype) if wide else output.ref.dtype
                self._arrays[output] = jnp.zeros(output.ref.shape, dtype)
        if 0 not in func.grid:
            self._grid(0)
        return tuple(self._arrays[output].astype(output.ref.dtype) for output in func.outputs)

    # --- the grid ---

    def _grid(self, number: int) -> None:
        """Run all programs, given the indices along the first `number` axes."""
        if number == len(self._func.axes):
            self.block(self._func.body)
            return
        for segment in self._plan.segments[number]:
            self._segment(number, segment)

    def _segment(self, number: int, segment: Segment) -> None:
        if segment.chunks == 1:
            self._place(number, segment, segment.first)
            self._grid(number + 1)
            return

        def chunk(c: jax.Array, state: Sequence[jax.Array]) -> Sequence[jax.Array]:
            self.set(self._func.outputs, state)
            self._place(number, segment, c * segment.count + segment.first)
            self._grid(number + 1)
            return self.get(self._func.outputs)

        outputs = self._func.outputs
        self.set(outputs, loop(0, segment.chunks, chunk, self.get(outputs)))

    def _place(self, number: int, segment: Segment, base: Any) -> None:
        """Set the index along an axis to the `count` numbers from `base` on."""
        low, high = segment.first, segment.first + (segment.chunks - 1) * segment.count
        bases, interval = Interval(low, high), Interval(low, high + segment.count - 1)
        self._sizes[number] = segment.count
        index: Batched = Batched(base, (), interval)
        if segment.count > 1:
            array = jnp.arange(segment.count, dtype=jnp.int32) + base
            index = GridIndex(array, (number,), interval, base=base, count=segment.count, base_interval=bases)
        self.env[self._func.body.args[number]] = index

    # --- memory as state ---

    def get(self, refs: Sequence[Value]) -> tuple[jax.Array, ...]:
        """The current arrays of refs."""
        return tuple(self._arrays[r] for r in refs)

    def set(self, refs: Sequence[Value], arrays: Sequence[jax.Array]) -> None:
        """Replace the arrays of refs."""
        self._arrays.update(zip(refs, arrays, strict=True))

    # --- blocks ---

    def block(self, block: Block) -> None:
        """Emit the ops of a block."""
        for op in block.ops:
            with self._regions.around(op):
                self._emit(op)

    def _emit(self, op: Op) -> None:
        match op:
            case Load():
                loaded = access.load(op, self._arrays[op.ref], self.env)
                self.env[op.result] = _joined(loaded, [self.env[v] for v in op.operands if v in self.env])
            case Store():
                self._arrays[op.ref] = access.store(op, self._arrays[op.ref], self.env, self._sizes)
            case Atomic():
                self._arrays[op.ref] = atomic(op, self._arrays[op.ref], self.env, self._sizes)
            case Print() | Assert():
                self._debug(op)
            case Fold():
                FoldEmitter(self, op).run()
            case While():
                self._while(op)
            case Switch():
                self._switch(op)
            case _:
                self.env[op.result] = self._pure(op)

    def _pure(self, op: Op) -> Batched:
        operands = [self.env[v] for v in op.operands]
        interval = ranges.transfer(op, [v.interval for v in operands])
        tile = op.result.tile
        if interval is not None and interval.known:
            return Batched(jnp.full(tile.shape, interval.low, tile.dtype), (), interval)
        axes = tuple(sorted({a for v in operands for a in v.axes}))
        if isinstance(op, Dot) and op.operands[0].tile.dtype == BF16:
            return Batched(narrow_dot(op, operands[0], operands[1], axes), axes, interval)
        function = function_of(op)
        for axis in reversed(axes):
            function = jax.vmap(function, in_axes=tuple(0 if axis in v.axes else None for v in operands))
        return _joined(Batched(function(*map(access.as_array, operands)), axes, interval), operands)

    def _debug(self, op: Print | Assert) -> None:
        operands = [self.env[v] for v in op.operands]
        function = callback_of(op)
        for axis in sorted({a for v in operands for a in v.axes}, reverse=True):
            function = jax.vmap(function, in_axes=tuple(0 if axis in v.axes else None for v in operands))
        function(*(access.as_array(v) for v in operands))

    # --- control ---

    def carry_axes(self, values: Sequence[Value]) -> list[tuple[int, ...]]:
        """The batched axes that loop values depend on, by the plan's analysis."""
        varying = self._plan.varying
        batched = {n for n, size in self._sizes.items() if size > 1}
        return [tuple(sorted(varying.get(v, frozenset()) & batched)) for v in values]

    def aligned(self, values: Sequence[Batched], axes: Sequence[tuple[int, ...]]) -> tuple[jax.Array, ...]:
        """The arrays of values, each with the leading dims of `axes`."""
        return tuple(access.aligned(v, a, self._sizes) for v, a in zip(values, axes, strict=True))

    def bind(self, values: Sequence[Value], arrays: Sequence[Any], axes: Sequence[tuple[int, ...]]) -> None:
        """Set the arrays of values."""
        for value, array, along in zip(values, arrays, axes, strict=True):
            self.env[value] = Batched(array, along)

    def _while(self, op: While) -> None:
        refs = stored(op.body)
        axes = self.carry_axes(op.results)

        def condition(state: tuple[Any, Any]) -> jax.Array:
            self.bind(op.condition.args, state[1], axes)
            self.set(refs, state[0])
            self.block(op.condition)
            return jnp.asarray(self.env[op.condition.results[0]].array)

        def body(state: tuple[Any, Any]) -> tuple[Any, Any]:
            self.bind(op.body.args, state[1], axes)
            self.set(refs, state[0])
            self.block(op.body)
            return self.get(refs), self.aligned([self.env[v] for v in op.body.results], axes)

        inits = self.aligned([self.env[v] for v in op.operands], axes)
        memory, carries = lax.while_loop(condition, body, (self.get(refs), inits))
        self.set(refs, memory)
        self.bind(op.results, carries, axes)

    def _switch(self, op: Switch) -> None:
        index = self.env[op.operands[0]]
        if index.interval is not None and index.interval.known:
            region = op.regions[min(max(index.interval.low, 0), len(op.regions) - 1)]
            self.block(region)
            self.env.update((r, self.env[v]) for r, v in zip(op.results, region.results, strict=True))
            return
        refs = tuple(dict.fromkeys(ref for region in op.regions for ref in stored(region)))
        axes = self.carry_axes(op.results)
        before = self.get(refs)

        def branch(region: Block) -> Callable[[], tuple[Any, Any]]:
            def emit() -> tuple[Any, Any]:
                self.set(refs, before)
                self.block(region)
                return self.get(refs), self.aligned([self.env[v] for v in region.results], axes)

            return emit

        memory, results = cast(Any, lax.switch(index.array, [branch(region) for region in op.regions]))
        self.set(refs, memory)
        self.bind(op.results, results, axes)


class FoldEmitter:
    """Emits one Fold: a loop over the full tiles, then the ragged last tile, whose place is known."""

    def __init__(self, emitter: Emitter, op: Fold) -> None:
        self._emitter, self._op = emitter, op
        self._refs = stored(op.body)
        self._axes = emitter.carry_axes(op.results)

    def run(self) -> None:
        """Emit the loop, and bind its results."""
        emitter, op = self._emitter, self._op
        env = emitter.env
        state = (
            emitter.get(self._refs),
            emitter.aligned([env[v] for v in op.inits], self._axes),
        )
        first, last = self._bounds(env[op.start], env[op.stop])
        parts = (self._full_tiles, self._ragged_tile)
        for part in reversed(parts) if op.reverse else parts:
            state = part(first, last, state)
        emitter.set(self._refs, state[0])
        emitter.bind(op.results, state[1], self._axes)

    def _bounds(self, start: Batched, stop: Batched) -> tuple[Any, Any]:
        """(first tile, tile after the last) of bounds in elements: an int for a known bound, else an int32 tracer."""
        first, last = (b.interval.low if b.interval and b.interval.known else b.array for b in (start, stop))
        return tile_range(first, last, self._op.axis)

    def _step(self, index: Any, interval: Interval, state: Any) -> Any:
        """The state after tile number `index`: the arrays that the body stores to, and the carries, as a pair.

        `interval` holds every value of `index`: Interval(3, 3) for tile 3 alone.
        """
        emitter, body = self._emitter, self._op.body
        emitter.set(self._refs, state[0])
        emitter.bind(body.args[1:], state[1], self._axes)
        env = emitter.env
        env[body.args[0]] = Batched(index, (), interval)
        emitter.block(body)
        results = [env[v] for v in body.results]
        return emitter.get(self._refs), emitter.aligned(results, self._axes)

    def _full_tiles(self, first: Any, last: Any, state: Any) -> Any:
        full = self._op.axis.full_tiles
        last = min(last, full) if isinstance(last, int) else jnp.minimum(last, full)
        static = isinstance(first, int) and isinstance(last, int)
        if full == 0 or (static and first >= last):
            return state
        if static and last - first == 1:
            return self._step(first, Interval(first, first), state)
        low = first if isinstance(first, int) else 0
        interval = Interval(low, (last if isinstance(last, int) else full) - 1)

        def step(i: jax.Array, state: Any) -> Any:
            index = first + last - 1 - i if self._op.reverse else i
            return self._step(index, interval, state)

        return loop(first, last, step, state)

    def _ragged_tile(self, first: Any, last: Any, state: Any) -> Any:
        axis = self._op.axis
        ragged = axis.full_tiles
        if ragged == axis.tiles:
            return state

        def step(state: Any) -> Any:
            return self._step(ragged, Interval(ragged, ragged), state)

        if isinstance(first, int) and isinstance(last, int):
            return step(state) if first <= ragged < last else state

        def skip(state: Any) -> Any:
            return state

        return cast(Any, lax.cond((first <= ragged) & (ragged < last), step, skip, state))


def _joined(result: Batched, operands: Sequence[Batched]) -> Batched:
    """A result with the paths of its operands, as an array in memory if they are more than `_MOST_PATHS`."""
    paths = max(1, sum(v.paths for v in operands))
    if paths <= _MOST_PATHS:
        return replace(result, paths=paths)
    return replace(result, array=lax.optimization_barrier(result.array))


def loop(first: Any, last: Any, step: Callable[[jax.Array, Any], Any], state: Any) -> Any:
    """`lax.fori_loop` with an int32 counter, also where 64-bit types are on."""
    first, last = (np.int32(bound) if isinstance(bound, int) else bound for bound in (first, last))

    def narrow(i: jax.Array, state: Any) -> Any:
        return step(i.astype(jnp.int32), state)

    return cast(Any, lax.fori_loop(first, last, narrow, state))


def stored(block: Block) -> tuple[Value, ...]:
    """The refs that a block stores to, inner blocks included."""
    return tuple(dict.fromkeys(op.ref for op in block.walk() if isinstance(op, WriteOp)))
