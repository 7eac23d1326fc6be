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
from tilekern.lower.llvm.plan.steps import AnyStep, Closures, Copies, Group, Map, Plan, Slot, Step, addressable

# Instructions that computing a tile a second time may take, where it need not be kept then.
_CHEAP = 2

Needs = Callable[[Op, Closures], tuple[int, Any]]
"""The bytes that the code of an op needs beside its results, and how it reads its operands."""


def plan(func: Func, needs: Needs) -> Plan:
    """The plan for a legal Func.

    Args:
      func: the Func.
      needs: what the code of an op needs.
    """
    return _Planner(func, needs).run()


class _Planner:
    """Collects the steps of block after block."""

    def __init__(self, func: Func, needs: Needs) -> None:
        self._func, self._needs = func, needs
        self._plan = Plan()
        self._closures = Closures(func)
        self._slots = self._closures.slots
        self._maker: dict[Value, AnyStep] = {}
        self._steps: list[AnyStep] = []
        self._computed: dict[AnyStep, dict[Value, bool]] = {}
        uses = [v for op in func.walk() for v in (*op.operands, *(r for b in op.regions for r in b.results))]
        self._uses = Counter(uses)
        # What dots in loops read again and again is copied: in the array its rows may be far apart.
        self._lefts = {op.operands[0] for op in func.walk() if isinstance(op, Dot)}
        self._fused = dict(_sums_of_dots(func, self._uses))

    def run(self) -> Plan:
        self._block(self._func.body, [], None)
        return self._plan

    # --- blocks ---

    def _block(self, block: Block, enters: list[tuple[Value, Slot]], slots: Sequence[Slot | None] | None) -> None:
        """The steps of a block, which puts what it yields into slots."""
        outer, self._steps = self._steps, []
        self._plan.steps[block], self._plan.enters[block] = self._steps, enters
        with self._closures.inside(enters):
            for op in block.ops:
                self._op(op)
            if slots is not None:
                self._yield(block, slots)
        self._steps = outer

    def _op(self, op: Op) -> None:
        if op in self._fused.values():
            return  # becomes part of the addition
        dot = self._fused.get(op)
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
                self._group(op.value.tile.shape, values, op).stores.append(op)
            case Reduce() if op.dims[0] == len(op.operands[0].tile.shape) - 1:
                self._keep_large(op.operands[0])
                group = self._group(op.operands[0].tile.shape, op.operands)
                group.reduces.append(op)
                self._new(op.result, group)
            case Reshape() if not is_virtual(op) and op.result.tile.shape:
                self._alias(op)
            case _ if op.results and op.result.tile.shape and is_virtual(op):
                pass  # where it is used
            case _:
                self._step(op)

    def _alias(self, op: Reshape) -> None:
        (x,) = op.operands
        self._keep(x)
        slot = self._slots[op.result] = self._slots[x]
        maker = self._maker.get(x)
        if maker is None:
            next(e for e in self._plan.enters.values() if (x, slot) in e).append((op.result, slot))
        elif not isinstance(maker, Copies):
            maker.keeps.append((op.result, slot))
            self._maker[op.result] = maker

    def _step(self, op: Op) -> Step:
        """An op with code of its own, which computes its virtual operands by itself."""
        if isinstance(op, Take) or (isinstance(op, Sort) and not sorts_words(op)):
            for x in op.operands[: op.num_keys if isinstance(op, Sort) else 1]:
                self._keep(x)
        tiles = [v for v in op.operands if isinstance(v.type, TileType)]
        for x in tiles:
            self._keep_large(x)
        size, form = self._needs(op, self._closures)
        step = Step(op, Slot(size) if size else None, form)
        self._add(step, tiles)
        for result in op.results:
            self._new(result, step)
        return step

    def _add(self, step: AnyStep, values: Sequence[Value]) -> None:
        """Append a step that computes values; what is large and was computed before is kept from then on."""
        while (shared := self._shared(values, None)) is not None:
            self._keep_in(*shared)
        self._computed[step] = {inner: False for v in values for inner in self._closures.of(v.tile.shape, [v]).inner}
        self._steps.append(step)

    def _new(self, value: Value, step: Step | Group, slot: Slot | None = None) -> None:
        """A value that a step makes."""
        self._maker[value] = step
        if value.tile.shape:
            found = self._slots[value] = slot or Slot(value.tile.nbytes)
            step.keeps.append((value, found))

    # --- groups ---

    def _group(self, space: tuple[int, ...], values: Sequence[Value], store: Store | None = None) -> Group:
        """The group that is to compute values for each lane of a space: one that there is, or a new one."""
        for value in values:
            self._keep_large(value)
        while True:
            group = self._joined(space, values, store)
            shared = self._shared(values, group)
            if shared is None:
                break
            self._keep_in(*shared)
        if group is None:
            group = Group(space)
            self._steps.append(group)
            self._computed[group] = {}
        for inner, lanewise in self._closures.of(space, values).inner.items():
            self._computed[group][inner] = lanewise or self._computed[group].get(inner, False)
        return group

    def _joined(self, space: tuple[int, ...], values: Sequence[Value], store: Store | None) -> Group | None:
        """The last group that can compute the values as well."""
        leaves = self._closures.of(space, values).leaves
        for step in reversed(self._steps):
            made = [leaf for leaf in leaves if self._maker.get(leaf) is step]
            if isinstance(step, Group) and step.space == space and not _touches(step, store):
                kept = {m.value for m in step.maps}
                if all(leaf in kept and leaves[leaf] for leaf in made):
                    return step
            if made or _touches(step, store):
                return None
        return None

    def _shared(self, values: Sequence[Value], group: Group | None) -> tuple[Value, AnyStep] | None:
        """The first large tile on the way to the values that another step of this block computes, and that step."""
        for value in values:
            for inner in self._closures.of(value.tile.shape, [value]).inner:
                for step in self._steps:
                    computed = step is not group and inner in self._computed.get(step, ())
                    if computed and self._closures.cost(inner) > _CHEAP:
                        return inner, step
        return None

    def _keep_in(self, value: Value, step: AnyStep) -> None:
        """Keep a tile that a step computes: there, or just before."""
        slot = Slot(value.tile.nbytes)
        if not (isinstance(step, Group) and self._computed[step][value]):
            closure = self._closures.of(value.tile.shape, [value])
            behind = any(self._maker.get(leaf) is step for leaf in closure.leaves)
            apart = Group(value.tile.shape)
            self._steps.insert(self._steps.index(step) + behind, apart)
            self._computed[apart] = closure.inner
            step = apart
        step.maps.append(Map(value, slot))
        self._new(value, step, slot)

    def _keep(self, value: Value) -> None:
        """Keep a tile."""
        if not self._closures.kept(value):
            slot = Slot(value.tile.nbytes)
            group = self._group(value.tile.shape, [value])
            if not self._closures.kept(value):  # unless that has kept it
                group.maps.append(Map(value, slot))
                self._new(value, group, slot)

    def _keep_large(self, value: Value) -> None:
        """Keep tiles on the way that are computed once and read often: what is repeated."""
        if self._closures.kept(value):
            return
        for inner in reversed(list(self._closures.of(value.tile.shape, [value]).inner)):
            op = self._closures.definition[inner]
            if isinstance(op, Broadcast) and inner not in self._slots:
                (x,) = op.operands
                if not self._closures.kept(x) and x.tile.size < inner.tile.size and self._closures.cost(x) > _CHEAP:
                    self._keep(x)

    # --- dots ---

    def _dot(self, op: Dot, result: Value, init: Value | None) -> None:
        for side in (0, 1):
            x = op.operands[side]
            self._keep_large(x)
            if (side == 0 and not addressable(x, self._closures)) or (
                self._uses[x] > 1 and self._closures.cost(x) > _CHEAP
            ):
                self._keep(x)
        slot = Slot(result.tile.nbytes)
        if init is not None:
            self._fill(init, slot)
        size, form = self._needs(op, self._closures)
        step = Step(op, Slot(size) if size else None, form, init is not None)
        self._add(step, op.operands)
        self._new(op.result, step, slot)
        if result is not op.result:
            self._new(result, step, slot)

    def _fill(self, value: Value, slot: Slot) -> None:
        """Compute a tile into a slot, or copy it there."""
        if self._closures.kept(value):
            self._steps.append(Copies([(self._slots[value], slot)]))
            return
        group = self._group(value.tile.shape, [value])
        if self._closures.kept(value):
            self._steps.append(Copies([(self._slots[value], slot)]))
        else:
            group.maps.append(Map(value, slot))

    # --- control ---

    def _control(self, op: Fold | While | Switch) -> None:
        for value in _free(op):
            if not self._closures.kept(value) and (value in self._lefts or self._closures.cost(value) > 0):
                self._keep(value)
        inits = op.inits if isinstance(op, Fold) else op.operands if isinstance(op, While) else op.results
        slots = [Slot(v.tile.nbytes) if v.tile.shape else None for v in op.results]
        self._plan.carried[op] = slots
        if not isinstance(op, Switch):
            for init, slot in zip(inits, slots, strict=True):
                if slot is not None:
                    self._fill(init, slot)
        step = Step(op)
        for region in op.regions:
            carries = region.args[len(region.args) - len(slots) :] if region.args else ()
            enters = [(a, s) for a, s in zip(carries, slots, strict=False) if s is not None]
            self._block(region, enters, None if isinstance(op, While) and region is op.condition else slots)
        self._computed[step] = {}
        self._steps.append(step)
        for result, slot in zip(op.results, slots, strict=True):
            self._new(result, step, slot)

    def _yield(self, block: Block, slots: Sequence[Slot | None]) -> None:
        """Copy what a block yields into the slots of the carries, all at once."""
        moves: list[tuple[Slot, Slot]] = []
        for value, slot in zip(block.results, slots, strict=True):
            if slot is None:
                continue
            self._keep(value)
            source = self._slots[value]
            if source is slot:
                continue
            if source in slots:  # another carry's: it may be overwritten before it is copied
                source = Slot(slot.nbytes)
                self._steps.append(Copies([(self._slots[value], source)]))
            moves.append((source, slot))
        if moves:
            self._steps.append(Copies(moves))


def _touches(step: AnyStep, store: Store | None) -> bool:
    """Whether a step uses the array that is stored to, or may."""
    if store is None or isinstance(step, Copies):
        return False
    if isinstance(step, Group):
        return any(op.ref is store.ref for op in step.stores)
    inner = (step.op, *(op for region in step.op.regions for op in region.walk()))
    return any(isinstance(op, MemoryOp) and op.ref is store.ref for op in inner)


def _free(op: Op) -> list[Value]:
    """The tiles from outside that the regions of an op use."""
    inside = {v for region in op.regions for v in region.args}
    inside |= {v for region in op.regions for inner in region.walk() for v in inner.results}
    inside |= {v for region in op.regions for inner in region.walk() for r in inner.regions for v in r.args}
    used = [v for region in op.regions for inner in region.walk() for v in inner.operands]
    used += [v for region in op.regions for v in region.results]
    used += [v for region in op.regions for inner in region.walk() for r in inner.regions for v in r.results]
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
