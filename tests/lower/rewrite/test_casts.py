"""Casts between all dtypes by casts of a target: they keep the meaning, and take only what the target has."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from tests.ir.funcs import assert_same, edges, evaluate
from tests.lower.rewrite.targets import NAMES, TARGETS
from tests.lower.triton.legalize.meaning import hardware, several
from tilekern.ir.compute import Convert
from tilekern.ir.interpret import interpret
from tilekern.ir.types import DTYPES, F32, DType, is_float8, kind_of
from tilekern.ir.verify import verify
from tilekern.lower.rewrite.legalize_dtypes import legalize_dtypes

FITTING = {("triton", "f32"), ("triton", "f64"), ("mosaic", "f32")}
"""Floats that a target casts to integers where these have the number, and nowhere else."""


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", TARGETS)
def test_casts_of_special_numbers(target: str) -> None:
    names = NAMES[target]
    for source in names:
        x = edges(DTYPES[source], 40)
        func, arrays = several(lambda b, x: [b.op(Convert, x, dtype=DTYPES[name]) for name in names], x)
        legal = legalize_dtypes(func, TARGETS[target])
        verify(legal)
        with np.errstate(all="ignore"):
            with nullcontext() if target == "llvm" else hardware():
                found = interpret(legal, *arrays)
            for name, got in zip(names, found, strict=True):
                assert_same(got[: len(x)], evaluate(Convert, x, dtype=DTYPES[name]))
        for op in legal.walk():
            if isinstance(op, Convert):
                assert_has(target, op.operands[0].tile.dtype, op.dtype)


def assert_has(target: str, source: DType, dtype: DType) -> None:
    """The target has the cast, or one of numbers that the dtype has."""
    if TARGETS[target].casts(source, dtype):
        return
    if is_float8(dtype):
        assert (target, source) == ("triton", F32)
    else:
        fits = any((target, DTYPES[name]) == (to, source) for to, name in FITTING)
        narrowest = 4 if target == "mosaic" else 1
        assert fits and kind_of(dtype) != "float" and dtype.itemsize >= narrowest, f"{source} to {dtype}"
