"""All steps together: what is legal means the same."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import seeds
from tests.ir.funcs import FILE, assert_near, assert_same, matmul, softmax
from tests.lower.mosaic.cells import DTYPE_NAMES, OPS, arrays_of, cell
from tests.lower.mosaic.compiled_functions import CHIPS
from tests.lower.mosaic.legalize.legality import assert_legal, assert_stays, legalized
from tests.lower.triton.legalize.meaning import counting, one
from tests.lower.triton.legalize.test_expand_order import few
from tests.lower.triton.legalize.test_movement import MOVES
from tests.lower.triton.legalize.test_refuse import copy
from tilekern.errors import TargetError, VerifyError
from tilekern.ir.compute import Dot, Monoid, Reduce
from tilekern.ir.dynamic import Take
from tilekern.ir.elementwise import TABLE
from tilekern.ir.interpret import interpret
from tilekern.ir.ordering import ArgReduce, Cumulative, LinearScan, Scan, Sort, TopK
from tilekern.ir.shape import Concatenate, Pad, Slice
from tilekern.ir.types import BOOL, DTYPES, F32, F64, I32, DType, kind_of
from tilekern.lower.mosaic.legalize import legalize
from tilekern.passes import pipeline
from tilekern.passes.split_loops import split_loops
from tilekern.testing.programs.batches import check

_CHUNK = 100
_SEEDS = [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 10))]
NARROW = [DTYPES[n] for n in DTYPE_NAMES]
# Formulas of several steps, each of which rounds: see `functions`. All others round once.
APPROXIMATE = (
    *("sin", "cos", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh"),
    *("cbrt", "expm1", "erfc", "lgamma"),
    *("scan logsumexp", "reduce prod", "reduce sum", "scan sum", "scan prod", "linear_scan"),
)
SHAPES = st.lists(st.sampled_from([1, 2, 3, 5, 8, 12]), min_size=1, max_size=3).map(tuple)


@pytest.mark.parametrize("chunk", _SEEDS)
def test_random_programs(chunk: int) -> None:
    check(
        seeds.of_chunk(chunk, _CHUNK), lambda ps: [legalized(pipeline.run(p.func), p.arrays) for p in ps], dtypes=NARROW
    )


# --- every cell of the table ----------------------------------------------------------------------------------------


@pytest.mark.sweep(8)
@pytest.mark.parametrize(("op", "chip"), [*((op, "v5e") for op in OPS), ("dot", "7x")])
def test_cells(op: str, chip: str) -> None:
    """Special numbers of every dtype; but where sums overflow depends on their order, so these are of ordinary ones."""
    for name in DTYPE_NAMES:
        try:
            func = cell(op, DTYPES[name])
            legalize(func, chip)
        except (VerifyError, TargetError) as error:
            assert isinstance(error, VerifyError) or "no f64" in str(error) or "64" in str(error)
            continue
        for seed in range(4):
            arrays = arrays_of(
                func, seed, ordinary=op.startswith(("scan", "reduce", "dot", "linear_scan")) and op not in ("scan max",)
            )
            with redirect_stdout(StringIO()), np.errstate(all="ignore"):
                (*_, got), (*_, wanted) = legalized(func, arrays, chip), interpret(func, *arrays)
            if op in APPROXIMATE and kind_of(wanted.dtype) == "float":
                assert_approximates(op, got, wanted, arrays)
            elif op != "bitcast" or kind_of(DTYPES[name]) != "float":
                assert_same(got, wanted, zeros=False)


def assert_approximates(op: str, got: np.ndarray, wanted: np.ndarray, arrays: list[np.ndarray]) -> None:
    """Near the exact result: of float32 within the rounding of a few steps, of narrower dtypes of one."""
    if op not in TABLE:
        assert_near(
            got, wanted.astype(F64), least=float(np.abs(wanted[np.isfinite(wanted)].astype(F64)).max(initial=0))
        )
        return
    with np.errstate(all="ignore"):
        exact = TABLE[op].meaning(*(x.astype(F64) for x in arrays))
    near = got.dtype != F32 and op != "lgamma"
    if near:
        assert_near(got, exact)
        return
    special = ~np.isfinite(exact.astype(got.dtype))
    assert_same(got[special], exact.astype(got.dtype)[special], zeros=False)
    # lgamma sums terms of sizes up to |x log x|; the others are off by no more than 4 units of the last place.
    size = np.abs(exact) if op != "lgamma" else np.maximum(np.abs(exact), 1 + np.abs(arrays[0].astype(F64)))
    with np.errstate(all="ignore"):
        error = np.abs(got.astype(F64) - exact) / (4 * float(np.finfo(F32).eps) * size + 2e-38)
    worst = np.where(special, 0, error)
    if got.dtype != F32:
        assert_near(got, exact, least=float(size[~special].max(initial=0)))
    else:
        assert (worst <= 4 if op == "lgamma" else worst <= 1).all(), f"{op}({arrays[0][worst > 1]}): {worst.max()}"


# --- families of ops, on tiles of any rank --------------------------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize("move", MOVES)
@given(data=st.data())
def test_moves(move: str, data: st.DataObject) -> None:
    assert_stays(*data.draw(MOVES[move]()))


@pytest.mark.parametrize("name", DTYPE_NAMES)
def test_every_dtype_moves(name: str) -> None:
    x = counting((3, 5), DTYPES[name])
    for func, arrays in (
        one(Slice, x, start=(1, 0), stop=(3, 5), stride=(1, 2)),
        one(Pad, x, x[0, 0], low=(1, -1), high=(0, 2), interior=(1, 0)),
        one(Concatenate, x, x[:, :0], x, dim=1),
    ):
        assert_stays(func, arrays)


def small(dtype: DType, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Few different numbers whose sums and products are exact."""
    low = 0 if kind_of(dtype) in ("unsigned", "bool") else -2
    return np.random.default_rng(seed).integers(low, 2, shape, endpoint=True).astype(dtype)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("monoid", ["sum", "prod", "max", "min", "and", "or", "xor"])
