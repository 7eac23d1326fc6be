"""Loop fusion: groups the ops of each block into steps, and decides which tiles are materialised.

A *step* is a unit of emitted code. A `LoopNest` computes several results over one iteration space: tiles, reductions of
the last dim, and stores. Virtual ops (see `element_index`) are fused into the steps that use them. If two steps use a
tile, the first one materialises it, unless recomputing it is cheaper than loading it.

A materialised tile has a `Buffer` in the thread's scratch memory; `buffers` assigns the offsets.
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
from tilekern.ir.ordering import Sort, TopK
from tilekern.ir.shape import Broadcast, Reshape, Slice
from tilekern.ir.types import TileType
from tilekern.lower.llvm import calibration
from tilekern.lower.llvm.element_index import is_virtual
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

ScratchOf = Callable[[Op, Expressions], tuple[int, Any]]
"""The bytes that an op needs besides its results, and the operands that it packs if it is a dot."""


def fuse_loops(func: Func, scratch_of: ScratchOf) -> Plan:
    """The plan of a Func, without the offsets of its buffers.

    Args:
      func: a legal Func.
      scratch_of: the scratch memory of an op, and the operands that it packs.
    """
    return _Fuser(func, scratch_of).run()


class _Fuser:
    """Collects the steps of all blocks.

    `_producer` has the step of each value that a step produces, `_computes` the virtual tiles that each step computes;
    a tile is True there if each lane computes only its own element.
    """

    def __init__(self, func: Func, scratch_of: ScratchOf) -> None:
        self._func, self._scratch_of = func, scratch_of
        self._plan = Plan()
        self._expressions = Expressions(func)
        self._buffers = self._expressions.buffers
        self._producer: dict[Value, AnyStep] = {}
        self._steps: list[AnyStep] = []
        self._computes: dict[AnyStep, dict[Value, bool]] = {}
        self._uses = Counter(v for op in func.body.ops for v in op.uses())
        # Left operands of dots in loops are materialised: in the array, their rows may be far apart.
        self._left_operands = {op.operands[0] for op in func.walk() if isinstance(op, Dot)}
        # Tiles whose elements several slices have in common.
        self._sliced = Counter[Value]()
        for op in func.walk():
            if isinstance(op, Slice):
                self._sliced[op.operands[0]] += op.result.tile.size
        self._dot_sums = dict(_sums_of_dots(func, self._uses))

    def run(self) -> Plan:
        self._block(self._func.body, [], None)
        return self._plan

    # --- blocks ---

    def _block(
        self, block: Block, live_in: list[tuple[Value, Buffer]], buffers: Sequence[Buffer | None] | None
    ) -> None:
        """Collect the steps of a block, and copy its results to `buffers` unless that is None."""
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
            return  # computed by the addition's step
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
                pass  # fused into its users
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
        """Add an op as a step. The step computes the op's virtual operands."""
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
        """Append a step that computes values, and materialise costly tiles that an earlier step computes, too."""
        while (shared := self._computed_elsewhere(values, None)) is not None:
            self._materialize_in(*shared)
        self._computes[step] = {inner: False for v in values for inner in self._expressions.of(v.tile.shape, [v]).inner}
        self._steps.append(step)

    def _define(self, value: Value, step: Step | LoopNest, buffer: Buffer | None = None) -> None:
        """Note a value that a step produces."""
        self._producer[value] = step
        if value.tile.shape:
            target = self._buffers[value] = buffer or Buffer(value.tile.nbytes)
            step.produces.append((value, target))

    # --- loop nests ---

    def _nest_for(self, space: tuple[int, ...], values: Sequence[Value], store: Store | None = None) -> LoopNest:
        """The loop nest, earlier if possible, else new, that will compute values over an iteration space."""
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
        """The last loop nest that can compute the values, too; None without."""
        leaves = self._expressions.of(space, values).leaves
        for step in reversed(self._steps):
            own_leaves = [leaf for leaf in leaves if self._producer.get(leaf) is step]
            if isinstance(step, LoopNest) and step.space == space and not _touches(step, store):
                mapped = {m.value for m in step.maps}
                if all(leaf in mapped and leaves[leaf] for leaf in own_leaves):
                    return step
            if own_leaves or _touches(step, store):
                return None
        return None

    def _computed_elsewhere(self, values: Sequence[Value], nest: LoopNest | None) -> tuple[Value, AnyStep] | None:
        """The first costly tile that the values need and another step of this block computes, and that step."""
        for value in values:
            for inner in self._expressions.of(value.tile.shape, [value]).inner:
                for step in self._steps:
                    computed = step is not nest and inner in self._computes.get(step, ())
                    if computed and self._expressions.cost(inner) > calibration.CHEAP_COST:
                        return inner, step
        return None

    def _materialize_in(self, value: Value, step: AnyStep) -> None:
        """Make a loop nest write the tile `value`, which `step` computes, to a new buffer.

        The loop nest is `step` itself if each lane computes only its own element of `value`. Otherwise the nest is a
        new step before `step`, or behind `step` if `step` produces a tile that `value` is computed from.
        """
        buffer = Buffer(value.tile.nbytes)
        if not (isinstance(step, LoopNest) and self._computes[step][value]):
            expression = self._expressions.of(value.tile.shape, [value])
            after = any(self._producer.get(leaf) is step for leaf in expression.leaves)
            apart = LoopNest(value.tile.shape)
            self._steps.insert(self._steps.index(step) + after, apart)
            self._computes[apart] = expression.inner
            step = apart
        step.maps.append(Map(value, buffer))
        self._define(value, step, buffer)

    def _materialize(self, value: Value) -> None:
        """Materialise a tile."""
        if not self._expressions.is_available(value):
            buffer = Buffer(value.tile.nbytes)
            nest = self._nest_for(value.tile.shape, [value])
            if not self._expressions.is_available(value):  # `_nest_for` may have materialised it
                nest.maps.append(Map(value, buffer))
                self._define(value, nest, buffer)

    def _materialize_broadcasts(self, value: Value) -> None:
        """Materialise costly operands of broadcasts and of slices, which would otherwise be recomputed."""
        if self._expressions.is_available(value):
            return
        for inner in reversed(list(self._expressions.of(value.tile.shape, [value]).inner)):
            op = self._expressions.definition[inner]
            if inner not in self._buffers and self._repeats(op):
                (x,) = op.operands
                if not self._expressions.is_available(x) and self._expressions.cost(x) > calibration.CHEAP_COST:
                    self._materialize(x)

    def _repeats(self, op: Op) -> bool:
        """True for a broadcast to more elements, and a slice of a tile whose slices overlap."""
        if isinstance(op, Slice):
            return self._sliced[op.operands[0]] > op.operands[0].tile.size
        return isinstance(op, Broadcast) and op.operands[0].tile.size < op.result.tile.size

    # --- dots ---

    def _dot(self, op: Dot, result: Value, init: Value | None) -> None:
        for side in (0, 1):
            x = op.operands[side]
            self._materialize_broadcasts(x)
            if (side == 0 and not is_addressable(x, self._expressions)) or (
                self._uses[x] > 1 and self._expressions.cost(x) > calibration.CHEAP_COST
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
        """Compute a tile into a buffer, or copy it there."""
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
        """Copy the results of a block to the buffers of the carries, all at once."""
        moves: list[tuple[Buffer, Buffer]] = []
        for value, buffer in zip(block.results, buffers, strict=True):
            if buffer is None:
                continue
            self._materialize(value)
            source = self._buffers[value]
            if source is buffer:
                continue
            if source in buffers:  # the buffer of another carry, which may be overwritten before it is read
                source = Buffer(buffer.nbytes)
                self._steps.append(BufferCopies([(self._buffers[value], source)]))
            moves.append((source, buffer))
        if moves:
            self._steps.append(BufferCopies(moves))


def _touches(step: AnyStep, store: Store | None) -> bool:
    """True if a step may use the array of a store."""
    if store is None or isinstance(step, BufferCopies):
        return False
    if isinstance(step, LoopNest):
        return any(op.ref is store.ref for op in step.stores)
    return any(isinstance(op, MemoryOp) and op.ref is store.ref for op in step.op.walk())


def _free_values(op: Op) -> list[Value]:
    """The tiles that the regions of an op use, but do not define."""
    inside = {v for inner in op.walk() for region in inner.regions for v in region.args}
    inside |= {v for region in op.regions for inner in region.walk() for v in inner.results}
    used = [v for region in op.regions for inner in region.ops for v in inner.uses()]
    used += [v for region in op.regions for v in region.results]
    return [v for v in dict.fromkeys(used) if v not in inside and isinstance(v.type, TileType)]


def _sums_of_dots(func: Func, uses: Counter[Value]) -> Iterator[tuple[Op, Dot]]:
    """Additions of a dot that has no other user, each with the dot."""
    for block in (func.body, *(region for op in func.walk() for region in op.regions)):
        here = {op.result: op for op in block.ops if isinstance(op, Dot)}
        for op in block.ops:
            if isinstance(op, Elementwise) and op.function == "add":
                dots = [here[v] for v in op.operands if v in here and uses[v] == 1]
                if dots:
                    yield op, dots[-1]


def sorts_words(op: Sort | TopK) -> bool:
    """True if a sort packs key and position of each element into one word."""
    return isinstance(op, TopK) or (op.num_keys == 1 and op.operands[0].tile.dtype.itemsize == 4)
