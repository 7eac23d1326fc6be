"""Slices of split dims: the same elements, without a tile in memory."""

from __future__ import annotations

import numpy as np
import pytest

from tests.lower.llvm.funcs import func_of
from tests.lower.llvm.running import run
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.interpret import interpret
from tilekern.ir.shape import Reshape, Slice, Transpose
from tilekern.ir.types import F32
from tilekern.lower.llvm.legalize.slice_splits import slice_splits
from tilekern.lower.llvm.lowering import LlvmLowering
from tilekern.passes.dce import dce
from tilekern.testing.support import Sketch

pytestmark = pytest.mark.sweep(1)  # all cases: none compiles a program

pytest.importorskip("llvmlite", reason="needs llvmlite")


def sliced(whole: tuple[int, ...], split: tuple[int, ...], *places: tuple[int, int, int]) -> Func:
    """A tile, reshaped from `whole` to `split`, of which the places (start, stop, stride) of each dim are sliced."""
    start, stop, stride = zip(*places, strict=True)

    def make(b: Sketch) -> list[Value]:
        moved = b.op(Transpose, b.tile(F32, whole[::-1]), permutation=tuple(range(len(whole)))[::-1])
        return [b.op(Slice, b.op(Reshape, moved, shape=split), start=start, stop=stop, stride=stride)]

    return func_of(make)


def reshapes(func: Func) -> list[Op]:
    """The reshapes that are not of unit dims only."""
    ops = (op for op in func.walk() if isinstance(op, Reshape))
    return [op for op in ops if [n for n in op.operands[0].tile.shape if n > 1] != [n for n in op.shape if n > 1]]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("heads", [(0, 4, 1), (1, 4, 2), (2, 3, 1)])
def test_one_place_of_the_inner_part(heads: tuple[int, int, int], place: int) -> None:
    func = sliced((12, 5), (4, 3, 5), heads, (place, place + 1, 1), (1, 4, 1))
    after = dce(slice_splits(func))
    assert reshapes(func) and not reshapes(after)
    x = np.random.default_rng(0).standard_normal((5, 12)).astype(np.float32)
    (wanted,) = interpret(func, x)
    np.testing.assert_array_equal(interpret(after, x)[0], wanted)
    np.testing.assert_array_equal(run(LlvmLowering(func), [x])[0], wanted)


@pytest.mark.parametrize(
    "func",
    [
        sliced((12, 5), (4, 3, 5), (0, 4, 1), (0, 2, 1), (0, 5, 1)),  # two places
        sliced((12, 5), (2, 2, 3, 5), (0, 2, 1), (0, 1, 1), (0, 1, 1), (0, 5, 1)),  # three parts
        sliced((12, 5), (6, 10), (0, 6, 1), (0, 1, 1)),  # other rows
    ],
)
def test_other_slices_stay(func: Func) -> None:
    assert slice_splits(func) is func
