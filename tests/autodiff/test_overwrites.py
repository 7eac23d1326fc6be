"""The times of stores are written for those kernels alone whose stores may meet."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from jax import lax

import tilekern as tk
from tests.autodiff.kernels import CASES, Case
from tests.lang.checks import like_first, refused
from tests.lower.library import CASES as LIBRARY
from tests.lower.library import NAMES, family_of
from tilekern.autodiff.overwrites import Overwrites
from tilekern.errors import NotDifferentiableError


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_stores_that_may_meet(case: Case) -> None:
    func = case.kernel.trace(*case.arrays(dtype=np.float32), *case.rest).ir
    assert bool(Overwrites(func).times) == (case.name in ("overwritten", "last of loop"))


@pytest.mark.parametrize("name", NAMES)
def test_the_library_stores_each_element_once(name: str) -> None:
    assert not Overwrites(family_of(name, LIBRARY[name][0].small(), "float32").func()).times


def test_branches_exclude_each_other() -> None:
    @like_first
    def either(x, out):
        i = tk.parallel(x.shape[0], 4)

        def write(factor: int) -> None:
            out[i] = factor * x[i]

        lax.cond(i.index == 0, lambda: write(1), lambda: write(2))

    assert not Overwrites(either.trace(np.ones(8, np.float32)).ir).times


def test_more_stores_than_can_be_counted() -> None:
    @like_first
    def counted(x, out):
        def again(n: Any) -> None:
            tk.foreach(tk.serial(2**20), lambda m: write())

        def write() -> None:
            out[...] = 2 * x[...]

        tk.foreach(tk.serial(2**20), again)  # <-

    traced = counted.trace(np.ones(8, np.float32))
    with refused(
        NotDifferentiableError, "counted stores more often", expected="stores", got="stores to out,", fix="once"
    ):
        traced.gradient()
