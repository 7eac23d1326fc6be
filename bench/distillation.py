"""Distillation, forward and with its gradient, compared with `jnp` on both logits: time and memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp

from bench.llvm.peak import host
from bench.result import Result
from bench.timing import Contestant, by_round, clock, take_turns
from tilekern.kernels.distillation import distillation
from tilekern.kernels.distillation.cases import Case

CASE = Case("bench", tokens=1024, width=512, of_teacher=1024, vocabulary=32768)
# The divergence of Jensen and Shannon misses it in float32: it computes both logits twice, and in its gradient again.
TIME_LIMIT = 1.0
MEMORY_LIMIT, GRADIENT_MEMORY_LIMIT = 1 / 20, 0.06
DIVERGENCES = ("forward_kl", "jensen_shannon")
DTYPES = ("float32", "bfloat16")


def measure() -> Iterator[Result]:
    """All results of this file."""
    for divergence in DIVERGENCES:
        for dtype in DTYPES:
            yield from _compare(replace(CASE, divergence=divergence), dtype)


def _compare(case: Case, dtype: str) -> Iterator[Result]:
    target = "cpu:xla" if host() is None else "cpu:llvm"
    arrays = case.arrays(jax.random.key(0), dtype)
    functions = {
        "ours": partial(distillation, divergence=case.divergence, target=target),
        "theirs": partial(naive, case.divergence),
    }
    for way, wrap, memory_limit in (
        ("", _forward, MEMORY_LIMIT),
        (" and its gradient", _with_gradient, GRADIENT_MEMORY_LIMIT),
    ):
        runs = {name: cast(Any, jax.jit(partial(wrap, function))) for name, function in functions.items()}
        times = take_turns({n: clock(cast(Contestant, partial(run, *arrays))) for n, run in runs.items()}, rounds=3)
        name = f"distillation, {case.divergence}{way}, {case.tokens}×{case.vocabulary}, D={case.width} of "
        name += f"{case.of_teacher}, {dtype}, {target}"
        ours, theirs = (statistics.median(times[who]) * 1e3 for who in ("ours", "theirs"))
        yield Result(name, "ms", ours, TIME_LIMIT, "ratio", theirs, by_round(times["ours"], times["theirs"]))
        memory = {who: run.lower(*arrays).compile().memory_analysis().temp_size_in_bytes for who, run in runs.items()}
        ours, theirs = memory["ours"] / 1e6, memory["theirs"] / 1e6
        yield Result(f"{name}, temporary memory", "MB", ours, memory_limit, "ratio", theirs)


def _forward(function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    return function(*arrays)


def _with_gradient(
    function: Callable[..., jax.Array], hidden: jax.Array, weight: jax.Array, *teacher: jax.Array
) -> Any:
    def of_student(hidden: jax.Array, weight: jax.Array) -> jax.Array:
        return function(hidden, weight, *teacher)

    loss, pull = cast(Any, jax.vjp(of_student, hidden, weight))
    return loss, pull(jnp.ones_like(loss))


def naive(
    divergence: str, hidden: jax.Array, weight: jax.Array, teacher: jax.Array, teacher_weight: jax.Array
) -> jax.Array:
    """The divergence as people write it, with products in the dtype of the inputs."""
    log_q = jax.nn.log_softmax(jnp.matmul(hidden, weight, preferred_element_type=jnp.float32))
    log_p = jax.nn.log_softmax(jnp.matmul(teacher, teacher_weight, preferred_element_type=jnp.float32))
    q, p = jnp.exp(log_q), jnp.exp(log_p)
    if divergence == "forward_kl":
        return (p * (log_p - log_q)).sum(axis=-1)
    log_m = jnp.logaddexp(log_p, log_q) - jnp.log(2.0)
    return 0.5 * (p * (log_p - log_m) + q * (log_q - log_m)).sum(axis=-1)
