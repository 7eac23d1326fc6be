"""Scalars computed ahead: where loops start and stop, if that depends on arrays in ways that no index map follows.

A scalar that is computed from grid indices and inputs, say how many of a vector's elements lie below a tile, becomes a
table with an element for each program. XLA fills it before the kernel starts, and scalar memory holds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from tilekern.ir.analysis.backward_slice import backward_slice
from tilekern.ir.compute import Convert, Dot, Select
from tilekern.ir.control import Fold
from tilekern.ir.core import Func, Op, Value, definitions
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Access, Dim, Load, MemoryOp, Position, Store, Term
from tilekern.ir.rewrite import Cloner, Rewriter
from tilekern.ir.types import INDEX, RefType
from tilekern.lower.mosaic.plan.scalars import Scalars
from tilekern.passes.dce import dce

_LARGEST = 1 << 16  # elements of a tile on the way


@dataclass(frozen=True)
class Ahead:
    """A Func whose loops have known bounds.

    Attributes:
      func: its last inputs are the tables.
      programs: what fills them, in order; each takes the inputs of the original, and has one output.
    """

    func: Func
    programs: tuple[Func, ...]


def compute_ahead(func: Func, table_bytes: int) -> Ahead:
    """Bounds and places that depend on inputs → loads from tables, as far as they fit `table_bytes`."""
    scalars = Scalars(func, table_bytes)
    known = definitions(func)
    depends = _Dependence(func, known)
    top = {r for op in func.body.ops for r in op.results}
    tables: dict[Value, tuple[Value, tuple[int, ...]]] = {}
    programs: list[Func] = []
    for value in dict.fromkeys(v for wanted in _wanted(func) for v in _roots(wanted, known, scalars)):
        axes = depends.of(value) if value in top else None
        if axes is None or value.type != INDEX or 4 * prod(func.grid[n] for n in axes) > table_bytes // 4:
            continue
        numbers = tuple(sorted(axes))
        shape = tuple(func.grid[n] for n in numbers)
        param = Value(RefType(shape, INDEX.dtype, "in"), f"{value.name or 'scalar'}_table{len(tables)}")
        tables[value] = param, numbers
        programs.append(_program(func, value, numbers, shape))
    if not tables:
        return Ahead(func, ())
    count = len(func.inputs)
    params = (*func.params[:count], *(param for param, _ in tables.values()), *func.params[count:])
    loads = {value: _load(func, param, numbers) for value, (param, numbers) in tables.items()}

    return Ahead(dce(replace(_replaced(func, loads), params=params)), tuple(programs))


def _replaced(func: Func, loads: Mapping[Value, Load]) -> Func:
    """Each value replaced by its load, at the top of the body."""
    rewriter = Rewriter(lambda op, rewriter: None)

    def body(*_: Value) -> tuple[Value, ...]:
        for value, load in loads.items():
            rewriter.replace(value, rewriter.one(load))
        for op in func.body.ops:
            if loads.keys().isdisjoint(op.results):
                rewriter.visit(op)
        return ()

    return replace(func, body=rewriter.block(func.body.args, body))


def _wanted(func: Func) -> list[Value]:
    """The scalars by which loops are bounded and places found."""
    found: dict[Value, None] = {}
    for op in func.walk():
        if isinstance(op, Fold):
            found.update(dict.fromkeys((op.start, op.stop)))
        elif isinstance(op, MemoryOp):
            found.update(dict.fromkeys(v for v in op.positions if v.tile.shape == ()))
    return list(found)


def _roots(value: Value, known: Mapping[Value, Op], scalars: Scalars) -> list[Value]:
    """The scalars that index maps cannot compute, of which they can compute a value."""
    if scalars.key(value) is not None:
        return []
    op = known.get(value)
    if not isinstance(op, Elementwise | Select | Convert):
        return [value]
    roots = [root for v in op.operands for root in _roots(v, known, scalars)]
    return roots if all(root.type == INDEX for root in roots) else [value]


class _Dependence:
    """On which axes of the grid a value depends, if on nothing else but inputs."""

    def __init__(self, func: Func, known: Mapping[Value, Op]) -> None:
        self._known = known
        self._found: dict[Value, frozenset[int] | None] = {a: frozenset([n]) for n, a in enumerate(func.body.args)}

    def of(self, value: Value) -> frozenset[int] | None:
        """The numbers of the axes."""
        if value not in self._found:
            self._found[value] = self._computed(value)
        return self._found[value]

    def _computed(self, value: Value) -> frozenset[int] | None:
        op = self._known.get(value)
        if op is None or op.regions or isinstance(op, Dot) or value.tile.size > _LARGEST:
            return None
        if isinstance(op, Load):
            if op.ref.ref.role != "in":
                return None
        elif not op.pure:
            return None
        parts = [self.of(v) for v in op.operands if not isinstance(v.type, RefType)]
        return None if any(p is None for p in parts) else frozenset[int]().union(*(p for p in parts if p is not None))


def _program(func: Func, value: Value, numbers: tuple[int, ...], shape: tuple[int, ...]) -> Func:
    """What stores a value for each place along the axes that it depends on."""
    out = Value(RefType(shape, INDEX.dtype, "out"), "table")
    args = tuple(Value(INDEX, func.body.args[n].name) for n in numbers)
    cloner = Cloner()
    for n, arg in zip(numbers, args, strict=True):
        cloner.replace(func.body.args[n], arg)

    def body(*_: Value) -> tuple[Value, ...]:
        for op in backward_slice(func.body.ops, [value]):
            cloner.visit(op)
        cloner.add(Store(operands=(out, cloner.value(value), *args), access=_one_place(len(numbers))))
        return ()

    block = cloner.block(args, body)
    axes = tuple(replace(func.axes[n], descending=False, group=0) for n in numbers)
    return Func(f"{func.name}_ahead", (*func.inputs, out), axes, block, func.loc)


def _load(func: Func, param: Value, numbers: tuple[int, ...]) -> Load:
    places = (func.body.args[n] for n in numbers)
    return Load(operands=(param, *places), access=_one_place(len(numbers)), hint=param.name)


def _one_place(rank: int) -> Access:
    """The element at the operands."""
    return Access(tuple(Dim("index", Position((Term(n, 1),)), in_bounds=True) for n in range(rank)))
