"""Memory budget of the portable backend: Funcs whose values take more than half of the machine's memory are refused.

XLA fuses elementwise ops, broadcasts and reductions into their users. It keeps arrays for operands and results of
products, sorts, scans and gathers, and for carries of loops. The sum of arrays that are alive at once is a lower bound
of a program's memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from operator import itemgetter

from tilekern import source
from tilekern.errors import ResourceError
from tilekern.ir.compute import Constant, Dot
from tilekern.ir.control import Fold, While
from tilekern.ir.core import Block, Func, Op, Value
from tilekern.ir.dynamic import Take
from tilekern.ir.memory import Load
from tilekern.ir.ordering import LinearScan, Scan, Sort, TopK
from tilekern.lower.xla.calibration import ASSUMED_MEMORY

# Ops whose operands and results XLA keeps as arrays.
_COMPUTED = (Dot, Sort, Scan, LinearScan, TopK, Take)
# Ops whose results never reuse the memory of an operand.
_APART = (Dot, TopK, Take)


def available() -> int:
    """Bytes that intermediate values may take: half of this machine's memory."""
    return _memory() // 2


def _memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows, or a system without these names
        return ASSUMED_MEMORY


def refuse_beyond_memory(func: Func) -> Func:
    """Refuse a Func whose intermediate values take more than half of this machine's memory.

    Raises:
      ResourceError: with the line of the op at which most bytes are alive.
    """
    needed, where = temporaries(func)
    budget = available()
    if needed <= budget:
        return func
    with source.at(func.loc), source.at(func.loc if where is None else where.loc):
        raise ResourceError(
            f"{func.name} needs too much memory for its intermediate values",
            expected=f"at most {budget} bytes, half of this machine's memory",
            got=f"at least {needed} bytes on the portable backend" + (f", most at a {where.name}" if where else ""),
            fix="use smaller blocks",
        )


def temporaries(func: Func) -> tuple[int, Op | None]:
    """A lower bound of the bytes of one program's values that are alive at once; and the op at which most are."""
    return _most(func.body, _array_values(func))


def _array_values(func: Func) -> set[Value]:
    """The values that XLA keeps as arrays."""
    definers = {result: op for op in func.walk() for result in op.results}
    values = set[Value]()
    for op in func.walk():
        if isinstance(op, _COMPUTED):
            values.update(op.results)
            # A loaded tile may be a view of its array, and a constant is a part of the program.
            values.update(v for v in op.operands if v in definers and not isinstance(definers[v], (Load, Constant)))
        elif isinstance(op, (Fold, While)) or _is_gather(op):
            values.update(op.results)
    return values


def _is_gather(op: Op) -> bool:
    return isinstance(op, Load) and any(dim.kind == "gather" for dim in op.access.dims)


def _most(block: Block, array_values: set[Value]) -> tuple[int, Op | None]:
    """The most bytes alive at once of the `array_values` that a block defines, and the op there."""
    ends = _last_uses(block)
    ending = dict[int, int]()
    for value, number in ends.items():
        ending[number] = ending.get(number, 0) + _bytes((value,), array_values)
    alive, most, where = 0, 0, None
    for number, op in enumerate(block.ops):
        ended = ending.get(number, 0)
        if not isinstance(op, _APART):
            alive, ended = alive - ended, 0
        alive += _bytes(op.results, array_values)
        inner, at = max((_most(region, array_values) for region in op.regions), key=itemgetter(0), default=(0, None))
        if alive + inner > most:
            most, where = alive + inner, at or op
        alive -= ended + _bytes((v for v in op.results if v not in ends), array_values)
    return most, where


def _last_uses(block: Block) -> dict[Value, int]:
    """For each value that a block defines, the number of the last op that uses it; `len(ops)` for results."""
    defined = {result for op in block.ops for result in op.results}
    last_uses = dict[Value, int]()
    for number, op in enumerate(block.ops):
        last_uses.update((v, number) for v in op.uses() if v in defined)
    last_uses.update((v, len(block.ops)) for v in block.results)
    return last_uses


def _bytes(values: Iterable[Value], array_values: set[Value]) -> int:
    return sum(v.tile.nbytes for v in values if v in array_values)