@given(data=st.data())
def test_reductions(monoid: Monoid, data: st.DataObject) -> None:
    def accepts(dtype: DType) -> bool:
        if monoid in ("and", "or", "xor"):
            return kind_of(dtype) != "float"
        return dtype != BOOL or monoid in ("max", "min")

    dtype = data.draw(st.sampled_from([d for d in NARROW if accepts(d)]))
    shape = data.draw(SHAPES)
    dims = data.draw(st.sets(st.sampled_from(range(len(shape)))))
    assert_stays(*one(Reduce, small(dtype, shape, len(shape)), monoid=monoid, dims=tuple(dims)))


def test_a_reduction_of_nothing_is_the_identity() -> None:
    for dtype in (F32, I32, BOOL):
        assert_stays(*one(Reduce, np.zeros((3, 0), dtype), monoid="max", dims=(1,)))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("monoid", ["sum", "prod", "max", "min"])
@given(data=st.data())
def test_scans(monoid: Cumulative, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([d for d in NARROW if d != BOOL]))
    shape = data.draw(SHAPES)
    dim, reverse = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.booleans())
    assert_stays(*one(Scan, small(dtype, shape, dim), monoid=monoid, dim=dim, reverse=reverse))


@given(data=st.data())
def test_linear_scans(data: st.DataObject) -> None:
    """Small integers have no rounding errors."""
    shape = data.draw(SHAPES)
    dim, reverse = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.booleans())
    factors, terms = np.random.default_rng(data.draw(st.integers(0, 99))).integers(-1, 2, (2, *shape)).astype(F32)
    assert_stays(*one(LinearScan, factors, terms, dim=dim, reverse=reverse))


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_special_numbers_spread_by_a_scan_as_by_sums(special: float) -> None:
    x = np.array([[1, 2, special, 3, -np.inf, 4, 5]], np.float32)
    for monoid in ("sum", "prod", "max", "min", "logsumexp"):
        func, arrays = one(Scan, x, monoid=monoid, dim=1)
        for got, wanted in zip(legalized(func, arrays), interpret(func, *arrays), strict=True):
            assert_near(got, wanted.astype(F64))


