"""Softmax and RMS norm of 4096² on the portable backend, compared with the same formulas under `jax.jit`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax

from bench.result import Result
from bench.timing import medians
from tilekern.kernels.rms_norm import reference as naive_rms_norm
from tilekern.kernels.rms_norm import rms_norm
from tilekern.kernels.softmax import softmax

SIZE = 4096
RATIO_LIMIT = 1.5


def measure() -> Iterator[Result]:
    """All results of this file."""
    x = jax.random.normal(jax.random.key(0), (SIZE, SIZE))
    weight = jax.random.normal(jax.random.key(1), (SIZE,))
    yield _time("softmax", jax.jit(partial(softmax, target="cpu:xla")), jax.jit(jax.nn.softmax), x)
    yield _time("rms_norm", jax.jit(partial(rms_norm, target="cpu:xla")), jax.jit(naive_rms_norm), x, weight)


def _time(name: str, ours: jax.stages.Wrapped, theirs: jax.stages.Wrapped, *arrays: jax.Array) -> Result:
    seconds = medians({"ours": lambda: ours(*arrays), "theirs": lambda: theirs(*arrays)}, rounds=15)
    return Result(f"{name} {SIZE}² float32", "ms", seconds["ours"] * 1e3, RATIO_LIMIT, "ratio", seconds["theirs"] * 1e3)
