"""Scalar prefetch: loop bounds and positions that index maps cannot compute become tables in scalar memory.

Such a scalar depends on grid indices and inputs, for example the number of a vector's elements below a tile. Its table
has an element for each program that differs. XLA computes the table before the kernel starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from tilekern.ir.analysis.backward_slice import backward_slice
from tilekern.ir.compute import Convert, Dot, Select
from tilekern.ir.control import Fold
from tilekern.ir.core import Func, Op, Value, definitions
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Access, Dim, Load, MemoryOp, Position, Store, Term
from tilekern.ir.records import record
from tilekern.ir.rewrite import Cloner, Rewriter
from tilekern.ir.types import INDEX, RefType
from tilekern.lower.mosaic.calibration import MAX_PREFETCH_TILE, TABLE_SHARE
from tilekern.lower.mosaic.plan.scalars import Scalars
from tilekern.passes.dce import dce


@record
class ScalarPrefetch:
    """A Func that reads its loop bounds and positions from tables.

    Attributes:
      func: the Func; its last inputs are the tables.
      programs: a Func for each table that computes it, in order, from the inputs of the original Func.
    """

    func: Func
    programs: tuple[Func, ...]


def prefetch_scalars(func: Func, table_bytes: int) -> ScalarPrefetch:
    """Loop bounds and positions that depend on inputs → loads from tables, as far as the tables fit `table_bytes`."""
    scalars = Scalars(func, table_bytes)
    producers = definitions(func)
    depends = _GridAxes(func, producers)
    top_level = {r for op in func.body.ops for r in op.results}
    tables: dict[Value, tuple[Value, tuple[int, ...]]] = {}
    programs: list[Func] = []
    for value in dict.fromkeys(v for scalar in _index_scalars(func) for v in _roots(scalar, producers, scalars)):
        axes = depends.of(value) if value in top_level else None
        if axes is None or value.type != INDEX or 4 * prod(func.grid[n] for n in axes) > table_bytes * TABLE_SHARE:
            continue
        numbers = tuple(sorted(axes))
        shape = tuple(func.grid[n] for n in numbers)
        param = Value(RefType(shape, INDEX.dtype, "in"), f"{value.name or 'scalar'}_table{len(tables)}")
        tables[value] = param, numbers
        programs.append(_table_program(func, value, numbers, shape))
    if not tables:
        return ScalarPrefetch(func, ())
    count = len(func.inputs)
    params = (*func.params[:count], *(param for param, _ in tables.values()), *func.params[count:])
    loads = {value: _load(func, param, numbers) for value, (param, numbers) in tables.items()}

    return ScalarPrefetch(dce(replace(_with_loads(func, loads), params=params)), tuple(programs))


def _with_loads(func: Func, loads: Mapping[Value, Load]) -> Func:
    """The Func with each value replaced by its load, at the top of the body."""
    rewriter = Rewriter(lambda op, rewriter: None)

    def body(*_: Value) -> tuple[Value, ...]:
        for value, load in loads.items():
            rewriter.replace(value, rewriter.one(load))
        for op in func.body.ops:
            if loads.keys().isdisjoint(op.results):
                rewriter.visit(op)
        return ()

    return replace(func, body=rewriter.block(func.body.args, body))


def _index_scalars(func: Func) -> list[Value]:
    """The scalars that are bounds of loops or parts of positions."""
    scalars: dict[Value, None] = {}
    for op in func.walk():
        if isinstance(op, Fold):
            scalars.update(dict.fromkeys((op.start, op.stop)))
        elif isinstance(op, MemoryOp):
            scalars.update(dict.fromkeys(v for v in op.positions if v.tile.shape == ()))
    return list(scalars)


def _roots(value: Value, producers: Mapping[Value, Op], scalars: Scalars) -> list[Value]:
    """The unknown scalars from which index maps can compute a value, once tables hold these scalars."""
    if scalars.key(value) is not None:
        return []
    op = producers.get(value)
    if not isinstance(op, Elementwise | Select | Convert):
        return [value]
    roots = [root for v in op.operands for root in _roots(v, producers, scalars)]
    return roots if all(root.type == INDEX for root in roots) else [value]


class _GridAxes:
    """The axes of the grid that a value depends on, for values that depend only on grid indices and inputs."""

    def __init__(self, func: Func, producers: Mapping[Value, Op]) -> None:
        self._producers = producers
        self._axes: dict[Value, frozenset[int] | None] = {a: frozenset([n]) for n, a in enumerate(func.body.args)}

    def of(self, value: Value) -> frozenset[int] | None:
        """The numbers of the axes; None if the value depends on something else."""
        if value not in self._axes:
            self._axes[value] = self._computed(value)
        return self._axes[value]

    def _computed(self, value: Value) -> frozenset[int] | None:
        op = self._producers.get(value)
        if op is None or op.regions or isinstance(op, Dot) or value.tile.size > MAX_PREFETCH_TILE:
            return None
        if isinstance(op, Load):
            if op.ref.ref.role != "in":
                return None
        elif not op.pure:
            return None
        parts = [self.of(v) for v in op.operands if not isinstance(v.type, RefType)]
        return None if any(p is None for p in parts) else frozenset[int]().union(*(p for p in parts if p is not None))


def _table_program(func: Func, value: Value, numbers: tuple[int, ...], shape: tuple[int, ...]) -> Func:
    """A Func that stores a value for each place along the axes that it depends on."""
    out = Value(RefType(shape, INDEX.dtype, "out"), "table")
    args = tuple(Value(INDEX, func.body.args[n].name) for n in numbers)
    cloner = Cloner()
    for n, arg in zip(numbers, args, strict=True):
        cloner.replace(func.body.args[n], arg)

    def body(*_: Value) -> tuple[Value, ...]:
        for op in backward_slice(func.body.ops, [value]):
            cloner.visit(op)
        cloner.add(Store(operands=(out, cloner.value(value), *args), access=_element(len(numbers))))
        return ()

    block = cloner.block(args, body)
    axes = tuple(replace(func.axes[n], descending=False, group=0) for n in numbers)
    return Func(f"{func.name}_ahead", (*func.inputs, out), axes, block, func.loc)


def _load(func: Func, param: Value, numbers: tuple[int, ...]) -> Load:
    places = (func.body.args[n] for n in numbers)
    return Load(operands=(param, *places), access=_element(len(numbers)), hint=param.name)


def _element(rank: int) -> Access:
    """The element at the operands."""
    return Access(tuple(Dim("index", Position((Term(n, 1),)), in_bounds=True) for n in range(rank)))
