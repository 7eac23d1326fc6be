"""Flash attention on the portable backend, compared with `jax.nn`: time, and temporary memory as the length grows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jax.stages import Wrapped

from bench.result import Result
from bench.timing import medians
from tilekern.kernels.flash_attention import flash_attention

LENGTH, HEADS, HEAD_DIM = 4096, 8, 64
RATIO_LIMITS = {("float32", False): 0.45, ("float32", True): 0.30, ("bfloat16", False): 0.50, ("bfloat16", True): 0.25}
MEMORY_LIMIT_MB = 8.0


def measure() -> Iterator[Result]:
    """All results of this file."""
    for (dtype, causal), limit in RATIO_LIMITS.items():
        yield _time(dtype, causal, limit)
    yield from _memory()


def _contestants(causal: bool) -> tuple[Wrapped, Wrapped]:
    ours = jax.jit(partial(flash_attention, causal=causal, target="cpu:xla"))
    theirs = jax.jit(partial(jax.nn.dot_product_attention, is_causal=causal))
    return ours, theirs


def _time(dtype: str, causal: bool, limit: float) -> Result:
    shape = (1, LENGTH, HEADS, HEAD_DIM)
    q, k, v = (jax.random.normal(key, shape, dtype) for key in jax.random.split(jax.random.key(0), 3))
    ours, theirs = _contestants(causal)
    seconds = medians({"ours": lambda: ours(q, k, v), "theirs": lambda: theirs(q, k, v)})
    name = f"flash attention S={LENGTH} {dtype} {'causal' if causal else 'full'}"
    return Result(name, "ms", seconds["ours"] * 1e3, limit, "ratio", seconds["theirs"] * 1e3)


def _memory() -> Iterator[Result]:
    ours, theirs = _contestants(causal=False)
    short, long = _temporary_mb(ours, 8192), _temporary_mb(ours, 32768)
    yield Result("temporary memory S=8192 float32", "MB", short, MEMORY_LIMIT_MB, "value", _temporary_mb(theirs, 8192))
    yield Result("temporary memory S=32768, less that of 8192", "MB", long, 0.0, "difference", short)


def _temporary_mb(attention: Wrapped, length: int) -> float:
    """Megabytes of temporary memory, from XLA's analysis of the compiled program. Nothing runs."""
    aval = jax.ShapeDtypeStruct((1, length, HEADS, HEAD_DIM), jnp.float32)
    compiled = attention.lower(aval, aval, aval).compile()
    return compiled.memory_analysis().temp_size_in_bytes / 1e6
