"""Tokens drawn from logits, compared with the best formula in `jnp` for each setting."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from bench.llvm.peak import host
from bench.result import Result
from bench.timing import by_round, clock, take_turns
from tilekern.kernels.sample import sample
from tilekern.kernels.sample.cases import CASES, Case

LIMIT = 1.0
ROWS = 8  # sequences that are decoded at once
_ROUNDS = 7


def measure() -> Iterator[Result]:
    """All results of this file."""
    target = "cpu:xla" if host() is None else "cpu:llvm"
    of_temperature = Case("llama3_8b_temperature", ROWS, 128256, 0.6)
    for case in (of_temperature, *(replace(case, rows=ROWS) for case in CASES)):
        logits, key = case.arrays(jax.random.key(0), jnp.float32)
        runs: dict[str, Any] = {
            "ours": jax.jit(partial(sample, target=target, **case.keywords)),
            "theirs": jax.jit(formula(case)),
        }
        times = take_turns({who: clock(partial(run, logits, key)) for who, run in runs.items()}, _ROUNDS)
        ms = {who: statistics.median(seconds) * 1e3 for who, seconds in times.items()}
        title = f"sample {case.name}, {ROWS} rows of {case.words}, {target}"
        yield Result(title, "ms", ms["ours"], LIMIT, "ratio", ms["theirs"], by_round(times["ours"], times["theirs"]))


def formula(case: Case) -> Callable[..., Any]:
    """Draws from the same probabilities in `jnp`: of the largest logits where there is a top_k, else of sorted ones."""

    def draw(logits: jax.Array, key: jax.Array) -> jax.Array:
        if case.temperature == 0:
            return jnp.argmax(logits, axis=-1)
        x = logits / case.temperature
        if case.min_p is not None:
            x = jnp.where(x >= x.max(axis=-1, keepdims=True) + jnp.log(case.min_p), x, -jnp.inf)
        if case.top_k is None and case.top_p is None:
            return jax.random.categorical(jax.random.wrap_key_data(key), x)
        x, words = jax.lax.top_k(x, case.top_k or x.shape[-1])
        if case.top_p is not None:
            p = jax.nn.softmax(x, axis=-1)
            x = jnp.where(jnp.cumsum(p, axis=-1) - p < case.top_p, x, -jnp.inf)
        place = jax.random.categorical(jax.random.wrap_key_data(key), x)
        return jnp.take_along_axis(words, place[:, None], axis=-1)[:, 0]

    return draw
