"""Atomic updates of arrays.

Updates whose outcome does not depend on their order are made by the processor, in place. Sums of floats are: a worker's
task adds to an array of its own (a *share*), and the shares are added up in the end, always in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np

from tilekern.ir.core import Func, Value
from tilekern.ir.memory import Atomic
from tilekern.ir.types import F32, F64, DType, accumulator, is_float8, kind_of
from tilekern.lower.llvm.code import I1, Code, Reg, Type
from tilekern.lower.llvm.elements import Elements
from tilekern.lower.llvm.elementwise import convert
from tilekern.lower.llvm.groups import over
from tilekern.lower.llvm.index import Place
from tilekern.lower.llvm.types import computed, packed, stored

# The most tasks that share a sum, and the bytes of their shares.
_SHARES, _BYTES = 16, 64 << 20


@dataclass(frozen=True)
class Shares:
    """The shares of an array that floats are added to: [count, *shape] of `dtype`."""

    ref: Value
    count: int
    dtype: DType

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all shares together."""
        return (self.count, *self.ref.ref.shape)


def adds_floats(op: Atomic) -> bool:
    """Whether an update is a sum of floats."""
    return op.kind == "add" and kind_of(op.ref.ref.dtype) == "float"


def shares_of(func: Func) -> list[Shares]:
    """The shares that a Func needs; as many of each."""
    refs = dict.fromkeys(op.ref for op in func.walk() if isinstance(op, Atomic) and adds_floats(op))
    if not refs:
        return []
    wide = {ref: accumulator(ref.ref.dtype) for ref in refs}
    nbytes = sum(prod(ref.ref.shape) * wide[ref].itemsize for ref in refs)
    count = max(1, min(_SHARES, prod(func.grid), _BYTES // max(nbytes, 1)))
    return [Shares(ref, count, wide[ref]) for ref in refs]


def emit(e: Elements, op: Atomic, share: Reg | None) -> None:
    """Update element after element.

    Args:
      e: computes them.
      op: the update.
      share: the address of this task's share of the array, of a sum of floats.
    """
    code, dtype = e.code, op.ref.ref.dtype

    def element(place: Place) -> None:
        with e.scope():
            x = e.at(op.value, place)
            if share is not None:
                wide = accumulator(dtype)
                address, where = e.access_address(op, place, op.mask, share, wide)
                _if(code, where, lambda: _add(code, _widened(code, x, dtype), address))
            else:
                address, where = e.access_address(op, place, op.mask)
                _if(code, where, lambda: _update(code, op, x, address))

    over(e, op.value.tile.shape, element)


def _widened(code: Code, x: Reg, dtype: DType) -> Reg:
    """A float in the dtype in which it is added up; one of 8 bits by a table."""
    if not is_float8(dtype):
        return convert(code, x, dtype, accumulator(dtype))
    table = code.module.data("floats", np.arange(256, dtype=np.uint8).view(dtype).astype(F32))
    return code.load(Type("float"), code.at(table, code.cast("zext", x, "i64"), "float"))


def _if(code: Code, condition: Reg | None, action: Callable[[], None]) -> None:
    if condition is None:
        action()
        return
    with code.when(condition):
        action()


def _add(code: Code, x: Reg, address: Reg) -> None:
    code.store(code.binary("fadd", code.load(x.type, address), x), address)


def _update(code: Code, op: Atomic, x: Reg, address: Reg) -> None:
    dtype = op.ref.ref.dtype
    kind = kind_of(dtype)
    if kind == "float":
        _exchange(code, op, x, address)
        return
    name = op.kind
    if kind == "bool":
        name = {"max": "or", "min": "and"}.get(name, name)
    elif kind == "unsigned" and name in ("max", "min"):
        name = f"u{name}"
    code.do(f"{code.fresh_value()} = atomicrmw {name} ptr {address.text}, {packed(code, x, dtype)} monotonic")


def _exchange(code: Code, op: Atomic, x: Reg, address: Reg) -> None:
    """Exchange the element for the extreme of both until nobody else has changed it meanwhile."""
    dtype = op.ref.ref.dtype
    type, scalar = stored(dtype).integer, computed(dtype).scalar
    before = code.emit(type, f"load atomic {type}, {address} monotonic, align {type.bits // 8}")
    start = code.here
    again, done = code.fresh("again"), code.fresh("done")
    seen, found = Reg(code.fresh_value(), type), code.fresh_value()
    code.branch(again)
    code.label(again)
    code.do(f"{seen.text} = phi {type} [{before.text}, %{start}], [{found}, %{again}]")
    now = code.cast("bitcast", seen, scalar)
    old, new = (now, x) if dtype in (F32, F64) else (_widened(code, now, dtype), _widened(code, x, dtype))
    better = code.compare("fcmp ogt" if op.kind == "max" else "fcmp olt", new, old)
    better = code.binary("or", better, code.compare("fcmp uno", new, new))  # NaN wins, the first one stays
    takes = code.binary("and", better, code.compare("fcmp ord", old, old))
    wanted = code.cast("bitcast", code.select(takes, x, now), type.scalar)
    pair, won = code.fresh_value(), Reg(code.fresh_value(), I1)
    code.do(f"{pair} = cmpxchg ptr {address.text}, {seen}, {wanted} monotonic monotonic")
    code.do(f"{found} = extractvalue {{ {type}, i1 }} {pair}, 0")
    code.do(f"{won.text} = extractvalue {{ {type}, i1 }} {pair}, 1")
    code.branch_if(won, done, again)
    code.label(done)
