"""Funcs of one program that load whole arrays, compute, and store whole arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilekern.ir.core import Block, Func, Value
from tilekern.ir.memory import Access, Dim, Position, Store
from tilekern.ir.verify import verify
from tilekern.lower.support import Sketch


def func_of(make: Callable[[Sketch], Sequence[Value]]) -> Func:
    """The Func that stores the tiles that `make` returns, each to an output of its own."""
    b = Sketch()

    def body() -> tuple[Value, ...]:
        for result in make(b):
            shape = result.tile.shape
            access = Access(tuple(Dim("block", Position(), n, in_bounds=True) for n in shape))
            b.add(Store(operands=(b.ref(result.tile.dtype, shape, "out"), result), access=access))
        return ()

    block = b.block((), body)
    params = sorted(b.params, key=lambda p: p.ref.role != "in")
    func = Func("made", tuple(params), (), Block((), block.ops, ()))
    verify(func)
    return func
