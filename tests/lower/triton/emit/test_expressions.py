"""Expressions of special numbers, and of literals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.ir.funcs import Source, assert_same, edges
from tests.lower.triton.legalize.meaning import counting, several
from tests.lower.triton.legalize.test_expand import EXACT, operands_of
from tests.lower.triton.running import assert_runs, program_of
from tilekern.ir.compute import Constant, Convert, Select
from tilekern.ir.core import Value
from tilekern.ir.elementwise import TABLE, Elementwise
from tilekern.ir.interpret import interpret
from tilekern.ir.ordering import ArgReduce, LinearScan, Scan
from tilekern.ir.parse import parse
from tilekern.ir.shape import Transpose
from tilekern.ir.types import BOOL, DTYPES, F32, F64, DType, TileType, dtype_name, kind_of
from tilekern.lower.triton.emit import expressions
from tilekern.lower.triton.emit.source_text import Expr
from tilekern.lower.triton.interpret import interpret as run

pytest.importorskip("triton", reason="needs triton")

# The last bit of these is NumPy's or the C library's in the interpreter, and CUDA's on a GPU.
APPROXIMATE = [f for f in TABLE if f not in EXACT and TABLE[f].accepts == ("float",)]


def accepted(function: str, dtype: DType) -> bool:
    return kind_of(dtype) in TABLE[function].accepts


def subnormal(x: np.ndarray) -> np.ndarray:
    """Subnormal numbers may read as 0."""
    with np.errstate(all="ignore"):
        wide = np.abs(x.astype(F64))
        return (wide > 0) & (wide < 2.0**-126) if kind_of(x.dtype) == "float" else np.zeros(x.shape, bool)


@pytest.mark.parametrize("name", DTYPES)
def test_exact_functions(name: str) -> None:
    """All rows of the table that round at most once, on random pairs of special numbers."""
    dtype = DTYPES[name]
    found = [f for f in TABLE if accepted(f, dtype) and f not in APPROXIMATE]
    special = operands_of("add", dtype, np.random.default_rng(1)) if dtype != BOOL else [edges(dtype)] * 2
    special = [np.where(subnormal(x), np.zeros_like(x), x)[:128] for x in special]
    some = np.where(special[1] == 0, np.ones_like(special[1]), special[1])  # no integer is divided by 0

    def body(b: Source, x: Value, y: Value, z: Value) -> Iterator[Value]:
        for function in found:
            second = z if function in ("div", "rem") and kind_of(dtype) != "float" else y
            yield b.ew(function, *(x, second)[: TABLE[function].arity])

    func, arrays = several(body, *special, some)
    expected = interpret(func, *arrays)
    for function, got, wanted in zip(found, run(program_of(func), arrays), expected, strict=True):
        keep = ~(subnormal(wanted) | subnormal(got))
        try:
            assert_same(got[keep], wanted[keep], zeros=False)
        except AssertionError as error:
            raise AssertionError(f"{function} of {name}: {error}") from error


def literals(dtype: DType) -> list[Any]:
    if dtype == BOOL:
        return [False, True]
    if kind_of(dtype) != "float":
        limits = np.iinfo(dtype)
        return [0, 1, limits.max, limits.min, limits.max // 2 + 1]
    return [0.0, -0.0, 1.0, 0.1, -2.5, np.inf, -np.inf, np.nan]


@pytest.mark.parametrize("name", DTYPES)
def test_literals_on_either_side(name: str) -> None:
    """A literal takes the dtype of the other operand, not that of Python."""
    dtype = DTYPES[name]
    functions = [f for f in ("add", "sub", "mul", "max", "and", "xor", "lt", "eq") if accepted(f, dtype)]
    x = edges(dtype, 16)
    x = np.where(subnormal(x), np.zeros_like(x), x)
    labels: list[str] = []

    def body(b: Source, x: Value, which: Value) -> Iterator[Value]:
        for number in literals(dtype):
            with np.errstate(all="ignore"):
                c = b.one(Constant(array=np.asarray(number).astype(dtype), shape=x.tile.shape))
            for function in functions:
                labels.extend(f"{function} {number} {side}" for side in ("right", "left"))
                yield b.ew(function, x, c)
                yield b.ew(function, c, x)
            labels.extend(f"select {number} {n}" for n in range(3))
            yield b.op(Select, which, x, c)
            yield b.op(Select, which, c, x)
            yield b.op(Select, which, c, b.one(Constant(array=np.ones((), dtype), shape=x.tile.shape)))

    func, arrays = several(body, x, np.arange(len(x)) % 2 == 0)
    for label, got, wanted in zip(labels, run(program_of(func), arrays), interpret(func, *arrays), strict=True):
        keep = ~(subnormal(wanted) | subnormal(got))
        try:
            assert_same(got[keep], wanted[keep], zeros=False)
        except AssertionError as error:
            raise AssertionError(f"{label} of {name}: {error}") from error


@pytest.mark.parametrize("name", [n for n in DTYPES if n != "bool"])
def test_numbers_as_fills_carries_and_stores(name: str) -> None:
    for number in literals(DTYPES[name])[:5]:
        text = repr(number) if kind_of(DTYPES[name]) == "float" else str(int(number))
        x = counting((5,), DTYPES[name])
        assert_runs(
            f"""
