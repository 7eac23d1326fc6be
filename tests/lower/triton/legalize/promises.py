"""Properties of Funcs after each step of `legalize`: the "Gives" of the docstrings."""

from __future__ import annotations

from tilekern.ir.compute import Bitcast, Constant, Convert, Dot, Reduce, Select
from tilekern.ir.core import Func, Op
from tilekern.ir.dynamic import DynamicSlice, DynamicUpdateSlice, Take
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import MemoryOp
from tilekern.ir.ordering import ArgReduce, Scan, Sort, TopK
from tilekern.ir.shape import Broadcast, Concatenate, Iota, Pad, Reshape, Reverse, Slice, Transpose
from tilekern.ir.types import BF16, BOOL, DTYPES, F16, F32, F64, I32, DType, kind_of
from tilekern.lower.triton.chip import Chip

NATIVE = {"add", "sub", "mul", "max", "min", "neg", "abs", "eq", "ne", "lt", "le", "gt", "ge"}
MOVES = (Broadcast, Reshape, Transpose, Take, Select, Constant, Bitcast, Convert, Iota, MemoryOp)
SHIFTS = {"shift_left", "shift_right_logical", "shift_right_arithmetic"}


def is_float8(dtype: DType) -> bool:
    return kind_of(dtype) == "float" and dtype.itemsize == 1


def assert_expanded(func: Func, chip: Chip) -> None:
    """The form that `expand` gives."""
    for op in func.walk():
        match op:
            case Convert():
                _check_convert(op)
            case Elementwise():
                _check_elementwise(op)
            case Reduce() | Scan() | ArgReduce():
                assert op.operands[0].tile.dtype.itemsize >= 4 and op.operands[0].tile.dtype != BOOL, op
                assert not isinstance(op, Reduce) or len(op.dims) == 1
            case Dot():
                dtype = op.operands[0].tile.dtype
                assert kind_of(dtype) == "float" or dtype.name == "int8"
                assert op.precision != "bf16" or dtype != F32
                assert not is_float8(dtype) or (chip.float8 and chip.matrix_unit != "wgmma")
            case Sort():
                *keys, last = (v.tile.dtype for v in op.operands)
                assert not keys or (last == I32 and op.pick == len(keys) == op.num_keys)
                assert all(_is_key(d) for d in keys or [last])
            case TopK():
                assert _is_key(op.operands[0].tile.dtype)
            case Iota():
                assert op.dtype == I32
            case _:
                pass


def _is_key(dtype: DType) -> bool:
    return kind_of(dtype) == "signed" and dtype.itemsize >= 2


def _check_convert(op: Convert) -> None:
    source, target = op.operands[0].tile.dtype, op.dtype
    assert target != BOOL
    if source == BOOL:
        assert target in (I32, F32, F64)
    elif (source, target) == (DTYPES["f8e5m2"], F16):
        pass  # only more digits of the fraction
    elif "float" in (kind_of(source), kind_of(target)):
        wide = {F32} if is_float8(source) or is_float8(target) else {F32, F64}
        assert source in wide or target in wide, f"{source} to {target}"


def _check_elementwise(op: Elementwise) -> None:
    dtype, function = op.operands[0].tile.dtype, op.function
    assert not is_float8(dtype), f"{function} of {dtype}"
    assert function not in ("nextafter", "population_count", "clz", "is_finite")
    if dtype in (BF16, F16):
        assert function in NATIVE
    if dtype == BOOL:
        assert function in ("and", "or", "xor", "not")
    if function == "shift_right_logical":
        assert kind_of(dtype) == "unsigned"
    if function == "shift_right_arithmetic":
        assert kind_of(dtype) == "signed"


def assert_padded(func: Func) -> None:
    """The form that `pad_tiles` gives."""
    missing = (Slice, Reverse, Pad, Concatenate, DynamicSlice, DynamicUpdateSlice)
    for op in func.walk():
        assert not isinstance(op, missing), op.name
        assert not isinstance(op, Take) or op.along
        args = [a for region in op.regions for a in region.args]
        for value in (*op.results, *args):
            assert all(n > 0 and n & (n - 1) == 0 for n in value.tile.shape), f"{value.tile} in {op.name}"


def assert_standard(func: Func) -> None:
    """The form that `standard_forms` gives."""
    for op in func.walk():
        if isinstance(op, Dot):
            x, y = (v.tile.shape for v in op.operands)
            batch = len(x) - 2
            assert len(x) == len(y) and batch in (0, 1)
            assert op.contract == ((batch + 1,), (batch,)) and op.batch == ((0,) * batch,) * 2
            assert x[-1] >= 16 and x[-1] * op.operands[0].tile.dtype.itemsize * 8 >= 256
        if isinstance(op, Sort | TopK):
            assert len(op.result.tile.shape) == 2 and op.dim == 1


def assert_legal(func: Func, chip: Chip) -> None:
    """All of it."""
    assert_expanded(func, chip)
    assert_padded(func)
    assert_standard(func)


def ops_of[T: Op](func: Func, kind: type[T]) -> list[T]:
    """The ops of a kind."""
    return [op for op in func.walk() if isinstance(op, kind)]
