"""The form that the emitter needs, what it means, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from tests import seeds
from tests.ir.funcs import assert_same
from tests.lower.llvm.funcs import func_of
from tests.lower.llvm.machines import ALL, AVX2, BFLOAT16, NEON
from tilekern.errors import DeviceAssertionError, VerifyError
from tilekern.ir.compute import Convert, Dot, Reduce
from tilekern.ir.core import Func, Op
from tilekern.ir.debug import Assert
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.interpret import interpret
from tilekern.ir.ordering import ArgReduce, Scan, Sort, TopK
from tilekern.ir.shape import Iota, Transpose
from tilekern.ir.types import BF16, BOOL, DTYPES, F16, F32, F64, I32, DType, TileType, is_float8, kind_of
from tilekern.lower.llvm.legalize import legalize
from tilekern.lower.llvm.runtime.machine import Machine
from tilekern.lower.rewrite.matrices import is_of_matrices
from tilekern.passes import pipeline
from tilekern.testing.programs import Program
from tilekern.testing.programs.batches import check, sample
from tilekern.testing.support import SAMPLES, Sketch
from tilekern.testing.support import sample as cell

_PRODUCTS = {np.dtype(np.int16), I32, F64, F32, BF16}
_BYTES = {np.dtype(np.int8), np.dtype(np.uint8)}


def is_legal(op: Op, machine: Machine) -> bool:
    """True if the emitter has an op, by the docstring of `legalize` and not by its code."""
    dtypes = [v.tile.dtype for v in (*op.operands, *op.results) if isinstance(v.type, TileType)]
    match op:
        case Elementwise():
            (dtype, *_) = dtypes
            return _computes(op.function, dtype)
        case Convert():
            return _casts(op.operands[0].tile.dtype, op.dtype)
        case Reduce():
            return (
                len(op.dims) == 1 and (dtypes[0] == BOOL or dtypes[0].itemsize * 8 >= 8) and not _is_narrow(dtypes[0])
            )
        case Scan():
            return not _is_narrow(dtypes[0])
        case ArgReduce() | Sort():
            return kind_of(dtypes[0]) in ("signed", "unsigned")
        case Iota():
            return op.dtype == I32
        case Dot():
            multiplied = set(dtypes[:2]) <= _PRODUCTS | (_BYTES if machine.has_int8_fours else set())
            return is_of_matrices(op) and multiplied and (dtypes[0] != BF16 or machine.multiplies_bfloat16)
        case TopK():
            return dtypes[0] in (I32, np.dtype(np.uint32))
        case Assert():
            return dtypes == [BOOL] and op.operands[0].tile.shape == ()
        case _:
            return True


def _is_narrow(dtype: DType) -> bool:
    return kind_of(dtype) == "float" and dtype.itemsize < 4


def _computes(function: str, dtype: DType) -> bool:
    if function in ("nextafter",) or (function == "sign" and kind_of(dtype) != "float"):
        return False
    return function in ("and", "or", "xor", "not", "eq", "ne") if dtype == BOOL else not _is_narrow(dtype)


def _casts(source: DType, dtype: DType) -> bool:
    if is_float8(source) or is_float8(dtype):
        return dtype == F32
    if dtype in (BF16, F16):
        return source == F32
    return source not in (BF16, F16) or dtype == F32


def by_legal_form(programs: Sequence[Program], machine: Machine) -> Any:
    """The outputs of the legal forms, by the interpreter."""
    found: list[Any] = []
    for program in programs:
        legal = legalize(pipeline.run(program.func), machine)
        for op in legal.walk():
            assert is_legal(op, machine), op
        found.append(interpret(legal, *program.arrays, orders=1))
    return found


@pytest.mark.sweep(2)
@pytest.mark.parametrize("machine", ALL, ids=lambda m: m.cpu)
def test_the_meaning_of_random_programs_stays(machine: Machine) -> None:
    check(seeds.of_chunk(ALL.index(machine), 60), lambda programs: by_legal_form(programs, machine))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", DTYPES)
def test_every_cell_has_a_legal_form(name: str) -> None:
    for row in SAMPLES.keys() - {"print", "assert"}:
        try:
            func = cell(row, DTYPES[name])
        except VerifyError:
            continue
        for machine in (AVX2, BFLOAT16, NEON):
            bad = [op for op in legalize(func, machine).walk() if not is_legal(op, machine)]
            assert not bad, (row, machine.cpu, bad)


# --- single rewrites -------------------------------------------------------------------------------------------------


def count(func: Func, machine: Machine, kind: type[Op], *more: type[Op]) -> int:
    return sum(isinstance(op, (kind, *more)) for op in legalize(func, machine).walk())


@pytest.mark.parametrize(("function", "sum_of"), [("add", lambda x: x + x), ("exp", np.exp)])
def test_narrow_floats_are_rounded_once(function: str, sum_of: Callable[[Any], Any]) -> None:
    def make(b: Sketch) -> Any:
        x = b.tile(BF16, (4,))
        return [b.op(Elementwise, *([x, x] if function == "add" else [x]), function=function)]

    func = func_of(make)
    assert count(func, AVX2, Convert) == 2
    x = np.array([0.1, 1, 3, -7], BF16)
    assert_same(interpret(legalize(func, AVX2), x)[0], sum_of(x.astype(F32)).astype(BF16))


def test_a_chain_of_narrow_ops_rounds_at_each() -> None:
    """Or it would be another result than the interpreter's."""

    def make(b: Sketch) -> Any:
        x = b.tile(BF16, (4,))
        double = b.op(Elementwise, x, x, function="add")
        return [b.op(Elementwise, double, x, function="mul")]

    assert count(func_of(make), AVX2, Convert) == 4


