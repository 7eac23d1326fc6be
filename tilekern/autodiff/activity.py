"""The values of a Func that depend on some of its inputs."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from tilekern.autodiff.tangents import is_flat
from tilekern.ir.carries import carries
from tilekern.ir.control import Fold, Switch, While
from tilekern.ir.core import Block, Func, Op, Value
from tilekern.ir.memory import Load
from tilekern.ir.types import kind_of


def is_float(value: Value) -> bool:
    """True for a tile or an array of floats: only these have tangents."""
    return kind_of(value.type.dtype) == "float"


def active_values(func: Func, refs: Collection[Value]) -> set[Value]:
    """The float values that depend on a load of one of `refs`.

    Args:
      func: any Func.
      refs: some of its inputs.
    """
    active = set[Value]()
    before = -1
    while before < len(active):
        before = len(active)
        _spread(func.body, refs, active)
    return active


def _spread(block: Block, refs: Collection[Value], active: set[Value]) -> None:
    """Add to `active` the values of a block that depend on active values, by one step around each loop."""
    for op in block.ops:
        for region in op.regions:
            _spread(region, refs, active)
        active.update(v for v in _reached(op, refs, active) if is_float(v))


def _reached(op: Op, refs: Collection[Value], active: set[Value]) -> Iterator[Value]:
    if isinstance(op, Load):
        if op.ref in refs or (op.fill is not None and op.fill in active):
            yield op.result
    elif isinstance(op, (Fold, While)):
        for c in carries(op):
            if c.init in active or c.yielded in active:
                yield from (*c.args, c.result)
    elif isinstance(op, Switch):
        for number, result in enumerate(op.results):
            if any(region.results[number] in active for region in op.regions):
                yield result
    elif op.pure and not active.isdisjoint(op.operands) and not is_flat(op):
        yield from op.results
