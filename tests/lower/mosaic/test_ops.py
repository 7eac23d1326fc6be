"""The functions of legal ops: what they mean, in Pallas' interpret mode; that Mosaic compiles them, for every chip."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
import pytest

from tests.ir.funcs import assert_near, assert_same
from tests.lower.mosaic.aot import CHIPS, compiled
from tests.lower.mosaic.cells import DTYPE_NAMES, ODD, OPS, SHAPES, SMALL, arrays_of, as_legal, cell
from tests.lower.mosaic.one_program import run
from tilekern.errors import TargetError, VerifyError
from tilekern.ir.core import Func
from tilekern.ir.interpret import interpret
from tilekern.ir.types import DTYPES, F64, kind_of
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


@pytest.mark.parametrize("op", [op if op in QUICK else pytest.param(op, marks=pytest.mark.slow) for op in OPS])
def test_what_ops_mean(op: str) -> None:
    for func in cells(op, "v5e"):
        arrays = as_legal(arrays_of(func, 1, ordinary=True))
        with np.errstate(all="ignore"):
            expected = interpret(func, *arrays)
        for got, wanted in zip(jax.jit(lambda *a, f=func: run(f, *a))(*arrays), expected, strict=True):
            check(op, np.asarray(got), wanted)


def check(op: str, got: np.ndarray, wanted: np.ndarray) -> None:
    if kind_of(wanted.dtype) != "float":
        assert_same(got, wanted)
        return
    finite = np.abs(wanted[np.isfinite(wanted)].astype(F64))
    assert_near(got, wanted.astype(F64), least=8 * float(finite.max(initial=1)) if op in CHAINS else 0)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("op", QUICK)
def test_ops_compile(op: str, chip: str) -> None:
    pytest.importorskip("libtpu", reason="needs libtpu")
    for func in list(cells(op, chip, ODD))[:2]:
        compile_cell(func, chip)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("op", OPS)
def test_every_cell_compiles(op: str, chip: str) -> None:
    pytest.importorskip("libtpu", reason="needs libtpu")
    for shape in SHAPES:
        for func in cells(op, chip, shape):
            compile_cell(func, chip)


def compile_cell(func: Func, chip: str) -> None:
    shapes = [jax.ShapeDtypeStruct(p.ref.shape, p.ref.dtype) for p in func.inputs]
    compiled(lambda *a: run(func, *a, interpret=False), shapes, chip)
