"""Tokens drawn from logits, and from hidden @ weight, compared with the best formula in `jnp` for each setting."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.llvm.peak import host
from bench.result import Result
from bench.timing import by_round, clock, take_turns
from tilekern.kernels.sample import sample, sample_hidden
from tilekern.kernels.sample.cases import CASES, Case

LIMIT = 1.0
ROWS = 8  # sequences that are decoded at once
HIDDEN_LIMIT, HIDDEN_MEMORY_LIMIT = 1.3, 0.1
HIDDEN = Case("bench", 256, 32768, 0.6)  # rows [256, 1024] of hidden, logits of 32 MiB
WIDTH = 1024
_ROUNDS = 7


def measure() -> Iterator[Result]:
    """All results of this file."""
    target = "cpu:xla" if host() is None else "cpu:llvm"
    yield from _of_logits(target)
    yield from _of_hidden(target)


def _of_hidden(target: str) -> Iterator[Result]:
    """Time, and bytes of temporary arrays, beside the product and the formula, which has the logits in memory."""
    random = np.random.default_rng(0)
    hidden = jnp.asarray(random.standard_normal((HIDDEN.rows, WIDTH)), jnp.float32)
    weight = jnp.asarray(random.standard_normal((WIDTH, HIDDEN.words)) * 3 / WIDTH**0.5, jnp.float32)
    draw, key = formula(HIDDEN), jax.random.key_data(jax.random.key(0))

    def naive(hidden: jax.Array, weight: jax.Array, key: jax.Array) -> jax.Array:
        return draw(hidden @ weight, key)

    runs: dict[str, Any] = {
        "ours": jax.jit(partial(sample_hidden, target=target, temperature=HIDDEN.temperature)),
        "theirs": jax.jit(naive),
    }
    times = take_turns({who: clock(partial(run, hidden, weight, key)) for who, run in runs.items()}, 3)
    ms = {who: statistics.median(seconds) * 1e3 for who, seconds in times.items()}
    title = f"sample_hidden, {HIDDEN.rows} rows of {WIDTH} by {HIDDEN.words}, {target}"
    yield Result(title, "ms", ms["ours"], HIDDEN_LIMIT, "ratio", ms["theirs"], by_round(times["ours"], times["theirs"]))
    memory = [
        run.lower(hidden, weight, key).compile().memory_analysis().temp_size_in_bytes / 2**20 for run in runs.values()
    ]
    yield Result(f"{title}, memory", "MiB", memory[0], HIDDEN_MEMORY_LIMIT, "ratio", memory[1])


def _of_logits(target: str) -> Iterator[Result]:
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
