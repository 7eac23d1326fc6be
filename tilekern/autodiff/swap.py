"""Swap of the loops around a sum: axes that an array is summed over become serial, the array's tiles the grid.

    grid i, j   fold k { %p = f(i, j, k)   atomic add %p to %x[i, k] }      x a sum over j
  →
    grid i, k   %s = fold j { %p = f(i, j, k)   %x + %p }   store %s to %x[i, k]

So the cotangents of a matrix product are matrix products, with sums in registers: no atomics, no addends in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from tilekern.autodiff.replay import Replay
from tilekern.autodiff.saved import Places
from tilekern.ir.analysis.sites import Site, is_covering, is_injective, runs_whole, sites
from tilekern.ir.control import Fold, Switch, While
from tilekern.ir.core import Axis, Block, Func, Op, Value, definitions, index_value
from tilekern.ir.make import Make
from tilekern.ir.memory import Load, Store, WriteOp
from tilekern.ir.records import record
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.types import I32, INDEX, DType, RefType
from tilekern.passes import pipeline
from tilekern.passes.dce import dce


@record
class Swapped:
    """A sum by swapped loops.

    Attributes:
      func: stores the sum to its only output.
      saver: a Func that computes results of folds which `func` loads, or None.
      saved: the inputs of `func` that are outputs of `saver`.
    """

    func: Func
    saver: Func | None
    saved: tuple[Value, ...]


def swap(func: Func, number: int, dtype: DType) -> Swapped | None:
    """The sum of one site, number `number` of a Func, by swapped loops; None if the loops cannot be swapped.

    Args:
      func: a Func that adds to sums, and stores nothing else.
      number: the number of the site, in program order.
      dtype: the dtype of the result.
    """
    site_func = only_site(func, number)
    (site,) = sites(site_func)
    around = [op for op, _ in site.path]
    if any(isinstance(op, While) or op.results for op in around) or not is_injective(site, site.used):
        return None
    loops = [op for op in site_func.body.ops if isinstance(op, (Fold, While)) and op not in around]
    results = _Results(site_func, [r for op in loops for r in op.results])
    swapped = pipeline.run(_Swapper(site_func, site, results).run(dtype))
    saver = pipeline.run(results.saver()) if results.params else None
    return Swapped(swapped, saver, results.params)


def only_site(func: Func, number: int) -> Func:
    """The Func with one of its additions to sums, and only the ops that this addition needs."""
    count = 0

    def rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
        nonlocal count
        if not isinstance(op, WriteOp):
            return None
        count += 1
        return None if count == number + 1 else []

    return dce(Rewriter(rule).run(func))


class _Results(Replay):
    """Results of loops that each program saves: after a swap, each iteration would compute them again."""

    def __init__(self, func: Func, results: Sequence[Value]) -> None:
        super().__init__(set())
        self._func, self._places = func, Places(func)
        self._saved = {
            r: Value(RefType(self._places.shape(r), r.tile.dtype, "in"), f"{r.name or 'result'}_saved{n}")
            for n, r in enumerate(results)
        }

    @property
    def params(self) -> tuple[Value, ...]:
        """The arrays of the results, [*tiles of the grid, *result]."""
        return tuple(self._saved.values())

    def load(self, result: Value, indices: Sequence[Value], op: Op) -> Load | None:
        """The load of a result at the program indices `indices`; None if the result is not saved."""
        param = self._saved.get(result)
        if param is None:
            return None
        return Load(operands=(param, *indices), access=self._places.access(result), loc=op.loc)

    def saver(self) -> Func:
        """The Func that stores the results."""
        func = self._func
        outputs = {r: Value(replace(p.ref, role="out"), p.name) for r, p in self._saved.items()}

        def body(*_: Value) -> tuple[Value, ...]:
            self.replay(func.body)
            for result, ref in outputs.items():
                operands = (ref, self.copy_of(result), *self._places.indices)
                self.add(Store(operands=operands, access=self._places.access(result)))
            return ()

        block = self.block(func.body.args, body)
        return Func(f"{func.name}_results", (*func.inputs, *outputs.values()), func.axes, block, func.loc)


class _Swapper(Replay):
    """Emits the value of a site in loops over the axes that its access does not depend on."""

    def __init__(self, func: Func, site: Site, results: _Results) -> None:
        super().__init__(set())
        self._func, self._site, self._results = func, site, results
        self._make = Make(self, site.op)
        self._defined = definitions(func)
        self._path = dict(site.path)

    def run(self, dtype: DType) -> Func:
        """The Func with one output, of `dtype`, whose grid has the axes of the access; all other axes become folds."""
        site, func = self._site, self._func
        parallel = {v: a for v, a in site.axes.items() if v in site.used}
        serial = [(v, a) for v, a in site.axes.items() if v not in site.used]
        indices = {v: index_value(v.name or a.name) for v, a in parallel.items()}
        role = "out" if is_covering(site, func) else "zeros"
        output = Value(RefType(site.op.ref.ref.shape, dtype, role), site.op.ref.name)

        def body(*_: Value) -> tuple[Value, ...]:
            self._copies.update(indices)
            total = self._make.convert(self._sum(serial, self._zeros()), dtype)
            positions = tuple(map(self.copy_of, site.op.positions))
            self.add(Store(operands=(output, total, *positions), access=site.op.access, loc=site.op.loc))
            return ()

        block = self.block(tuple(indices.values()), body)
        inputs = (*func.inputs, *self._results.params)
        axes = tuple(_plain(a) for a in parallel.values())
        return Func(f"{func.name}_{site.op.ref.name}", (*inputs, output), axes, block, func.loc)

    def _zeros(self) -> Value:
        return self._make.number(0, self._site.op.value.tile)

    def _sum(self, axes: Sequence[tuple[Value, Axis]], total: Value) -> Value:
        """`total` plus the sum of the values over all tiles of `axes`."""
        if not axes:
            return self._make.of("add", total, self._value(self._func.body))
        (old, axis), *inner = axes
        index, carry = index_value(old.name or axis.name), Value(total.type, "sum")

        def body(*_: Value) -> tuple[Value, ...]:
            self._copies[old] = index
            return (self._sum(inner, carry),)

        bounds = (self._integer(0), self._integer(axis.extent))
        region = self.block((index, carry), body)
        return self.one(Fold(operands=(*bounds, total), regions=(region,), axis=_plain(axis), loc=self._site.op.loc))

    def _integer(self, number: int) -> Value:
        return self._make.number(number, INDEX)

    def _value(self, block: Block) -> Value:
        """The value that the site adds, for the indices of all axes; zeros where its block does not run."""
        for op in block.ops:
            if op is self._site.op:
                value, mask = self.copy_of(self._site.op.value), self._site.op.mask
                return value if mask is None else self._make.select(self.copy_of(mask), value, 0)
            if op in self._path:
                return self._enter(op, self._path[op])
            if not self._loaded(op):
                self._replay(op)
        raise AssertionError("the site is in none of the blocks")

    def _loaded(self, op: Op) -> bool:
        """Load the saved results of an op; True if all its results are saved."""
        indices = tuple(map(self.copy_of, self._func.body.args))
        loads = [self._results.load(r, indices, op) for r in op.results]
        self._copies.update((r, self.one(x)) for r, x in zip(op.results, loads, strict=True) if x is not None)
        return bool(loads) and all(x is not None for x in loads)

    def _enter(self, op: Op, region: Block) -> Value:
        if isinstance(op, Switch):
            branch = self.copy_of(op.operands[0])
            regions = tuple(self.block((), partial(self._branch, r if r is region else None)) for r in op.regions)
            return self.one(op.copy((branch,), regions))
        assert isinstance(op, Fold)
        if runs_whole(op, self._defined):
            return self._value(region)
        runs = self._make.convert(self._runs(op, self.copy_of(region.args[0])), I32)
        regions = tuple(self.block((), partial(self._branch, r)) for r in (None, region))
        return self.one(Switch(operands=(runs,), regions=regions, loc=op.loc))

    def _branch(self, region: Block | None) -> tuple[Value]:
        return (self._zeros() if region is None else self._value(region),)

    def _runs(self, fold: Fold, index: Value) -> Value:
        """bool[]: a fold runs the tile `index`: start // block <= index < cdiv(stop, block), clamped to the extent."""
        make, axis = self._make, fold.axis
        first = make.of("mul", index, axis.block)
        start = make.of("min", self.copy_of(fold.start), axis.extent)
        not_before = make.of("gt", make.of("add", first, axis.block), start)
        return make.of("and", not_before, make.of("lt", first, self.copy_of(fold.stop)))


def _plain(axis: Axis) -> Axis:
    """The axis without an order of programs: the order was chosen for another grid."""
    return replace(axis, descending=False, group=0)
