"""Additions to cotangents: which of them touch each element once, and which touch all elements."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tilekern.ir.analysis.sites import is_covering, is_injective, writes

X = jnp.zeros((8, 8))


def same(x: Any, *rest: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def diagonal(x, out):
    i = tk.parallel(8)
    out[i, i] = x[i, i]


def rows(x, out):
    i = tk.parallel(8, 3)
    out[i] = x[i]


def every_other(x, out):
    i = tk.parallel(4)
    out[2 * i, :] = x[i, :]


def tiles(x, out):
    i, j = tk.parallel(8, 4), tk.parallel(8, 4)
    out[i, j] = x[i, j]


def of_a_loop(x, out):
    i = tk.parallel(8, 4)
    tk.foreach(tk.serial(8, 2), lambda k: out.__setitem__((i, k), x[i, k]))


def of_a_part(x, out):
    i = tk.parallel(8, 4)
    tk.foreach(tk.serial(8, 2, stop=i.index), lambda k: out.__setitem__((i, k), x[i, k]))


def shared(x, out):
    i, j = tk.parallel(8, 4), tk.parallel(3)
    out.at[i].add(x[i] + j)


def overlapping(x, out):
    i = tk.parallel(3)
    out.at[tk.ds(2 * i, 4)].add(x[tk.ds(2 * i, 4)])


@pytest.mark.parametrize(
    ("body", "injective", "covering"),
    [
        (diagonal, True, False),
        (rows, True, True),
        (every_other, True, False),
        (tiles, True, True),
        (of_a_loop, True, True),
        (of_a_part, True, False),
        (shared, False, True),
        (overlapping, False, True),
    ],
)
def test_what_is_proved(body: Any, injective: bool, covering: bool) -> None:
    result = tk.Sum if body in (shared, overlapping) else tk.Zeros
    func = tk.kernel(out_type=lambda x: result(same(x)))(body).trace(X).ir
    (site,) = writes(func)
    assert is_injective(site, site.axes) == injective
    assert is_covering(site, func) == covering


def test_the_gradient_of_a_diagonal() -> None:
    @tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct((8,), x.dtype))
    def read(x, out):
        i = tk.parallel(8)
        out[i] = x[i, i]

    np.testing.assert_array_equal(jax.grad(lambda x: read(x).sum())(X), np.eye(8))
