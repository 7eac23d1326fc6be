"""Elements that a program stores several times: the last store counts, and the cotangents of earlier stores are 0.

A backward pass does not know the last store of an element. So a Func of its own, the forward program
without its values, writes the time of each store instead. A store takes the cotangents where its time was written last.

    store %a to %o[k]   store %b to %o[k] mask %m
  →
    store 0 to %o_time[k]   store 1 to %o_time[k] mask %m
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from tilekern.autodiff.replay import Replay
from tilekern.autodiff.tangent import name_of, no_derivative
from tilekern.ir.analysis.sites import Site, is_injective, writes
from tilekern.ir.control import Fold, Switch
from tilekern.ir.core import Block, Func, Op, Value
from tilekern.ir.make import Make
from tilekern.ir.memory import Atomic, Dim, Store, WriteOp
from tilekern.ir.records import record
from tilekern.ir.types import I32, RefType, TileType

_MOST = 2**31 - 1


@record
class Time:
    """The time of a write: `first`, plus a stride for each iteration of the folds around it."""

    first: int
    strides: tuple[tuple[Fold, int], ...]


class Overwrites:
    """The outputs of a Func whose elements a program may store more than once.

    Attributes:
      times: for each such output, the array of the times of the last stores, an input of the backward pass.
    """

    def __init__(self, func: Func) -> None:
        self._func = func
        all_writes = writes(func)
        overwritten = [p for p in func.outputs if _overlap([w for w in all_writes if w.op.ref is p], func)]
        self.times = {p: Value(RefType(p.ref.shape, I32, "in"), f"{p.name}_time") for p in overwritten}
        self._of: dict[Op, Time] = {}
        if overwritten and self._number(func.body, 0, ()) > _MOST:
            raise no_derivative(
                func.body.ops[0],
                f"{name_of(func)} stores more often than a backward pass can count",
                f"at most {_MOST} stores of a program",
                f"loops around stores to {overwritten[0].name.removesuffix('_t')}, whose tiles may overlap",
                "store each element once, or state the rule with defjvp",
            )

    def _number(self, block: Block, first: int, strides: tuple[tuple[Fold, int], ...]) -> int:
        """Note the times of the writes of a block, from `first` on; returns the first time behind the block."""
        for op in block.ops:
            if isinstance(op, WriteOp):
                self._of[op] = Time(first, strides)
                first += 1
            elif isinstance(op, Fold):
                tiles = max(1, op.axis.tiles)
                span = self._number(op.body, 0, ())
                self._number(op.body, first, (*strides, (op, span)))
                first += tiles * span
            else:
                for region in op.regions:
                    first = self._number(region, first, strides)
        return first

    def time(self, op: WriteOp, replay: Replay, make: Make) -> Value:
        """The time of a write, for each of its lanes."""
        time = self._of[op]
        total = make.number(time.first, TileType((), I32))
        for fold, stride in time.strides:
            index = replay.copy_of(fold.body.args[0])
            passed = make.of("sub", make.number(fold.axis.tiles - 1, index.tile), index) if fold.reverse else index
            total = make.of("add", total, make.of("mul", passed, stride))
        return make.broadcast(total, op.access.shape, ())

    def writer(self, active: set[Value], inputs: Sequence[Value]) -> Func:
        """The Func that writes the times.

        Args:
          active: the values that depend on linear inputs: no place of a store does.
          inputs: the inputs of the Func in which it is not linear.
        """
        outputs = {p: Value(replace(p.ref, dtype=I32), time.name) for p, time in self.times.items()}
        times_writer = _Writer(active, self, outputs)

        def body(*_: Value) -> tuple[Value, ...]:
            times_writer.replay(self._func.body)
            return ()

        block = times_writer.block(self._func.body.args, body)
        return Func(f"{self._func.name}_times", (*inputs, *outputs.values()), self._func.axes, block, self._func.loc)


class _Writer(Replay):
    """Stores times in the place of values."""

    def __init__(self, active: set[Value], overwrites: Overwrites, outputs: Mapping[Value, Value]) -> None:
        super().__init__(active)
        self._overwrites, self._outputs = overwrites, outputs

    def replay_write(self, op: WriteOp) -> None:
        if isinstance(op, Store) and op.ref in self._outputs:
            time = self._overwrites.time(op, self, Make(self, op))
            self.add(replace(op, operands=(self._outputs[op.ref], time, *map(self.copy_of, op.operands[2:]))))


def _overlap(sites: Sequence[Site], func: Func) -> bool:
    """True unless a proof shows that no element is written after a program has stored it."""
    stores = [w for w in sites if isinstance(w.op, Store)]
    fixed = {*func.body.args, *(r for op in func.body.ops for r in op.results)}
    if not all(_is_once(store) for store in stores):
        return True
    pairs = ((a, b) for a, b in combinations(sites, 2) if not (isinstance(a.op, Atomic) and isinstance(b.op, Atomic)))
    return not all(_are_exclusive(a, b) or _are_apart(a, b, fixed) for a, b in pairs)


def _is_once(store: Site) -> bool:
    """True if the loops around a store go over different elements."""
    loops = [op for op, _ in store.path if not isinstance(op, Switch)]
    if not all(isinstance(op, Fold) for op in loops):
        return False
    return not loops or is_injective(store, [region.args[0] for op, region in store.path if isinstance(op, Fold)])


def _are_exclusive(first: Site, second: Site) -> bool:
    """True if two writes are in different branches of a switch outside of all loops."""
    for (a, a_region), (b, b_region) in zip(first.path, second.path, strict=False):
        if a is not b or isinstance(a, Fold):
            return False
        if a_region is not b_region:
            return True
    return False


def _are_apart(first: Site, second: Site, fixed: Collection[Value]) -> bool:
    """True if two writes never touch the same element, along some dim."""
    dims = zip(first.op.access.dims, second.op.access.dims, strict=True)
    ranges = ((_range(first, a, fixed), _range(second, b, fixed)) for a, b in dims)
    return any(
        a is not None and b is not None and a.terms == b.terms and (a.stop <= b.start or b.stop <= a.start)
        for a, b in ranges
    )


@record
class _Range:
    """The elements that a write may touch along a dim: `start` to `stop`, counted from a fixed sum of terms."""

    terms: frozenset[tuple[Value, int]]
    start: int
    stop: int


def _range(site: Site, dim: Dim, fixed: Collection[Value]) -> _Range | None:
    if dim.kind not in ("block", "index") or not all(t.plain for t in dim.position.terms):
        return None
    operands = [(site.op.positions[t.operand], t.stride) for t in dim.position.terms]
    terms = [(v, stride) for v, stride in operands if v in fixed]
    moving = [(v, stride) for v, stride in operands if v not in fixed]
    if len({v for v, _ in terms}) < len(terms) or not all(v in site.axes for v, _ in moving):
        return None
    ends = [stride * (site.axes[v].tiles - 1) for v, stride in moving]
    start = dim.position.const + sum(min(0, end) for end in ends)
    return _Range(frozenset(terms), start, dim.position.const + sum(max(0, end) for end in ends) + dim.size)