def test_a_transposed_operand_of_a_dot_is_read_as_it_lies() -> None:
    def make(b: Sketch) -> Any:
        moved = b.op(Transpose, b.tile(F32, (8, 16)), permutation=(1, 0))
        return [b.op(Dot, b.tile(F32, (4, 16)), moved, contract=((1,), (0,)))]

    assert count(func_of(make), AVX2, Transpose) == 0


def test_a_dot_of_several_dims_is_one_of_matrices() -> None:
    def make(b: Sketch) -> Any:
        left, right = b.tile(F32, (5, 2, 3, 4)), b.tile(F32, (5, 3, 2, 6))
        return [b.op(Dot, left, right, contract=((1, 2), (2, 1)), batch=((0,), (0,)))]

    func = func_of(make)
    (dot,) = (op for op in legalize(func, AVX2).walk() if isinstance(op, Dot))
    assert [x.tile.shape for x in dot.operands] in ([(5, 4, 6), (5, 6, 6)], [(5, 6, 4), (5, 6, 6)])
    rng = np.random.default_rng(0)
    arrays = [rng.integers(-4, 5, p.ref.shape).astype(F32) for p in func.inputs]
    assert_same(interpret(legalize(func, AVX2), *arrays)[0], interpret(func, *arrays)[0], zeros=False)


@pytest.mark.parametrize(
    ("name", "machine", "expected"),
    [
        ("f32", BFLOAT16, "float32"),
        ("bf16", BFLOAT16, "bfloat16"),
        ("bf16", AVX2, "float32"),
        ("f16", BFLOAT16, "float32"),
        ("f64", AVX2, "float64"),
        ("i8", AVX2, "int16"),
        ("u8", AVX2, "int16"),
        ("u16", AVX2, "int32"),
        ("i8", NEON, "int32"),
        ("i64", AVX2, "int32"),
    ],
)
def test_what_is_multiplied(name: str, machine: Machine, expected: str) -> None:
    assert multiplied(DTYPES[name], "ieee", machine) == np.dtype(expected)


def test_a_cheaper_precision_is_used_where_it_is_cheaper() -> None:
    assert multiplied(F32, "bf16", BFLOAT16) == BF16 and multiplied(F32, "bf16", AVX2) == F32


def multiplied(dtype: DType, precision: str, machine: Machine) -> DType:
    """The dtype of the operands of a dot of large matrices."""

    def make(b: Sketch) -> Any:
        left, right = b.tile(dtype, (64, 64)), b.tile(dtype, (64, 64))
        return [b.op(Dot, left, right, contract=((1,), (0,)), precision=precision)]

    (dot,) = (op for op in legalize(func_of(make), machine).walk() if isinstance(op, Dot))
    return dot.operands[0].tile.dtype


def test_a_sort_that_picks_other_integers_than_places() -> None:
    """Once it picked places, for it was taken for the sort that finds them."""
    func = cell("sort", I32)
    keys, values = np.array([[3, 1, 2, 0], [5, 5, 4, 4]], np.int32), np.arange(8, dtype=np.int32).reshape(2, 4)[:, ::-1]
    for machine in ALL:
        legal = legalize(func, machine)
        assert_same(interpret(legal, keys, values)[0], np.array([[0, 2, 1, 3], [5, 4, 7, 6]], np.int32))
        for op in legal.walk():
            assert not isinstance(op, Sort) or op.operands[op.pick] is not legal.inputs[1]


@pytest.mark.parametrize("broken", [0, 1])
def test_an_assertion_is_of_one_bool(broken: int) -> None:
    func = cell("assert", F32)
    legal = legalize(func, AVX2)
    (op,) = (op for op in legal.walk() if isinstance(op, Assert))
    assert is_legal(op, AVX2)
    x = np.where(np.arange(8).reshape(2, 4) < broken, np.nan, np.float32(1))
    with pytest.raises(DeviceAssertionError) if broken else nullcontext():
        interpret(legal, x.astype(F32))


def test_the_form_is_not_trivial() -> None:
    """Random programs are not legal as they come."""
    assert sum(not is_legal(op, AVX2) for n in range(20) for op in sample(n)[0].func.walk()) > 20
