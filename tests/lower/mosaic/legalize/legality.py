"""Invariants of Funcs after `legalize`, and that they compute the same as before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.ir.funcs import assert_same
from tests.lower.mosaic.cells import as_legal
from tilekern.ir.compute import Bitcast, Constant, Convert, Dot, Reduce, Select
from tilekern.ir.core import Func, Op
from tilekern.ir.dynamic import Take
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.interpret import interpret
from tilekern.ir.shape import Broadcast, Concatenate, Iota, Reshape, Slice, Transpose
from tilekern.ir.types import BF16, BOOL, DTYPES, F16, F32, I32, kind_of
from tilekern.lower.mosaic.legalize import legalize
from tilekern.lower.mosaic.legalize.casts import has_cast
from tilekern.lower.mosaic.legalize.functions import _FUNCTIONS
from tilekern.lower.mosaic.legalize.movement import LANES

KINDS = (Bitcast, Broadcast, Concatenate, Constant, Convert, Dot, Elementwise, Iota, Reduce, Reshape, Select, Slice)
VECTORS = (Elementwise, Select, Convert, Bitcast, Constant, Iota, Broadcast, Reshape, Reduce)
MULTIPLIED = {F32, BF16, DTYPES["i8"], DTYPES["f8e4m3fn"], DTYPES["f8e5m2"]}


def legalized(func: Func, arrays: Sequence[np.ndarray], chip: str = "v5e") -> tuple[np.ndarray, ...]:
    """The outputs of the legal Func, which is checked, in the dtypes of the original."""
    legal = legalize(func, chip)
    assert_legal(legal, chip)
    found = interpret(legal, *as_legal(list(arrays)), orders=1)
    outputs: list[np.ndarray] = []
    for param, x in zip(func.outputs, found, strict=True):
        narrow = x.astype(param.ref.dtype)
        if x.dtype != narrow.dtype:
            assert_same(narrow.astype(x.dtype), x)  # only numbers that float16 has
        outputs.append(narrow)
    return tuple(outputs)


def assert_stays(func: Func, arrays: Sequence[np.ndarray], chip: str = "v5e", zeros: bool = False) -> None:
    """Assert that `legalize` keeps the meaning; `zeros`: and the signs of zeros."""
    for got, wanted in zip(legalized(func, arrays, chip), interpret(func, *arrays), strict=True):
        assert_same(got, wanted, zeros=zeros)


def assert_legal(func: Func, chip: str = "v5e") -> None:
    """Every pure op is one that `ops.function_of` has, and that Mosaic compiles."""
    for op in func.walk():
        for value in (*op.operands, *op.results):
            assert value.type.dtype != F16 and value.type.dtype.itemsize <= 4, f"{value.type} in {op.name}"
        if op.pure and op.results and not op.regions and op.name not in ("load",):
            _check(op, chip)


def _check(op: Op, chip: str) -> None:
    assert isinstance(op, (*KINDS, Transpose, Take)), op.name
    tiles = [v.tile for v in (*op.operands, *op.results)]
    assert all(t.size for t in tiles), f"{op.name} of no element"
    if any(len(t.shape) == 1 for t in tiles):
        assert isinstance(op, VECTORS), f"{op.name} of a vector"
    if isinstance(op, Slice | Concatenate | Transpose | Broadcast | Reshape) and op.operands[0].tile.shape != ():
        assert op.result.tile.dtype != BOOL, f"{op.name} of bools"
    match op:
        case Convert():
            source = op.operands[0].tile.dtype
            assert has_cast(source, op.dtype) or (source, op.dtype) == (F32, I32), f"{source} to {op.dtype}"
        case Elementwise():
            _check_elementwise(op)
        case Select():
            assert op.result.tile.dtype.itemsize == 4
        case Dot():
            assert op.operands[0].tile.dtype in MULTIPLIED
            rounds = chip in ("v5e", "v5p")  # their matrix unit does it; other dtypes have no precision
            assert op.precision != "bf16" or rounds or op.operands[0].tile.dtype != F32
            assert len(op.contract[0]) == 1
            batch = tuple(range(len(op.batch[0])))
            assert op.batch == (batch, batch) and len(batch) <= 1
            one_row = op.contract == ((1,), (1,)) and not batch and op.operands[1].tile.shape[0] == 1
            assert not one_row or op.operands[1].tile.dtype == F32
            assert [len(v.tile.shape) for v in op.operands] == [2 + len(batch)] * 2
        case Iota():
            assert op.dtype == I32
        case Slice():
            assert set(op.stride) == {1}
        case Take():
            assert op.along and op.dim == 1 and op.operands[0].tile.shape[0] > 1
            assert all(len(v.tile.shape) == 2 and v.tile.shape[1] == LANES for v in op.operands)
        case Reduce():
            _check_reduce(op)
        case Reshape():
            _check_reshape(op)
        case _:
            pass


def _check_elementwise(op: Elementwise) -> None:
    dtype = op.operands[0].tile.dtype
    assert op.function not in (*_FUNCTIONS, "nextafter", "population_count", "clz") or kind_of(dtype) != "float"
    assert op.function not in ("population_count", "clz")
    if dtype == BOOL:
        assert op.function in ("and", "or", "xor", "not")
    elif dtype == BF16:
        assert op.function in ("add", "sub", "mul", "neg", "max", "min")
    else:
        assert dtype.itemsize == 4, f"{op.function} of {dtype}"


def _check_reduce(op: Reduce) -> None:
    (tile,) = (v.tile for v in op.operands)
    assert tile.dtype in (F32, I32) and op.monoid in ("sum", "max", "min")
    assert len(tile.shape) >= 2 and (len(op.dims) == 1 or len(op.dims) == len(tile.shape) == 2)


def _check_reshape(op: Reshape) -> None:
    before, after = op.operands[0].tile.shape, op.shape
    vectors = [s for s in (before, after) if len(s) == 1]
    if vectors:
        other = after if len(before) == 1 else before
        assert other in ((1, *vectors[0]), (*vectors[0], 1))
    elif after == ():
        assert before == (1, 1)
    else:
        assert before and (before[-1] == after[-1] or before[-1] % LANES == after[-1] % LANES == 0)


def ops_of[T: Op](func: Func, kind: type[T]) -> list[T]:
    """The ops of a kind."""
    return [op for op in func.walk() if isinstance(op, kind)]
