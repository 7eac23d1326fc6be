"""Random kernels, and two that users wrote, compiled by libtpu: the vector memory that they take against their plans.

The estimate (`vmem_estimate.py`) is within a tenth for kernels of the library. For others it is coarser. Where it is
too small, the compiler refuses a kernel that there is room for; where it is too large, we do. Of 200 random kernels,
one in ten is planned more than 15 % too small. `_FEW` are some of the others, which must not become worse. All 200
compile under the limit of their plan.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import tilekern as tk
from tests.lower.mosaic.plan.random_tiles import program

_SLACK = 256 << 10  # bytes that are no matter
_ALL = range(200)
_FEW = (2, 7, 9, 11, 13, 20, 40, 50, 68, 96, 98)


def _taken(lowered: Any) -> tuple[int, int]:
    """The bytes that were planned and that the compiler takes; it compiles within the limit that was asked for."""
    pytest.importorskip("libtpu", reason="needs libtpu")
    found = lowered.compile().resources
    return found.planned_bytes, found.vmem_bytes


@pytest.mark.parametrize("seed", _FEW)
def test_plans_of_some_random_kernels_stay_large_enough(seed: int) -> None:
    planned, taken = _taken(program(seed).lowered())
    assert planned >= 0.85 * taken - _SLACK


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["tpu:v5e", "tpu:v6e"])
def test_plans_of_random_kernels_are_seldom_too_small(chip: str) -> None:
    figures = [_taken(program(seed).lowered(chip)) for seed in (_ALL if chip == "tpu:v5e" else _ALL[:60])]
    low = [taken for planned, taken in figures if planned < 0.85 * taken]
    refused = [taken for planned, taken in figures if planned > 16 << 20 >= taken]
    assert len(low) <= 0.15 * len(figures)
    assert len(refused) <= 0.02 * len(figures)
    assert 0.95 <= median(planned / taken for planned, taken in figures) <= 1.1


def _like(x: Any, *rest: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@tk.kernel(out_type=lambda re, im, c, s: jax.ShapeDtypeStruct((2, *re.shape), re.dtype))
def _fft(re: Any, im: Any, c: Any, s: Any, out: Any, *, block: tk.Block = 512) -> None:
    """Lines of complex numbers by steps of radix 2, each a slice and a concatenation; `c` and `s` turn them."""
    j = tk.parallel(re.shape[1], block)
    x, y, n = re[:, j], im[:, j], re.shape[0]
    for step in range(n.bit_length() - 1):
        (a, b), (d, e) = lax.split(x, (n // 2, n // 2)), lax.split(y, (n // 2, n // 2))
        cos, sin = c[step, :][:, None], s[step, :][:, None]
        p, q = a - b, d - e
        p, q = p * cos - q * sin, p * sin + q * cos
        x = jnp.stack([a + b, p], axis=1).reshape(x.shape)
        y = jnp.stack([d + e, q], axis=1).reshape(y.shape)
    out[0, :, j], out[1, :, j] = x, y


@tk.kernel(out_type=lambda x, w: jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype))
def _fft_by_dots(x: Any, w: Any, out: Any, *, block: tk.Block = 512) -> None:
    """Lines of real and imaginary parts side by side, by a product with the matrix of the transform."""
    i = tk.parallel(x.shape[0], block)
    turned = tk.dot(x[i], w[...])
    size = lax.rsqrt(jnp.sum(turned * turned, axis=1, keepdims=True))
    out[i] = tk.dot(turned * size, w[...]).astype(out.dtype)


@tk.kernel(out_type=_like)
def _inverse(x: Any, out: Any) -> None:
    """Matrices, by Gauss-Jordan elimination."""
    n = x.shape[1]
    m = tk.parallel(x.shape[0], 1)
    rows, columns = (lax.broadcasted_iota(jnp.int32, (n, n), d) for d in (0, 1))

    def eliminate(k: Any, a: Any) -> Any:
        row = jnp.sum(jnp.where(rows == k, a, 0), axis=0, keepdims=True)
        column = jnp.sum(jnp.where(columns == k, a, 0), axis=1, keepdims=True)
        pivot = 1 / jnp.sum(jnp.where(columns[:1] == k, row, 0), axis=1, keepdims=True)
        row = jnp.where(columns[:1] == k, pivot, row * pivot)
        rest = jnp.where(columns == k, 0.0, a) - jnp.where(rows == k, 0.0, column) * row
        return jnp.where(rows == k, jnp.broadcast_to(row, a.shape), rest)

    out[m] = lax.fori_loop(0, n, eliminate, x[m].reshape(n, n)).reshape(1, n, n)


def _types(*shapes: tuple[int, ...]) -> list[Any]:
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


@pytest.mark.parametrize(
    ("kernel", "shapes"),
    [
        (_fft, ((64, 1024), (64, 1024), (6, 32), (6, 32))),
        (_fft_by_dots, ((1024, 512), (512, 512))),
        (_inverse, ((2, 256, 256),)),
        (_inverse, ((2, 512, 512),)),
    ],
)
def test_kernels_of_users_take_no_more_than_planned(kernel: Any, shapes: Any) -> None:
    planned, taken = _taken(kernel.trace(*_types(*shapes)).lower("tpu:v5e"))
    assert planned >= 0.85 * taken
