"""Matrix products, plain, with an epilogue and of a matrix with its transpose, beside XLA."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from bench.tpu_static.cases.case import Case
from bench.tpu_static.cases.measured import Measured, types, with_gradient
from tilekern.kernels.matmul import fused_matmul, matmul, symmetric_matmul
from tilekern.kernels.matmul.cases import CASES as SHAPES

(_UP,) = (case for case in SHAPES if case.name == "llama3_8b_up")


def _square(n: int) -> Measured:
    x = jax.ShapeDtypeStruct((n, n), jnp.bfloat16)
    return Measured(f"matmul {n}", matmul, lambda: (x, x), {"xla": jnp.matmul}, 2 * n**3)


def _gated(rows: int, inner: int, columns: int, name: str) -> tuple[Measured, Measured]:
    """silu(x @ w) * up: the product of the gate, with the other product as an operand."""

    def make() -> tuple[jax.Array, ...]:
        shapes = (rows, inner), (inner, columns), (rows, columns)
        return tuple(jnp.zeros(shape, jnp.bfloat16) for shape in shapes)

    case = Measured(
        f"fused_matmul {name}",
        partial(fused_matmul, epilogue=_gate),
        types(make),
        {"xla": _gated_by_xla},
        2 * rows * inner * columns,
    )
    return with_gradient(case, (0, 1, 2))


def _gate(product: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(product) * up


def _gated_by_xla(x: jax.Array, w: jax.Array, up: jax.Array) -> jax.Array:
    product = jnp.matmul(x, w, preferred_element_type=jnp.float32)
    return _gate(product, up.astype(jnp.float32)).astype(x.dtype)


def _gram(rows: int, columns: int, name: str) -> Measured:
    """x xᵀ, of which half is computed at least: a step of Muon."""
    x = jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16)
    flops = rows * (rows + 1) * columns
    return Measured(f"symmetric_matmul {name}", symmetric_matmul, lambda: (x,), {"xla": _gram_by_xla}, flops)


def _gram_by_xla(x: jax.Array) -> jax.Array:
    return x @ x.mT


CASES: tuple[Case, ...] = (
    _square(4096),
    *_gated(_UP.rows, _UP.inner, _UP.columns, _UP.name),
    _gram(_UP.inner, _UP.columns, _UP.name),
)
SMALL: tuple[Case, ...] = (_square(2048),)
