"""Narrow floats by their bits, for all bit patterns and for numbers between two of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.ir.funcs import assert_same, edges, nearest
from tests.lower.triton.legalize.meaning import several
from tilekern.ir.compute import Constant
from tilekern.ir.core import Value
from tilekern.ir.interpret import interpret
from tilekern.ir.make import Make
from tilekern.ir.types import DTYPES, F32, F64, I32
from tilekern.lower.rewrite.narrow_floats import FORMATS, decoded, encoded, rounded

pytestmark = pytest.mark.sweep(1)  # all cases: none compiles a program

ORIGIN = Constant(array=np.zeros(()), shape=())
NAMES = ["f16", "f8e5m2", "f8e4m3fn"]


def applied(function: Callable[..., Value], x: np.ndarray, name: str) -> np.ndarray:
    """The results of a function of this module for a vector."""
    func, arrays = several(lambda b, v: [function(Make(b, ORIGIN), v, DTYPES[name])], x)
    with np.errstate(all="ignore"):
        (found,) = interpret(func, *arrays)
    return found[: len(x)]


def every(name: str) -> np.ndarray:
    """All numbers of a dtype, and all its NaN."""
    size = DTYPES[name].itemsize
    return np.arange(1 << 8 * size).astype(f"u{size}").view(DTYPES[name])


@pytest.mark.parametrize("name", NAMES)
def test_rounding(name: str) -> None:
    with np.errstate(all="ignore"):
        numbers = every(name).astype(F32)
        numbers = np.sort(numbers[np.isfinite(numbers)])
        middles = (numbers[1:] + numbers[:-1]) / 2
        near = [np.nextafter(middles, np.float32(s)) for s in (-np.inf, np.inf)]
        beyond = FORMATS[DTYPES[name]].largest
        x = np.concatenate([edges(F32), middles, *near, [beyond, np.nextafter(np.float32(beyond), np.float32(np.inf))]])
        x = x.astype(F32)
        wanted = nearest(x.astype(F64), DTYPES[name]).astype(F32)
    assert_same(applied(rounded, x, name), wanted)


@pytest.mark.parametrize("name", NAMES)
def test_bits(name: str) -> None:
    x = every(name)
    numbers = x[x == x]
    with np.errstate(all="ignore"):
        wide = numbers.astype(F32)
    assert_same(applied(encoded, wide, name), numbers.view(f"u{numbers.itemsize}").astype(I32))
    assert (applied(encoded, np.array([np.nan], F32), name) == FORMATS[DTYPES[name]].nan).all()


def test_numbers_of_bits() -> None:
    x = every("f16")
    with np.errstate(all="ignore"):
        wide = x.astype(F32)
    assert_same(applied(decoded, x.view(np.uint16).astype(I32), "f16"), wide)
