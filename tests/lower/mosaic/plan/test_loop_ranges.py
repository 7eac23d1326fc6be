"""Loops over ranges that start and end inside of tiles, in every way in which the planner would run them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lower.mosaic.every_plan import every_plan, kind_of_plan
from tests.lower.mosaic.pallas_kernels import needs_libtpu
from tilekern.ir.interpret import interpret

X = np.arange(1, 37 * 130 + 1, dtype=np.float32).reshape(37, 130)


@tk.kernel(out_type=lambda x, n: (jax.ShapeDtypeStruct((3, x.shape[1]), x.dtype), tk.Sum(x)))
def split(x: Any, n: Any, out: Any, copy: Any) -> None:
    """Sums of the rows of three ranges, and the rows themselves."""
    p = tk.parallel(3)

    def step(t: Any, total: Any) -> Any:
        copy.at[t].add(x[t])
        return total + x[t].sum(axis=0)

    out[p] = tk.fold(tk.serial(x.shape[0], 8, start=n[p], stop=n[p + 1]), step, jnp.zeros(x.shape[1]))


@tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct((5, x.shape[1]), x.dtype))
def parts(x: Any, out: Any) -> None:
    """The same of five equal ranges, the last one of which is short, by the index of the grid."""
    p = tk.parallel(5)
    axis = tk.serial(x.shape[0], 8, start=p * 9, stop=(p + 1) * 9)
    out[p] = tk.fold(axis, lambda t, total: total + x[t].sum(axis=0), jnp.zeros(x.shape[1]))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("ends", [(0, 13, 13, 37), (3, 5, 20, 40), (37, 38, 39, 40), (30, 20, 9, 11), (16, 24, 24, 32)])
def test_every_form_has_the_rows_of_its_ranges(ends: tuple[int, ...]) -> None:
    forms = agree(split.trace(X, np.int32(ends)), X, np.int32(ends))
    assert {"resident", "grid_loop"} <= forms


def test_tables_of_steps_have_the_rows_of_their_ranges() -> None:
    assert "step_table" in agree(parts.trace(X), X)


def agree(traced: Any, *arrays: Any) -> set[str]:
    """Assert that all forms of a kernel give what it means; which ones there are."""
    wanted = interpret(traced.ir, *arrays)
    forms: set[str] = set()
    for lowering in every_plan(traced.ir):
        forms.add(kind_of_plan(lowering.planned))
        for got, right in zip(lowering.interpret(*arrays), wanted, strict=True):
            np.testing.assert_array_equal(got, right, kind_of_plan(lowering.planned))
    return forms


@tk.kernel(out_type=lambda x, n: tk.Zeros(x))
def copy_range(x: Any, n: Any, out: Any) -> None:
    i = tk.parallel(x.shape[0], 32)

    def copy(t: Any) -> None:
        out[i, t] = x[i, t]

    tk.foreach(tk.serial(x.shape[1], 128, start=n[0], stop=n[1]), copy)


@needs_libtpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_loads_and_stores_of_ranges_compile(dtype: str) -> None:
    types = jax.ShapeDtypeStruct((100, 1000), dtype), jax.ShapeDtypeStruct((2,), np.int32)
    copy_range.trace(*types).lower("tpu:v5e").compile()
