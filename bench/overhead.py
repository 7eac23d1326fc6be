"""The costs of a call on the portable backend besides its work: dispatch, and the compilation before the first call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp

import tilekern as tk
from bench.result import Result
from bench.timing import dispatch_medians
from tilekern.kernels.flash_attention import flash_attention

DISPATCH_LIMIT_US = 10.0
COMPILE_LIMIT_S = 0.5


@tk.kernel(out_type=lambda x, y: jax.ShapeDtypeStruct(x.shape, x.dtype))
def add(x, y, out):
    """One program that adds two small arrays, so that nearly all of a call is dispatch."""
    out[:] = x[:] + y[:]


def measure() -> Iterator[Result]:
    """All results of this file."""
    yield from _dispatch()
    yield _compilation()


def _dispatch() -> Iterator[Result]:
    x, y = jnp.arange(8.0), jnp.ones(8)
    plain, eager = jax.jit(lambda x, y: x + y), partial(add, target="cpu:xla")
    jitted = jax.jit(eager)
    seconds = dispatch_medians(
        {"plain": lambda: plain(x, y), "eager": lambda: eager(x, y), "jitted": lambda: jitted(x, y)}
    )
    for how in ("eager", "jitted"):
        name = f"dispatch, {how}, over a plain jitted function"
        yield Result(name, "µs", seconds[how] * 1e6, DISPATCH_LIMIT_US, "difference", seconds["plain"] * 1e6)


def _compilation() -> Result:
    """Seconds to trace, lower and compile. Each round has another length, so that no cache has the program."""
    attention = partial(flash_attention, causal=True, target="cpu:xla")
    seconds: list[float] = []
    for length in (4096, 4608, 5120):
        aval = jax.ShapeDtypeStruct((1, length, 8, 64), jnp.float32)
        start = time.perf_counter()
        jax.jit(attention).lower(aval, aval, aval).compile()
        seconds.append(time.perf_counter() - start)
    return Result("trace, lower, compile flash attention", "s", statistics.median(seconds), COMPILE_LIMIT_S, "value")
