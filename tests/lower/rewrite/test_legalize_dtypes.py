"""The legalisation of dtypes keeps the meaning, and leaves only what a target has, for the dtypes of each target."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ir.funcs import Source, assert_same, edges
from tests.lower.rewrite.targets import NAMES, TARGETS
from tests.lower.triton.legalize.meaning import one, several
from tilekern.ir.compute import Reduce
from tilekern.ir.core import Func, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.interpret import interpret
from tilekern.ir.ordering import ArgReduce, Scan
from tilekern.ir.types import BF16, BOOL, DTYPES, I32
from tilekern.ir.verify import verify
from tilekern.lower.mosaic.legalize.casts import MOSAIC
from tilekern.lower.rewrite.capabilities import Capabilities
from tilekern.lower.rewrite.legalize_dtypes import legalize_dtypes

pytestmark = pytest.mark.sweep(1)  # all cases: none compiles a program


def legal(func: Func, has: Capabilities) -> Func:
    found = legalize_dtypes(func, has)
    verify(found)
    return found


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", TARGETS)
def test_functions_are_computed_in_dtypes_of_the_target(target: str) -> None:
    has = TARGETS[target]
    for name in NAMES[target]:
        if DTYPES[name] == BOOL:
            continue
        x = edges(DTYPES[name], 24)
        for function in ("max", "min", "le"):
            func, arrays = one(Elementwise, x, np.roll(x, 5), function=function)
            found = legal(func, has)
            with np.errstate(all="ignore"):
                assert_same(interpret(found, *arrays)[0], interpret(func, *arrays)[0], zeros=False)
            (op,) = (op for op in found.walk() if isinstance(op, Elementwise) and op.function == function)
            assert op.operands[0].tile.dtype == has.computed_in(function, DTYPES[name])


def reduced(b: Source, x: Value) -> list[Value]:
    return [
        b.op(Reduce, x, monoid="max", dims=(0, 1)),
        b.op(Scan, x, monoid="min", dim=1),
        b.op(ArgReduce, x, extreme="max", dim=2),
    ]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", TARGETS)
def test_reductions_and_scans_are_in_dtypes_of_the_target(target: str) -> None:
    has = TARGETS[target]
    for name in NAMES[target]:
        if DTYPES[name] == BOOL:
            continue
        func, arrays = several(reduced, np.resize(edges(DTYPES[name], 24), (4, 2, 9)))
        found = legal(func, has)
        with np.errstate(all="ignore"):
            for got, expected in zip(interpret(found, *arrays), interpret(func, *arrays), strict=True):
                assert_same(got, expected, zeros=False)
        for op in found.walk():
            if isinstance(op, (Reduce, Scan, ArgReduce)):
                assert op.operands[0].tile.dtype == has.reduced_in(DTYPES[name])


@pytest.mark.sweep(1)
@pytest.mark.parametrize("monoid", ["max", "min", "and", "or", "xor"])
@pytest.mark.parametrize("target", TARGETS)
def test_bools_are_reduced_as_the_target_does(target: str, monoid: str) -> None:
    has = TARGETS[target]
    x = np.random.default_rng(1).random((8, 3, 5)) < 0.3
    func, arrays = one(Reduce, x, monoid=monoid, dims=(0, 2))
    found = legal(func, has)
    assert_same(interpret(found, *arrays)[0], interpret(func, *arrays)[0])
    reductions = [op for op in found.walk() if isinstance(op, Reduce)]
    assert len(reductions) == (1 if target == "mosaic" else 2)
    for op in reductions:
        assert op.operands[0].tile.dtype == (BOOL if target == "llvm" else I32)
        assert op.monoid in ({"max", "min", "xor"} if target == "mosaic" else {"and", "or", "xor"})


def test_what_a_target_has_stays() -> None:
    x = np.ones((4, 4), BF16)
    func, _ = one(Elementwise, x, x, function="add")
    assert legalize_dtypes(func, TARGETS["triton"]) is legalize_dtypes(func, MOSAIC) is func
    assert legalize_dtypes(func, TARGETS["llvm"]) is not func