func @f(%x: ref<{name}[5], in>, %o: ref<{name}[8], out>, %p: ref<{name}[8], out>, %q: ref<{name}[], out>) {{
  %c = constant {text} : {name}[]
  %d = constant {text} : {name}[8]
  %a = load %x[0 +: 8] fill %c : {name}[8]
  %b = constant false : bool[8]
  %z = constant 0 : i32[]
  %n = constant 1 : i32[]
  %s = fold %k in k[1 by 1] from %z to %n with %r = %d do {{
    %m = select(%b, %a, %r) : {name}[8]
    yield %m
  }} : {name}[8]
  store %a to %o[0 +: 8!]
  store %s to %p[0 +: 8!]
  store %c to %q[]
}}""",
            x,
        )


@pytest.mark.parametrize("function", APPROXIMATE)
def test_approximations(function: str) -> None:
    """Functions of float32 have the error of a float64 result that is rounded once."""
    x = np.linspace(0.01, 0.99, 64).astype(np.float32) + (function == "acosh")
    arrays = [x, x[::-1].copy()][: TABLE[function].arity]

    def body(b: Source, *tiles: Value) -> list[Value]:
        return [b.ew(function, *tiles)]

    func, inputs = several(body, *arrays)
    (found,) = run(program_of(func), inputs)
    exact = TABLE[function].meaning(*(a.astype(F64) for a in arrays))
    assert np.isfinite(exact).all()
    for part in np.split(found, 2):
        np.testing.assert_allclose(part, exact, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("name", DTYPES)
def test_converts(name: str) -> None:
    """From every dtype to every other one, on special numbers."""
    x = edges(DTYPES[name], 64)
    x = np.where(subnormal(x), np.zeros_like(x), x)
    targets = [d for n, d in DTYPES.items() if n != name]

    def body(b: Source, x: Value) -> list[Value]:
        return [b.op(Convert, x, dtype=d) for d in targets]

    func, arrays = several(body, x)
    for dtype, got, wanted in zip(targets, run(program_of(func), arrays), interpret(func, *arrays), strict=True):
        try:
            assert_same(got, wanted, zeros=False)
        except AssertionError as error:
            raise AssertionError(f"to {dtype_name(dtype)}: {error}") from error


# --- the text -------------------------------------------------------------------------------------------------------


def expression(kind: Any, *operands: Expr, shape: tuple[int, ...] = (4, 8), dtype: DType = F32, **fields: Any) -> Expr:
    op = kind(operands=tuple(Value(TileType(shape, dtype)) for _ in operands), **fields)
    return expressions.pure(op, operands)


A, B = Expr("a", (4, 8)), Expr("b", (4, 8))
ROW = Expr("row[None, :]", (1, 8))
TWO = Expr("2.0", (), np.asarray(2, F32))


def test_text_for_people() -> None:
    assert expression(Elementwise, A, B, function="add") == Expr("a + b", (4, 8), tight=False)
    assert expression(Elementwise, A, ROW, function="mul").text == "a * row[None, :]"
    assert expression(Elementwise, A, TWO, function="mul").text == "a * 2.0"
    assert expression(Elementwise, A, function="neg").text == "a * -1.0"
    assert expression(Elementwise, A, B, function="max").text == "maximum(a, b)"
    assert expression(Transpose, A, permutation=(1, 0)).text == "tl.trans(a)"
    assert expression(Scan, A, monoid="sum", dim=1, reverse=True).text == "tl.associative_scan(a, 1, add, reverse=True)"
    assert expression(LinearScan, A, B, dim=0).text == "tl.associative_scan((a, b), 0, linear_step)[1]"
    assert expression(ArgReduce, A, extreme="max", dim=1).text.endswith("1, arg_maximum)[1]")


def test_tiles_stay_small_until_the_full_shape_is_needed() -> None:
    total = expression(Elementwise, ROW, TWO, function="add")
    assert total.shape == (1, 8)
    assert expressions.whole(total, TileType((4, 8), F32)) == "tl.broadcast_to(row[None, :] + 2.0, (4, 8))"
    assert expressions.whole(A, TileType((4, 8), F32)) == "a"
    assert expressions.whole(TWO, TileType((4, 8), F32)) == "tl.full((4, 8), 2.0, tl.float32)"


@pytest.mark.sweep(1)
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_products_of_float32_have_the_precision_of_the_dot(precision: str) -> None:
    """Triton's default is tf32, which its interpreter computes exactly: the text has to name the precision."""
    func = parse(f"""
func @product(%x: ref<f32[32, 32], in>, %out: ref<f32[32, 32], out>) {{
  grid %i in i[1 by 1]
  %0 = load %x[0 +: 32!, 0 +: 32!] : f32[32, 32]
  %1 = dot(%0, %0) {{contract=[[1], [0]], precision="{precision}"}} : f32[32, 32]
  store %1 to %out[0 +: 32!, 0 +: 32!]
}}""")
    assert f'input_precision="{precision}"' in program_of(func).text
