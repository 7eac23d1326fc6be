"""Cross entropy on the portable backend, compared with the naive loss under `jax.jit`: time and temporary memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp

from bench.result import Result
from bench.timing import medians
from tilekern.kernels.cross_entropy import cross_entropy
from tilekern.kernels.cross_entropy.cases import Case

CASE = Case("bench", tokens=4096, width=1024, vocabulary=32768)
TIME_LIMIT = 1.2
MEMORY_LIMIT = 1 / 20


def measure() -> Iterator[Result]:
    """All results of this file."""
    inputs = CASE.arrays(jax.random.key(0), jnp.float32)
    ours, theirs = jax.jit(partial(cross_entropy, target="cpu:xla")), jax.jit(naive)
    seconds = medians({"ours": lambda: ours(*inputs), "theirs": lambda: theirs(*inputs)}, rounds=3)
    name = f"cross_entropy {CASE.tokens}×{CASE.vocabulary}, D={CASE.width}, float32"
    yield Result(name, "ms", seconds["ours"] * 1e3, TIME_LIMIT, "ratio", seconds["theirs"] * 1e3)
    ours_mb, theirs_mb = (f.lower(*inputs).compile().memory_analysis().temp_size_in_bytes / 1e6 for f in (ours, theirs))
    yield Result(f"{name}, temporary memory", "MB", ours_mb, MEMORY_LIMIT, "ratio", theirs_mb)


def naive(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    """The loss as people write it. The kernel's reference does more: it also handles labels out of range."""
    logits = hidden @ weight
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked
