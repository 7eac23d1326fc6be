"""The legalisation of dtypes keeps the meaning, and leaves only what a target has, for the dtypes of each target."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ir.funcs import assert_same, edges
from tests.lower.triton.legalize.meaning import one
from tilekern.ir.compute import Convert, Reduce
from tilekern.ir.core import Func
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.interpret import interpret
from tilekern.ir.types import BF16, BOOL, DTYPES, F32, I32, kind_of
from tilekern.ir.verify import verify
from tilekern.lower.mosaic.legalize.casts import MOSAIC
from tilekern.lower.rewrite.capabilities import Capabilities
from tilekern.lower.rewrite.legalize_dtypes import legalize_dtypes
from tilekern.lower.target import BACKENDS

TARGETS = {name: backend.capabilities() for name, backend in BACKENDS.items() if backend.capabilities is not None}
# Mosaic has no dtypes of 64 bits, and its float16 is emulated before.
NAMES = {
    name: [n for n, d in DTYPES.items() if has is not MOSAIC or (d.itemsize <= 4 and n != "f16")]
    for name, has in TARGETS.items()
}


def legal(func: Func, has: Capabilities) -> Func:
    found = legalize_dtypes(func, has)
    verify(found)
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_casts_of_special_numbers(target: str) -> None:
    has = TARGETS[target]
    for source in NAMES[target]:
        x = edges(DTYPES[source], 40)
        for name in NAMES[target]:
            func, arrays = one(Convert, x, dtype=DTYPES[name])
            found = legal(func, has)
            with np.errstate(all="ignore"):
                assert_same(interpret(found, *arrays)[0], interpret(func, *arrays)[0])
            for op in found.walk():
                if isinstance(op, Convert):
                    assert_has(op, has)


def assert_has(op: Convert, has: Capabilities) -> None:
    """The target has the cast, or one of numbers that fit."""
    source, dtype = op.operands[0].tile.dtype, op.dtype
    to_integer = kind_of(source) == "float" and kind_of(dtype) in ("signed", "unsigned")
    fitting = to_integer and source.itemsize >= 4 and dtype.itemsize >= has.integer_bytes
    to_float8 = has.float8_casts and source == F32 and dtype.itemsize == 1 and kind_of(dtype) == "float"
    assert has.casts(source, dtype) or fitting or to_float8, f"{source} to {dtype}"


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


@pytest.mark.parametrize("monoid", ["max", "min", "and", "or", "xor"])
@pytest.mark.parametrize("target", TARGETS)
def test_bools_are_reduced_as_the_target_does(target: str, monoid: str) -> None:
    has = TARGETS[target]
    x = np.random.default_rng(1).random((8, 3, 5)) < 0.3
    func, arrays = one(Reduce, x, monoid=monoid, dims=(0, 2))
    found = legal(func, has)
    assert_same(interpret(found, *arrays)[0], interpret(func, *arrays)[0])
    reductions = [op for op in found.walk() if isinstance(op, Reduce)]
    assert len(reductions) == (1 if has.reduces_dims else 2)
    for op in reductions:
        assert op.operands[0].tile.dtype == (BOOL if has.reduces_bools else I32)
        assert op.monoid in ({"max", "min", "xor"} if has.ordered_bools else {"and", "or", "xor"})


def test_what_a_target_has_stays() -> None:
    x = np.ones((4, 4), BF16)
    func, _ = one(Elementwise, x, x, function="add")
    assert legalize_dtypes(func, TARGETS["triton"]) is legalize_dtypes(func, MOSAIC) is func
    assert legalize_dtypes(func, TARGETS["llvm"]) is not func
