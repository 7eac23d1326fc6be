"""Grouped products on the portable backend, compared with `jax.lax.ragged_dot` and with one product of that size."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp

from bench.result import Result
from bench.timing import medians
from tilekern.kernels.ragged_dot import ragged_dot
from tilekern.kernels.ragged_dot.cases import CASES

RATIO_LIMIT = 1.3
# On CPUs XLA's ragged_dot multiplies all rows by each matrix. One dense product is the measure of the necessary work.
DENSE_RATIO_LIMIT = 2.0


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
