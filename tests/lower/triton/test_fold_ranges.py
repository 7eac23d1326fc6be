"""Loops over ranges that start and end inside of tiles, in Triton's interpreter."""

from __future__ import annotations

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.ir.funcs import assert_same
from tests.lower.triton.running import assert_kernel, program_of
from tilekern.ir.interpret import interpret
from tilekern.lower.triton.interpret import interpret as run

pytest.importorskip("triton", reason="needs triton")

X = np.arange(1, 11, dtype=np.float32)


@tk.kernel(out_type=lambda x, n: (jax.ShapeDtypeStruct((2,), x.dtype), tk.Zeros(x), tk.Sum(x)))
def ranges(x: Any, n: Any, out: Any, copy: Any, added: Any) -> None:
    """Stores, atomic updates and sums of the elements of a range, in tiles of four."""

    def step(t: Any, carry: Any) -> Any:
        copy[t] = x[t]
        added.at[t].add(x[t])
        return carry + jnp.stack([x.load(t, fill=1.0).sum(), jnp.float32(1)])

    out[...] = tk.fold(tk.serial(x.shape[0], 4, start=n[0], stop=n[1]), step, jnp.zeros(2))


def test_every_range_of_ten_elements() -> None:
    """The first and the last tile of a range are masked; an empty range has no tile."""
    func = ranges.trace(X, np.zeros(2, np.int32)).ir
    program = program_of(func)
    for low, high in product(range(-1, 12), range(-1, 12)):
        arrays = X, np.array([low, high], np.int32)
        for got, wanted in zip(run(program, arrays), interpret(func, *arrays), strict=True):
            assert_same(got, wanted, zeros=False)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("start", "stop"), [(3, 9), (5, 6), (10, 10), (7, 3), (4, 10)])
def test_static_ranges(start: int, stop: int, reverse: bool) -> None:
    @tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct((), x.dtype))
    def total(x: Any, out: Any) -> None:
        axis = tk.serial(x.shape[0], 4, start=start, stop=stop, reverse=reverse)
        out[...] = tk.fold(axis, lambda t, c: (c * 3 + x[t].sum()) % 1000, 1.0)

    assert_kernel(total, X)
