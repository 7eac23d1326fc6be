"""Coordinates of elements: a moved element is the operand's element at the coordinates that the op says."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.ir.funcs import every_op
from tests.lower.triton.legalize.meaning import shapes
from tilekern.ir.core import Op, Value
from tilekern.ir.dynamic import DynamicSlice
from tilekern.ir.shape import Broadcast, Reshape, Reverse, Slice, Transpose
from tilekern.ir.types import F64, I32, TileType
from tilekern.lower.llvm.element_index import Index, is_virtual, operand_coords


@st.composite
def moves(draw: Any) -> tuple[Op, list[np.ndarray]]:
    """An op that moves the elements of a tile, and its operands."""
    shape = draw(shapes())
    x = np.arange(np.prod(shape, dtype=np.int64), dtype=F64).reshape(shape)
    dims = list(range(len(shape)))
    arrays = [x]
    kind = draw(st.sampled_from([Broadcast, Transpose, Slice, Reverse, Reshape, DynamicSlice]))
    if kind is Broadcast:
        after = [draw(st.sampled_from([1, 3])) if n == 1 else n for n in shape]
        at = draw(st.integers(0, len(shape)))
        fields = {"shape": (*after[:at], 2, *after[at:]), "dims": tuple(d + (d >= at) for d in dims)}
    elif kind is Transpose:
        fields = {"permutation": tuple(draw(st.permutations(dims)))}
    elif kind is Slice:
        start = tuple(draw(st.integers(0, n - 1)) for n in shape)
        stop = tuple(draw(st.integers(first + 1, n)) for first, n in zip(start, shape, strict=True))
        fields = {"start": start, "stop": stop, "stride": tuple(draw(st.integers(1, 3)) for _ in shape)}
    elif kind is Reverse:
        fields = {"dims": tuple(sorted(draw(st.sets(st.sampled_from(dims))))) if dims else ()}
    elif kind is Reshape:
        long = [n for n in shape if n != 1]
        at = draw(st.integers(0, len(long)))
        fields = {"shape": (*long[:at], 1, *long[at:])}
    else:
        fields = {"sizes": tuple(draw(st.integers(1, n)) for n in shape)}
        arrays += [np.array(draw(st.integers(-2, n + 2)), I32) for n in shape]
    operands = tuple(Value(TileType(a.shape, a.dtype)) for a in arrays)
    return kind(operands=operands, **fields), arrays


@given(moves())
def test_moved_elements_are_those_at_the_coordinates(case: tuple[Op, list[np.ndarray]]) -> None:
    op, (x, *starts) = case
    number = dict(zip(op.operands[1:], starts, strict=True))
    result = op.evaluate(x, *starts)

    def clamped(start: Value, limit: int) -> Index:
        return Index(const=int(np.clip(number[start], 0, limit)))

    for place in np.ndindex(result.shape):
        ((value, coords),) = operand_coords(op, tuple(Index(const=n) for n in place), clamped)
        assert value is op.operands[0] and not any(index.terms or index.step for index in coords)
        assert x[tuple(index.const for index in coords)] == result[place]


def test_an_operand_has_as_many_coordinates_as_dims() -> None:
    """Scalars of a load's positions have none, and are not among its operands."""
    for op in every_op().walk():
        if op.results and is_virtual(op):
            coords = tuple(Index(const=d) for d in range(len(op.result.tile.shape)))
            for value, at in operand_coords(op, coords, lambda start, limit: Index()):
                assert len(at) == len(value.tile.shape), op.name
