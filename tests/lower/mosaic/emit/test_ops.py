"""The functions of legal ops: what they mean, in Pallas' interpret mode; that Mosaic compiles them, for every chip."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from tests.ir.funcs import Source, assert_near, assert_same, func, ref, whole
from tests.lower.mosaic.cells import DTYPE_NAMES, ODD, OPS, SHAPES, SMALL, arrays_of, as_legal, cell
from tests.lower.mosaic.compiled_functions import CHIPS, compiled
from tests.lower.mosaic.emit.one_program import run
from tilekern.errors import TargetError, VerifyError
from tilekern.ir.compute import Dot, Reduce
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.dynamic import DynamicSlice, Take
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.interpret import interpret
from tilekern.ir.ordering import ArgReduce, Scan, Sort, TopK
from tilekern.ir.shape import Concatenate, Reshape, Reverse, Slice, Transpose
from tilekern.ir.types import DTYPES, F64, TileType, kind_of
from tilekern.lower.mosaic.emit.ops import function_of
from tilekern.lower.mosaic.legalize import legalize

# XLA's functions on a CPU are approximations as well, and more of them follow one another in these.
CHAINS = ("lgamma", "erfc", "sinh", "cosh", "acosh", "asinh", "atanh", "erf_inv", "cbrt", "expm1", "erf", "atan", "tan")
# What finds its way through every kind of rewrite, for the quick suite.
QUICK = ("add", "max", "exp", "lgamma", "dot", "reduce sum", "scan sum", "sort", "reshape", "take along", "pad")


def cells(op: str, chip: str, shape: tuple[int, int] = SMALL) -> Iterator[Func]:
    """The legal Funcs of an op on all dtypes that have it."""
    for name in DTYPE_NAMES:
        try:
            yield legalize(cell(op, DTYPES[name], shape), chip)
        except (VerifyError, TargetError):
            continue


@pytest.mark.sweep(2)
@pytest.mark.parametrize("op", [op if op in QUICK else pytest.param(op, marks=pytest.mark.slow) for op in OPS])
def test_what_ops_mean(op: str) -> None:
    for legal in cells(op, "v5e"):
        arrays = as_legal(arrays_of(legal, 1, ordinary=True))
        with np.errstate(all="ignore"):
            expected = interpret(legal, *arrays)
        for got, wanted in zip(jax.jit(lambda *a, f=legal: run(f, *a))(*arrays), expected, strict=True):
            check(op, np.asarray(got), wanted)


def check(op: str, got: np.ndarray, wanted: np.ndarray) -> None:
    if kind_of(wanted.dtype) != "float":
        assert_same(got, wanted)
        return
    finite = np.abs(wanted[np.isfinite(wanted)].astype(F64))
    assert_near(got, wanted.astype(F64), least=8 * float(finite.max(initial=1)) if op in CHAINS else 0)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("op", QUICK)
def test_ops_compile(op: str, chip: str) -> None:
    pytest.importorskip("libtpu", reason="needs libtpu")
    for legal in list(cells(op, chip, ODD))[:2]:
        compile_cell(legal, chip)


def of(kind: type[Op], *inputs: tuple[tuple[int, ...], str], **attributes: Any) -> Func:
    """One op on whole arrays."""
    params = [ref(f"x{n}", shape, dtype=DTYPES[name]) for n, (shape, name) in enumerate(inputs)]
    outputs: list[Value] = []

    def body(b: Source) -> None:
        tiles = [b.load(p, *map(whole, p.ref.shape)) for p in params]
        result = b.op(kind, *tiles, **attributes)
        outputs.append(ref("out", result.tile.shape, "out", result.tile.dtype))
        b.store(outputs[0], result, *map(whole, result.tile.shape))

    made = func("one", (), (), body)
    return replace(made, params=(*params, *outputs))


SHAPED: dict[str, Func] = {
    "the elements of a vector at indices": of(Take, ((300,), "f32"), ((64,), "i32"), dim=0),
    "lanes at indices": of(Take, ((24, 512), "bf16"), ((64,), "i32"), dim=1),
    "one row at an index": of(Take, ((24, 512), "bf16"), ((), "i32"), dim=0),
    "a matrix times a vector": of(Dot, ((128, 256), "bf16"), ((256,), "bf16"), contract=((1,), (0,))),
    "int8 rows times one row": of(Dot, ((128, 256), "i8"), ((1, 256), "i8"), contract=((1,), (1,))),
    "a vector times a vector": of(Dot, ((256,), "f32"), ((256,), "f32"), contract=((0,), (0,))),
    "heads in the middle": of(
        Dot, ((32, 4, 128), "bf16"), ((32, 4, 128), "bf16"), contract=((2,), (2,)), batch=((1,), (1,))
    ),
    "sorted vector": of(Sort, ((130,), "f32"), dim=0),
    "greatest of a vector": of(TopK, ((130,), "bf16"), dim=0, k=8),
    "place in a vector": of(ArgReduce, ((130,), "f32"), extreme="max", dim=0),
    "product of two dims": of(Reduce, ((3, 5, 130), "f32"), monoid="prod", dims=(0, 2)),
    "sum of all": of(Reduce, ((3, 5, 130), "bf16"), monoid="sum", dims=(0, 1, 2)),
    "any of a vector": of(Reduce, ((130,), "bool"), monoid="or", dims=(0,)),
    "vector to three dims": of(Reshape, ((24,), "f32"), shape=(2, 3, 4)),
    "heads merged": of(Reshape, ((64, 8, 64), "bf16"), shape=(64, 512)),
    "odd reshape": of(Reshape, ((7, 33), "f32"), shape=(33, 7)),
    "flat": of(Reshape, ((16, 48), "i8"), shape=(768,)),
    "reversed vector": of(Reverse, ((100,), "f32"), dims=(0,)),
    "every other element": of(Slice, ((512,), "f32"), start=(1,), stop=(512,), stride=(2,)),
    "joined vectors": of(Concatenate, ((100,), "f16"), ((30,), "f16"), dim=0),
    "scan of a large tile": of(Scan, ((512, 512), "f32"), monoid="sum", dim=1),
    "part of a vector": of(DynamicSlice, ((256,), "f32"), ((), "i32"), sizes=(100,)),
    "transposed bools": of(Transpose, ((8, 128), "bool"), permutation=(1, 0)),
    "scalars": of(Elementwise, ((), "f32"), ((), "f32"), function="pow"),
    "narrow scalars": of(Elementwise, ((), "u8"), ((), "u8"), function="shift_left"),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * ("sorted" in n)) for n in SHAPED])
def test_tiles_of_any_rank(name: str) -> None:
    """They compile, and mean the same in interpret mode."""
    original = SHAPED[name]
    legal = legalize(original, "v5e")
    arrays = as_legal(arrays_of(original, 2, ordinary=True))
    for got, wanted in zip(jax.jit(lambda *a: run(legal, *a))(*arrays), interpret(legal, *arrays), strict=True):
        if kind_of(wanted.dtype) == "float":
            # Sums of up to 512 terms, in another order.
            least = 8 * float(np.abs(wanted.astype(F64)).max(initial=0))
            assert_near(np.asarray(got), wanted.astype(F64), least)
        else:
            assert_same(np.asarray(got), wanted)
    pytest.importorskip("libtpu", reason="needs libtpu")
    compile_cell(legal, "v5e")


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("op", OPS)
def test_every_cell_compiles(op: str, chip: str) -> None:
    pytest.importorskip("libtpu", reason="needs libtpu")
    for shape in SHAPES:
        for legal in cells(op, chip, shape):
            compile_cell(legal, chip)


def compile_cell(legal: Func, chip: str) -> None:
    shapes = [jax.ShapeDtypeStruct(p.ref.shape, p.ref.dtype) for p in legal.inputs]
    compiled(lambda *a: run(legal, *a, interpret=False), shapes, chip)


@pytest.mark.parametrize(("precision", "wanted"), [("ieee", "HIGHEST"), ("bf16x3", "HIGH")])
def test_products_of_float32_have_the_precision_of_the_dot(precision: str, wanted: str) -> None:
    """A CPU computes any precision exactly, so the operation itself has to name it."""
    b, tile = Source(), np.zeros((8, 8), np.float32)
    x = b.const(0, (8, 8), np.dtype(np.float32))
    dot = Dot(operands=(x, x), contract=((1,), (0,)), precision=precision)  # pyright: ignore[reportArgumentType]
    (found,) = (e for e in jax.make_jaxpr(function_of(dot))(tile, tile).eqns if e.primitive.name == "dot_general")
    assert found.params["precision"] == (jax.lax.Precision[wanted],) * 2


@pytest.mark.parametrize("place", [0, 1])
def test_products_with_several_dims_of_the_right_operand_run_on_cpus(place: int) -> None:
    """XLA's CPU backend lacks these products of bfloat16 as they stand, and Pallas interprets by it."""
    b, random = Source(), np.random.default_rng(0)
    shapes = (16, 8), ((16, 4, 5), (4, 16, 5))[place]
    x, w = (random.integers(-4, 5, shape).astype(DTYPES["bf16"]) for shape in shapes)
    operands = tuple(b.const(0, shape, DTYPES["bf16"]) for shape in shapes)
    dot = Dot(operands=operands, contract=((0,), (place,)))
    wanted = np.einsum(("km,kab->mab", "km,akb->mab")[place], *(a.astype(np.float32) for a in (x, w)))
    np.testing.assert_array_equal(jax.jit(function_of(dot, interpreted=True))(x, w), wanted)


