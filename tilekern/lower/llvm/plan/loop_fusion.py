"""What becomes of each op: which are computed in one loop nest, which have memory of their own, and where that lies.

A *step* is what the emitter makes one piece of code of. A `Group` is a loop nest over one space of lanes, in which
several results are computed: tiles to keep, reductions of the last dim, stores. All ops that are virtual (see `index`)
become part of the steps that use them. A tile that two steps use is kept by the first, if computing it again would cost
more than loading it.

Tiles that are kept have a `Slot` in the worker's scratch memory; see `slots`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tilekern.ir.compute import Dot, Reduce
from tilekern.ir.control import Fold, Switch, While
from tilekern.ir.core import Block, Func, Op, Value
from tilekern.ir.dynamic import Take
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import MemoryOp, Store
from tilekern.ir.ordering import Sort
from tilekern.ir.shape import Broadcast, Reshape
from tilekern.ir.types import TileType
from tilekern.lower.llvm.element_index import is_virtual
from tilekern.lower.llvm.emit.sorts import sorts_words
from tilekern.lower.llvm.plan.steps import (
    AnyStep,
    Buffer,
    BufferCopies,
    Expressions,
    LoopNest,
    Map,
    Plan,
    Step,
    is_addressable,
)

# Instructions that computing a tile a second time may take, where it need not be kept then.
_CHEAP = 2

ScratchOf = Callable[[Op, Expressions], tuple[int, Any]]
"""The bytes that the code of an op needs beside its results, and how it reads its operands."""


def fuse_loops(func: Func, scratch_of: ScratchOf) -> Plan:
    """The plan for a legal Func.

    Args:
      func: the Func.
      scratch_of: the scratch memory of an op, and how it reads its operands.
    """
    return _Fuser(func, scratch_of).run()


class _Fuser:
    """Collects the steps of block after block."""

    def __init__(self, func: Func, scratch_of: ScratchOf) -> None:
        self._func, self._scratch_of = func, scratch_of
        self._plan = Plan()
        self._expressions = Expressions(func)
        self._buffers = self._expressions.buffers
        self._producer: dict[Value, AnyStep] = {}
        self._steps: list[AnyStep] = []
        self._computes: dict[AnyStep, dict[Value, bool]] = {}
        self._uses = Counter(v for op in func.body.ops for v in op.uses())
        # What dots in loops read again and again is copied: in the array its rows may be far apart.
        self._left_operands = {op.operands[0] for op in func.walk() if isinstance(op, Dot)}
        self._dot_sums = dict(_sums_of_dots(func, self._uses))

    def run(self) -> Plan:
        self._block(self._func.body, [], None)
        return self._plan

    # --- blocks ---

    def _block(
        self, block: Block, live_in: list[tuple[Value, Buffer]], buffers: Sequence[Buffer | None] | None
    ) -> None:
        """The steps of a block, which puts what it yields into slots."""
        outer, self._steps = self._steps, []
        self._plan.steps[block], self._plan.live_in[block] = self._steps, live_in
        with self._expressions.inside(live_in):
            for op in block.ops:
                self._op(op)
            if buffers is not None:
                self._yield(block, buffers)
        self._steps = outer

    def _op(self, op: Op) -> None:
        if op in self._dot_sums.values():
            return  # becomes part of the addition
        dot = self._dot_sums.get(op)
        if dot is not None:
            self._dot(dot, op.result, next(v for v in op.operands if v is not dot.result))
            return
        match op:
            case Fold() | While() | Switch():
                self._control(op)
            case Dot():
                self._dot(op, op.result, None)
            case Store() if op.value.tile.shape:
                values = [v for v in (op.value, op.mask, *op.positions) if v is not None]
                self._nest_for(op.value.tile.shape, values, op).stores.append(op)
            case Reduce() if op.dims[0] == len(op.operands[0].tile.shape) - 1:
                self._materialize_broadcasts(op.operands[0])
                nest = self._nest_for(op.operands[0].tile.shape, op.operands)
                nest.reduces.append(op)
                self._define(op.result, nest)
            case Reshape() if not is_virtual(op) and op.result.tile.shape:
                self._alias(op)
            case _ if op.results and op.result.tile.shape and is_virtual(op):
                pass  # where it is used
            case _:
                self._step(op)

    def _alias(self, op: Reshape) -> None:
        (x,) = op.operands
        self._materialize(x)
        buffer = self._buffers[op.result] = self._buffers[x]
        producer = self._producer.get(x)
        if producer is None:
            next(e for e in self._plan.live_in.values() if (x, buffer) in e).append((op.result, buffer))
        elif not isinstance(producer, BufferCopies):
            producer.produces.append((op.result, buffer))
            self._producer[op.result] = producer

    def _step(self, op: Op) -> Step:
        """An op with code of its own, which computes its virtual operands by itself."""
        if isinstance(op, Take) or (isinstance(op, Sort) and not sorts_words(op)):
            for x in op.operands[: op.num_keys if isinstance(op, Sort) else 1]:
                self._materialize(x)
        tiles = [v for v in op.operands if isinstance(v.type, TileType)]
        for x in tiles:
            self._materialize_broadcasts(x)
        size, packing = self._scratch_of(op, self._expressions)
        step = Step(op, Buffer(size) if size else None, packing)
        self._append(step, tiles)
        for result in op.results:
            self._define(result, step)
        return step

    def _append(self, step: AnyStep, values: Sequence[Value]) -> None:
        """Append a step that computes values; what is large and was computed before is kept from then on."""
        while (shared := self._computed_elsewhere(values, None)) is not None:
            self._materialize_in(*shared)
        self._computes[step] = {inner: False for v in values for inner in self._expressions.of(v.tile.shape, [v]).inner}
        self._steps.append(step)

    def _define(self, value: Value, step: Step | LoopNest, buffer: Buffer | None = None) -> None:
        """A value that a step makes."""
        self._producer[value] = step
        if value.tile.shape:
            found = self._buffers[value] = buffer or Buffer(value.tile.nbytes)
            step.produces.append((value, found))

    # --- groups ---

    def _nest_for(self, space: tuple[int, ...], values: Sequence[Value], store: Store | None = None) -> LoopNest:
        """The group that is to compute values for each lane of a space: one that there is, or a new one."""
        for value in values:
            self._materialize_broadcasts(value)
        while True:
            nest = self._nest_to_join(space, values, store)
            shared = self._computed_elsewhere(values, nest)
            if shared is None:
                break
            self._materialize_in(*shared)
        if nest is None:
            nest = LoopNest(space)
            self._steps.append(nest)
            self._computes[nest] = {}
        for inner, lanewise in self._expressions.of(space, values).inner.items():
            self._computes[nest][inner] = lanewise or self._computes[nest].get(inner, False)
        return nest

    def _nest_to_join(self, space: tuple[int, ...], values: Sequence[Value], store: Store | None) -> LoopNest | None:
        """The last group that can compute the values as well."""
        leaves = self._expressions.of(space, values).leaves
        for step in reversed(self._steps):
            made = [leaf for leaf in leaves if self._producer.get(leaf) is step]
            if isinstance(step, LoopNest) and step.space == space and not _touches(step, store):
                kept = {m.value for m in step.maps}
                if all(leaf in kept and leaves[leaf] for leaf in made):
                    return step
            if made or _touches(step, store):
                return None
        return None

    def _computed_elsewhere(self, values: Sequence[Value], nest: LoopNest | None) -> tuple[Value, AnyStep] | None:
        """The first large tile on the way to the values that another step of this block computes, and that step."""
        for value in values:
            for inner in self._expressions.of(value.tile.shape, [value]).inner:
                for step in self._steps:
                    computed = step is not nest and inner in self._computes.get(step, ())
                    if computed and self._expressions.cost(inner) > _CHEAP:
                        return inner, step
        return None

    def _materialize_in(self, value: Value, step: AnyStep) -> None:
        """Keep a tile that a step computes: there, or just before."""
        buffer = Buffer(value.tile.nbytes)
        if not (isinstance(step, LoopNest) and self._computes[step][value]):
            expression = self._expressions.of(value.tile.shape, [value])
            behind = any(self._producer.get(leaf) is step for leaf in expression.leaves)
            apart = LoopNest(value.tile.shape)
            self._steps.insert(self._steps.index(step) + behind, apart)
            self._computes[apart] = expression.inner
            step = apart
        step.maps.append(Map(value, buffer))
        self._define(value, step, buffer)

    def _materialize(self, value: Value) -> None:
        """Keep a tile."""
        if not self._expressions.is_available(value):
            buffer = Buffer(value.tile.nbytes)
            nest = self._nest_for(value.tile.shape, [value])
            if not self._expressions.is_available(value):  # unless that has kept it
                nest.maps.append(Map(value, buffer))
                self._define(value, nest, buffer)

    def _materialize_broadcasts(self, value: Value) -> None:
        """Keep tiles on the way that are computed once and read often: what is repeated."""
        if self._expressions.is_available(value):
            return
        for inner in reversed(list(self._expressions.of(value.tile.shape, [value]).inner)):
            op = self._expressions.definition[inner]
            if isinstance(op, Broadcast) and inner not in self._buffers:
                (x,) = op.operands
                if (
                    not self._expressions.is_available(x)
                    and x.tile.size < inner.tile.size
                    and self._expressions.cost(x) > _CHEAP
                ):
                    self._materialize(x)

    # --- dots ---

    def _dot(self, op: Dot, result: Value, init: Value | None) -> None:
        for side in (0, 1):
            x = op.operands[side]
            self._materialize_broadcasts(x)
            if (side == 0 and not is_addressable(x, self._expressions)) or (
                self._uses[x] > 1 and self._expressions.cost(x) > _CHEAP
            ):
                self._materialize(x)
        buffer = Buffer(result.tile.nbytes)
        if init is not None:
            self._compute_into(init, buffer)
        size, packing = self._scratch_of(op, self._expressions)
        step = Step(op, Buffer(size) if size else None, packing, init is not None)
        self._append(step, op.operands)
        self._define(op.result, step, buffer)
        if result is not op.result:
            self._define(result, step, buffer)

    def _compute_into(self, value: Value, buffer: Buffer) -> None:
        """Compute a tile into a slot, or copy it there."""
        if self._expressions.is_available(value):
            self._steps.append(BufferCopies([(self._buffers[value], buffer)]))
            return
        nest = self._nest_for(value.tile.shape, [value])
        if self._expressions.is_available(value):
            self._steps.append(BufferCopies([(self._buffers[value], buffer)]))
        else:
            nest.maps.append(Map(value, buffer))

    # --- control ---

    def _control(self, op: Fold | While | Switch) -> None:
        for value in _free_values(op):
            if not self._expressions.is_available(value) and (
                value in self._left_operands or self._expressions.cost(value) > 0
            ):
                self._materialize(value)
        inits = op.inits if isinstance(op, Fold) else op.operands if isinstance(op, While) else op.results
        buffers = [Buffer(v.tile.nbytes) if v.tile.shape else None for v in op.results]
        self._plan.carry_buffers[op] = buffers
        if not isinstance(op, Switch):
            for init, buffer in zip(inits, buffers, strict=True):
                if buffer is not None:
                    self._compute_into(init, buffer)
        step = Step(op)
        for region in op.regions:
            carries = region.args[len(region.args) - len(buffers) :] if region.args else ()
            live_in = [(a, s) for a, s in zip(carries, buffers, strict=False) if s is not None]
            self._block(region, live_in, None if isinstance(op, While) and region is op.condition else buffers)
        self._computes[step] = {}
        self._steps.append(step)
        for result, buffer in zip(op.results, buffers, strict=True):
            self._define(result, step, buffer)

    def _yield(self, block: Block, buffers: Sequence[Buffer | None]) -> None:
        """Copy what a block yields into the slots of the carries, all at once."""
        moves: list[tuple[Buffer, Buffer]] = []
        for value, buffer in zip(block.results, buffers, strict=True):
            if buffer is None:
                continue
            self._materialize(value)
            source = self._buffers[value]
            if source is buffer:
                continue
            if source in buffers:  # another carry's: it may be overwritten before it is copied
                source = Buffer(buffer.nbytes)
                self._steps.append(BufferCopies([(self._buffers[value], source)]))
            moves.append((source, buffer))
        if moves:
            self._steps.append(BufferCopies(moves))


def _touches(step: AnyStep, store: Store | None) -> bool:
    """Whether a step uses the array that is stored to, or may."""
    if store is None or isinstance(step, BufferCopies):
        return False
    if isinstance(step, LoopNest):
        return any(op.ref is store.ref for op in step.stores)
    return any(isinstance(op, MemoryOp) and op.ref is store.ref for op in step.op.walk())


def _free_values(op: Op) -> list[Value]:
    """The tiles from outside that the regions of an op use."""
    inside = {v for inner in op.walk() for region in inner.regions for v in region.args}
    inside |= {v for region in op.regions for inner in region.walk() for v in inner.results}
    used = [v for region in op.regions for inner in region.ops for v in inner.uses()]
    used += [v for region in op.regions for v in region.results]
    return [v for v in dict.fromkeys(used) if v not in inside and isinstance(v.type, TileType)]


def _sums_of_dots(func: Func, uses: Counter[Value]) -> Iterator[tuple[Op, Dot]]:
    """Additions of a dot that nobody else uses."""
    for block in (func.body, *(region for op in func.walk() for region in op.regions)):
        here = {op.result: op for op in block.ops if isinstance(op, Dot)}
        for op in block.ops:
            if isinstance(op, Elementwise) and op.function == "add":
                dots = [here[v] for v in op.operands if v in here and uses[v] == 1]
                if dots:
                    yield op, dots[-1]
