"""Grouped products, plain and with scales, compared with `jax.lax.ragged_dot` and with one product of that size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from bench.result import Result
from bench.timing import medians
from tilekern.kernels.quantization import dequantize
from tilekern.kernels.ragged_dot import ragged_dot
from tilekern.kernels.ragged_dot.cases import CASES, ScaledCase

RATIO_LIMIT = 1.3
# On CPUs XLA's ragged_dot multiplies all rows by each matrix. One dense product is the measure of the necessary work.
DENSE_RATIO_LIMIT = 2.0
SCALED_RATIO_LIMIT = 1.0


def measure() -> Iterator[Result]:
    """All results of this file."""
    (case,) = (case for case in CASES if case.name == "square")
    lhs, rhs, sizes = case.arrays(jax.random.key(0), jnp.float32)
    ours, theirs, dense = (
        jax.jit(partial(ragged_dot, target="cpu:xla")),
        jax.jit(jax.lax.ragged_dot),
        jax.jit(jnp.matmul),
    )
    seconds = medians(
        {
            "ours": lambda: ours(lhs, rhs, sizes),
            "theirs": lambda: theirs(lhs, rhs, sizes),
            "dense": lambda: dense(lhs, rhs[0]),
        }
    )
    name = f"ragged_dot {case.rows}×{case.inner}×{case.columns}, {case.groups} groups, float32"
    milliseconds = {who: value * 1e3 for who, value in seconds.items()}
    yield Result(name, "ms", milliseconds["ours"], RATIO_LIMIT, "ratio", milliseconds["theirs"])
    yield Result(
        f"{name}, to one matmul", "ms", milliseconds["ours"], DENSE_RATIO_LIMIT, "ratio", milliseconds["dense"]
    )
    yield from _scaled()


def _scaled() -> Iterator[Result]:
    """Operands of 8 bits on "cpu:llvm", beside formulas of `jnp` that XLA compiles."""
    (square,) = (case for case in CASES if case.name == "square")
    case = replace(square, rows=1024)
    kinds = {
        "bfloat16 × int8 by columns": ScaledCase(case, "int8", (None, 1)),
        "int8 by rows × int8 by columns": ScaledCase(case, "int8", (None, 1), "int8"),
        "int8 × int8 by blocks of 128": ScaledCase(case, "int8", (128, 128), "int8", (1, 128)),
        "float8 × float8 by blocks of 128": ScaledCase(case, "float8_e4m3fn", (128, 128), "float8_e4m3fn", (1, 128)),
    }
    for kind, scaled in kinds.items():
        lhs, rhs, sizes, scales = scaled.arrays(jax.random.key(0))
        functions = {"ours": jax.jit(partial(ragged_dot, target="cpu:llvm")), "dequantised": jax.jit(dequantised)}
        if kind.startswith("int8 by rows"):
            functions["int32"] = jax.jit(of_int32)
        runs = {name: partial(function, lhs, rhs, sizes, **scales) for name, function in functions.items()}
        seconds = medians(runs)
        best = min(value for name, value in seconds.items() if name != "ours")
        name = f"ragged_dot {case.rows}×{case.inner}×{case.columns}, {case.groups} groups, {kind}"
        yield Result(name, "ms", seconds["ours"] * 1e3, SCALED_RATIO_LIMIT, "ratio", best * 1e3)


def dequantised(
    lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, *, rhs_scale: jax.Array, lhs_scale: jax.Array | None = None
) -> jax.Array:
    """The product of operands that are dequantised in memory."""
    rows = lhs if lhs_scale is None else dequantize(lhs, lhs_scale, jnp.bfloat16)
    return jax.lax.ragged_dot(rows, dequantize(rhs, rhs_scale, jnp.bfloat16), sizes)


def of_int32(
    lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, *, rhs_scale: jax.Array, lhs_scale: jax.Array
) -> jax.Array:
    """The product as sums of integers in int32, which the scales of rows and columns multiply afterwards."""
    sums = jax.lax.ragged_dot(lhs, rhs, sizes, preferred_element_type=jnp.int32)
    group = jnp.repeat(jnp.arange(rhs.shape[0]), sizes, total_repeat_length=lhs.shape[0])
    return (sums * lhs_scale * rhs_scale[group, 0]).astype(jnp.bfloat16)