def test_logistic_of_numbers_of_any_size() -> None:
    """Times the number, as silu has it, it stays 0 for the largest negative ones."""
    x = np.array([[-np.inf, -3e38, -1e30, -100, -87.5, -86.5, -1, 0, 1, 87.5, 3e38, np.inf, np.nan]], np.float32)
    made = of(Elementwise, (x.shape, "f32"), function="logistic")
    with np.errstate(all="ignore"):
        (wanted,) = interpret(made, x)
        (got,) = (np.asarray(result) for result in run(legalize(made, "v5e"), x))
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=2e-38)
        np.testing.assert_allclose((x * got)[0, 1:5], (x * wanted)[0, 1:5], atol=1e-35)


def test_products_of_float32_ask_for_their_precision() -> None:
    """A TPU multiplies bfloat16; the CPU that interprets these tests would multiply float32 whatever is asked."""

    def asked(dtype: str, precision: Any) -> Any:
        tiles = tuple(Value(TileType((8, 8), DTYPES[dtype])) for _ in range(2))
        op = Dot(operands=tiles, contract=((1,), (0,)), precision=precision, loc=Source().loc())
        arrays = [jax.ShapeDtypeStruct((8, 8), tile.tile.dtype) for tile in tiles]
        (product,) = jax.make_jaxpr(function_of(op))(*arrays).eqns
        return product.params["precision"]

    for precision, passes in {"ieee": "HIGHEST", "bf16x6": "HIGHEST", "bf16x3": "HIGH", "bf16": "DEFAULT"}.items():
        assert asked("f32", precision) == (getattr(jax.lax.Precision, passes),) * 2
        assert asked("bf16", precision) is None
