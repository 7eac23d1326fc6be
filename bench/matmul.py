"""Matmul on the portable backend, compared with `jnp.matmul`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp

from bench.result import Result
from bench.timing import medians
from tilekern.kernels.matmul import matmul

SIZE = 2048
RATIO_LIMIT = 1.3


def measure() -> Iterator[Result]:
    """All results of this file."""
    x, w = (jax.random.normal(key, (SIZE, SIZE)) for key in jax.random.split(jax.random.key(0)))
    ours, theirs = jax.jit(partial(matmul, target="cpu:xla")), jax.jit(jnp.matmul)
    seconds = medians({"ours": lambda: ours(x, w), "theirs": lambda: theirs(x, w)})
    yield Result(f"matmul {SIZE}³ float32", "ms", seconds["ours"] * 1e3, RATIO_LIMIT, "ratio", seconds["theirs"] * 1e3)
