"""The cells op × dtype of the table of support, on tiles of several shapes."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np

from tests.ir.funcs import edges
from tilekern.ir.core import Array, Func, Value
from tilekern.ir.dynamic import Take
from tilekern.ir.shape import Reshape
from tilekern.ir.types import DTYPES, F16, F32, I32, DType, kind_of
from tilekern.testing import support
from tilekern.testing.support import Sketch

SMALL, LARGE, ODD = (2, 4), (16, 256), (5, 130)
SHAPES = (SMALL, LARGE, ODD)
DTYPE_NAMES = [n for n, d in DTYPES.items() if d.itemsize <= 4]
CONTROL = ("fold", "while", "switch", "hoist", "print", "assert")
OPS = [n for n in support.SAMPLES if n not in CONTROL and not n.startswith("atomic")]


def cell(op: str, dtype: DType, shape: tuple[int, int] = SMALL) -> Func:
    """A Func of one op at work on tiles of a shape; `VerifyError` if the language has none."""
    rows, columns = shape

    def tile(self: Sketch, dtype: DType, shape: tuple[int, ...] = shape) -> Value:
        return original(self, dtype, shape)

    samples = {
        "reshape": lambda b, d: b.op(Reshape, b.tile(d), shape=(columns, rows)),
        "take along": lambda b, d: b.op(Take, b.tile(d), b.tile(I32, (rows, 3)), dim=1, along=True),
    }
    original = Sketch.tile
    with (
        patch.object(Sketch, "tile", tile),
        patch.object(support, "SHAPE", shape),
        patch.dict(support.SAMPLES, samples),
    ):
        return support.sample(op, dtype)


def arrays_of(func: Func, seed: int = 0, ordinary: bool = False) -> list[Array]:
    """Special numbers, or such as are found anywhere, for the inputs of a cell; no integer is divided by 0."""
    rng = np.random.default_rng(seed)
    arrays: list[Array] = []
    for param in func.inputs:
        dtype = param.ref.dtype
        some = edges(dtype, 64)
        if ordinary and kind_of(dtype) == "float":
            some = np.array([-2, -1, -0.5, 0, 0.5, 1, 1.5, 3]).astype(dtype)
        arrays.append(np.asarray(rng.choice(some, param.ref.shape), dtype))
    if func.name in ("div", "rem") and kind_of(arrays[1].dtype) != "float":
        arrays[1] = np.where(arrays[1] == 0, np.ones_like(arrays[1]), arrays[1])
    return arrays


def as_legal(arrays: list[Array]) -> list[Array]:
    """The arrays that a legal Func takes for them."""
    return [x.astype(F32) if x.dtype == F16 else x for x in arrays]
