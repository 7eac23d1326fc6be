"""Random Funcs that add to an array, and the elements that their updates touch."""

from __future__ import annotations

from itertools import product
from typing import Any

from hypothesis import strategies as st

from tests.ir.funcs import Source, ref
from tilekern.ir.core import Axis, Func, Value, index_value
from tilekern.ir.memory import Access, Atomic, Dim, Position, Term, WriteOp
from tilekern.ir.types import F32


@st.composite
def dims(draw: Any, operands: int) -> Dim:
    """A block or an index at a sum of digits of the grid's indices."""
    used = draw(st.lists(st.integers(0, operands - 1), max_size=2))
    strides = st.sampled_from([-4, -2, -1, 0, 1, 1, 2, 3, 4, 8])
    terms = tuple(
        Term(n, draw(strides), draw(st.sampled_from([1, 1, 1, 2])), draw(st.sampled_from([0, 0, 0, 2]))) for n in used
    )
    kind = draw(st.sampled_from(["block", "index"]))
    size = draw(st.sampled_from([1, 2, 4])) if kind == "block" else 1
    return Dim(kind, Position(terms, draw(st.integers(-2, 2))), size)


@st.composite
def sums(draw: Any) -> Func:
    """A Func with one or two updates of a sum."""
    axes = tuple(Axis(name, draw(st.integers(1, 4))) for name in "ij"[: draw(st.integers(1, 2))])
    rank = draw(st.integers(1, 2))
    total = ref("total", (16,) * rank, "sum")
    indices = tuple(index_value(a.name) for a in axes)
    b = Source()

    def body(*_: Value) -> tuple[Value, ...]:
        for _ in range(draw(st.integers(1, 2))):
            found = tuple(draw(dims(len(axes))) for _ in range(rank))
            arity = 1 + max((t.operand for d in found for t in d.position.terms), default=-1)
            access = Access(found)
            value = b.const(1, access.shape, F32)
            b.add(Atomic(operands=(total, value, *indices[:arity]), access=access, kind="add"))
        return ()

    return Func("f", (total,), axes, b.block(indices, body))


def touched(op: WriteOp, numbers: dict[Value, int], shape: tuple[int, ...]) -> set[tuple[int, ...]]:
    lanes: list[range] = []
    for dim in op.access.dims:
        start = dim.position.const + sum(
            t.stride * t.digit(numbers[op.positions[t.operand]]) for t in dim.position.terms
        )
        lanes.append(range(start, start + dim.size))
    return {at for at in product(*lanes) if all(0 <= i < n for i, n in zip(at, shape, strict=True))}