@given(data=st.data())
def test_orders(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    dim = data.draw(st.integers(0, len(shape) - 1))
    dtypes = data.draw(st.lists(st.sampled_from(NARROW), min_size=1, max_size=3))
    arrays = [data.draw(few(shape, d)) for d in dtypes]
    keys, pick = data.draw(st.integers(1, len(arrays))), data.draw(st.integers(0, len(arrays) - 1))
    assert_stays(*one(Sort, *arrays, dim=dim, num_keys=keys, pick=pick))
    assert_stays(*one(TopK, arrays[0], dim=dim, k=data.draw(st.integers(0, shape[dim]))))
    assert_stays(*one(ArgReduce, arrays[0], dim=dim, extreme=data.draw(st.sampled_from(["max", "min"]))))


@pytest.mark.parametrize("k", [8, 16, 17, 40])
@pytest.mark.parametrize("name", ["i32", "f32"])
def test_the_greatest_of_long_lines(name: str, k: int) -> None:
    """Among few different elements, the least ones of the dtype too, which count like those already found."""
    dtype = DTYPES[name]
    least = np.iinfo(dtype).min if dtype == I32 else -np.inf
    x = np.random.default_rng(k).choice(np.array([least, least, least, 0, 1]).astype(dtype), (3, 40))
    assert_stays(*one(TopK, x, dim=1, k=k))


def test_few_greatest_take_few_ops() -> None:
    """Not those of a sort of the line, 55 steps for 1024 lanes, which take XLA a long time to compile."""
    func, _ = one(TopK, counting((8, 1024), F32), dim=1, k=8)
    assert sum(1 for _ in legalize(func, "v5e").walk()) < 20 * 8


@given(st.integers(1, 300), st.sampled_from([(3, 128), (2, 3, 200), (3, 40)]), st.integers(0, 2))
def test_a_tile_of_indices_takes_from_a_line(size: int, shape: tuple[int, ...], dim: int) -> None:
    """Indices in bounds and out of them; rows of whole registers stay where they are."""
    line = counting(tuple(size if d == dim else 1 for d in range(3)), F32)
    indices = np.random.default_rng(size).integers(-9, size + 9, shape).astype(np.int32)
    func, arrays = one(Take, line, indices, dim=dim)
    assert_stays(func, arrays)
    rows = {op.result.tile.shape[0] for op in legalize(func, "v5e").walk() if isinstance(op, Take)}
    assert rows == {indices.size // shape[-1] if shape[-1] >= 128 else 2}


@given(data=st.data())
def test_contractions(data: st.DataObject) -> None:
    labels = data.draw(st.sampled_from(["k", "mk", "kn", "mkn", "mkjn", "bmkn", "bkn", "abmkn", "mn"]))
    sizes = {label: data.draw(st.sampled_from([1, 2, 3, 5])) for label in labels}
    orders = [data.draw(st.permutations([s for s in sizes if s not in other])) for other in "nm"]
    dtype = data.draw(st.sampled_from(NARROW))
    x, y = (small(dtype, tuple(sizes[s] for s in order), n) for n, order in enumerate(orders))
    contract, batch = (
        tuple(tuple(order.index(s) for s in group if s in sizes) for order in orders) for group in ("kj", "ab")
    )
    for chip in ("v5e", "7x"):
        assert_stays(*one(Dot, x, y, contract=contract, batch=batch), chip)


@pytest.mark.parametrize("name", ["i8", "u8", "i16", "u16", "i32", "u32"])
@pytest.mark.parametrize("end", ["min", "max"])
def test_dots_of_integers_wrap_around(name: str, end: str) -> None:
    """Also where one float32 sum of digits would not be exact."""
    x = np.full((3, 300), getattr(np.iinfo(DTYPES[name]), end), DTYPES[name])
    x[1] = np.random.default_rng(0).integers(0, 100, 300)
    assert_stays(*one(Dot, x, x.T.copy(), contract=((1,), (0,))))


# --- what costs nothing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chip", CHIPS)
def test_common_ops_stay_as_they_are(chip: str) -> None:
    """A softmax, and products: splitting their loops adds ops, the TPU's own rewrites add none."""
    for func in (softmax(), matmul(dtype=DTYPES["bf16"]), matmul(dtype=F32)):
        clean = pipeline.run(split_loops(pipeline.run(func)))
        legal = legalize(clean, chip)
        assert_legal(legal)
        assert [op.name for op in legal.walk()] == [op.name for op in clean.walk()]


def test_legal_funcs_are_left_alone() -> None:
    legal = legalize(pipeline.run(softmax()), "v5e")
    assert [str(op.result.type) for op in legalize(legal, "v5e").walk() if op.results] == [
        str(op.result.type) for op in legal.walk() if op.results
    ]


def test_refusals_are_at_the_line_and_say_a_way_out() -> None:
    for name in ("f64", "i64", "u64"):
        with pytest.raises(TargetError, match="TPUs have no numbers of 64 bits") as caught:
            legalize(copy(DTYPES[name]), "v5e")
        error = caught.value
        assert (error.loc.file, error.loc.line) == (FILE, 1)
        assert 'target="cpu:xla"' in str(error) and "astype" in str(error)
