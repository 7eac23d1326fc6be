"""Check that each element of a plain output is stored, and of any output by one program, where the kernel decides it.

A compiled program cannot tell: an element that no program stores holds old bytes of memory, and of two programs that
store one element the last one wins. Both are wrong silently. `tk.interpret` checks each element of one call. The
checks here hold for all calls: they refuse a kernel only if each of its calls is wrong.

- An element is left out if the positions of all stores, for all tiles of the grid and of loops, stay away from it.
- Two programs store one element if a store depends on no index of an axis that has two tiles or more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tilekern import source
from tilekern.errors import OutputError
from tilekern.ir.analysis.ranges import Interval, analyze, fold_runs, position_interval
from tilekern.ir.control import Fold
from tilekern.ir.core import Axis, Block, Func, Value
from tilekern.ir.memory import Dim, Load, Store

_NONE: frozenset[Value] = frozenset()


def check_coverage(func: Func) -> None:
    """Raise `OutputError` if each call leaves an element of a plain output out, or has two programs store one.

    Outputs that start at 0 and donated inputs may keep elements that no program stores.
    """
    outputs = [p for p in func.outputs if p.ref.role != "sum" and 0 not in p.ref.shape]
    if not outputs:
        return
    ranges = analyze(func)
    for output in (p for p in outputs if p.ref.role == "out"):
        _check_reached(func, output, [op for op in _may_run(func.body, ranges) if op.ref is output], ranges)
    if all(axis.tiles for axis in func.axes):
        several = {arg: axis for arg, axis in zip(func.body.args, func.axes, strict=True) if axis.tiles > 1}
        indices = _indices(func)
        for op in _surely_run(func.body, ranges):
            if op.ref in outputs and op.mask is None and _reaches(op, ranges):
                used = _NONE.union(*(indices[v] for v in op.positions))
                for axis in (axis for arg, axis in several.items() if arg not in used):
                    raise _stored_twice(op, axis)


# --- each element ----------------------------------------------------------------------------------------------------


def _check_reached(func: Func, output: Value, stores: Sequence[Store], ranges: Mapping[Value, Interval]) -> None:
    if not all(axis.tiles for axis in func.axes):
        stores = []
    shapes = {op.extents for op in stores} or {output.ref.shape}
    if len(shapes) > 1:  # stores through reshaped views have dims of their own
        return
    (shape,) = shapes
    for number, size in enumerate(shape):
        spans = [_span(op, op.access.dims[number], size, ranges) for op in stores]
        missing = _first_gap([span for span in spans if span is not None], size)
        if missing < size:
            with source.at(func.loc):
                raise OutputError(
                    f"no program stores element {missing} of dim {number} of {output.name}",
                    expected=f"a store to every element of {output.name}: {output.ref}",
                    got="stores to other elements of this dim" if stores else "a grid without programs",
                    fix=f"store it: tk.parallel({size}, block) has tiles for the whole dim; "
                    "declare an output that may stay 0 as tk.Zeros",
                )


def _may_run(block: Block, ranges: Mapping[Value, Interval]) -> Iterator[Store]:
    """The stores of a block, without the stores in loops that never run."""
    for op in block.ops:
        if isinstance(op, Store):
            yield op
        for region in op.regions:
            index = ranges.get(region.args[0]) if isinstance(op, Fold) else None
            if index is None or not index.empty:
                yield from _may_run(region, ranges)


def _span(op: Store, dim: Dim, size: int, ranges: Mapping[Value, Interval]) -> Interval | None:
    """An interval that holds all elements of a dim that a store may write; None if the store never runs."""
    operands = [ranges.get(v) for v in op.positions]
    if any(o is not None and o.empty for o in operands):
        return None
    first_lane = position_interval(dim.position, operands)
    if first_lane is None:
        return Interval(0, size - 1)
    return first_lane.plus(Interval(0, dim.size - 1 if dim.kind == "block" else 0))


def _first_gap(spans: Sequence[Interval], size: int) -> int:
    """The first integer from 0 on in no interval; `size` or more if the intervals cover 0..size - 1."""
    gap = 0
    for span in sorted(spans, key=lambda span: span.low):
        if span.low > gap:
            break
        gap = max(gap, span.high + 1)
    return gap


# --- by one program --------------------------------------------------------------------------------------------------


def _indices(func: Func) -> dict[Value, frozenset[Value]]:
    """The indices of the grid on which a value may depend, for each value."""
    indices = dict.fromkeys(func.params, _NONE) | {arg: frozenset([arg]) for arg in func.body.args}

    def visit(block: Block) -> None:
        for op in block.ops:
            used = _NONE.union(*(indices.get(v, _NONE) for v in op.uses()))
            if any(isinstance(inner, Load) and inner.ref.ref.role != "in" for inner in op.walk()):
                used = frozenset(func.body.args)  # what an earlier store of the program left there
            for region in op.regions:
                indices.update(dict.fromkeys(region.args, used))
                if isinstance(op, Fold):
                    indices[region.args[0]] = indices[op.start] | indices[op.stop]
                visit(region)
            indices.update(dict.fromkeys(op.results, used))

    visit(func.body)
    return indices


def _surely_run(block: Block, ranges: Mapping[Value, Interval]) -> Iterator[Store]:
    """The stores that each program runs at least once."""
    for op in block.ops:
        if isinstance(op, Store):
            yield op
        elif isinstance(op, Fold) and fold_runs(op, ranges):
            yield from _surely_run(op.body, ranges)


def _reaches(op: Store, ranges: Mapping[Value, Interval]) -> bool:
    """True if each run of a store writes an element of the array."""
    operands = [ranges.get(v) for v in op.positions]
    for dim, size in zip(op.access.dims, op.extents, strict=True):
        first_lane = position_interval(dim.position, operands)
        if first_lane is None or dim.kind not in ("block", "index") or not dim.size:
            return False
        lanes = dim.size if dim.kind == "block" else 1
        if not (first_lane.low > -lanes and first_lane.high < size):
            return False
    return True


def _stored_twice(op: Store, axis: Axis) -> OutputError:
    with source.at(op.loc):
        return OutputError(
            f"{axis.tiles} programs store the same elements of {op.ref.name}",
            expected="one program for each element of an output",
            got=f"a store whose index does not depend on the axis {axis.name}, of {axis.tiles} tiles",
            fix="index the output by a tile of every tk.parallel; sum over programs in a tk.Sum; "
            "walk an axis in one program by tk.serial",
        )
