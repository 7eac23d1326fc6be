"""Cross entropy, forward and with its gradient, compared with the naive loss under `jax.jit`: time and memory."""

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
from bench.timing import Contestant, by_round, clock, medians, take_turns
from tilekern.kernels.cross_entropy import cross_entropy
from tilekern.kernels.cross_entropy.cases import Case

CASE = Case("bench", tokens=4096, width=1024, vocabulary=32768)
TIME_LIMIT = 1.2
MEMORY_LIMIT, GRADIENT_MEMORY_LIMIT = 1 / 20, 0.06
# Of the gradient on "cpu:llvm". It has four products, where XLA has three and the logits in memory. In bfloat16 XLA may
# use matrix units of the CPU, which the backend does not.
GRADIENT_TIME_LIMITS = {"float32": 1.3, "bfloat16": None}


def measure() -> Iterator[Result]:
    """All results of this file."""
    yield from _forward()
    for dtype, limit in GRADIENT_TIME_LIMITS.items():
        yield from _gradient(dtype, limit)


def _forward() -> Iterator[Result]:
    inputs = CASE.arrays(jax.random.key(0), jnp.float32)
    ours, theirs = jax.jit(partial(cross_entropy, target="cpu:xla")), jax.jit(naive)
    runs = {"ours": ours, "theirs": theirs}
    seconds = medians({name: cast(Contestant, partial(run, *inputs)) for name, run in runs.items()}, rounds=3)
    name = f"cross_entropy {_sizes(CASE)}, float32"
    yield Result(name, "ms", seconds["ours"] * 1e3, TIME_LIMIT, "ratio", seconds["theirs"] * 1e3)
    ours_mb, theirs_mb = (_megabytes(f, *inputs) for f in (ours, theirs))
    yield Result(f"{name}, temporary memory", "MB", ours_mb, MEMORY_LIMIT, "ratio", theirs_mb)


def _gradient(dtype: str, time_limit: float | None) -> Iterator[Result]:
    """Half as many tokens for times, for a call takes seconds."""
    case = replace(CASE, tokens=CASE.tokens // 2)
    targets = ["cpu:xla"] if host() is None else ["cpu:llvm", "cpu:xla"]
    functions = {target: partial(cross_entropy, target=target) for target in targets} | {"theirs": naive}
    runs = {name: jax.jit(partial(_with_gradient, function)) for name, function in functions.items()}
    arrays = *case.arrays(jax.random.key(0), dtype), jax.random.normal(jax.random.key(1), (case.tokens,))
    times = take_turns({name: clock(cast(Contestant, partial(run, *arrays))) for name, run in runs.items()}, rounds=3)
    wide = jax.eval_shape(partial(CASE.arrays, dtype=dtype), jax.random.key(0))
    cotangent = jax.ShapeDtypeStruct((CASE.tokens,), jnp.float32)
    memory = {name: _megabytes(run, *wide, cotangent) for name, run in runs.items()}
    baseline = statistics.median(times["theirs"]) * 1e3
    for target in targets:
        name = f"cross_entropy and its gradient {{}}, {dtype}, {target}"
        ours, judged = statistics.median(times[target]) * 1e3, by_round(times[target], times["theirs"])
        limit = time_limit if target == "cpu:llvm" else None
        yield Result(name.format(_sizes(case)), "ms", ours, limit, "ratio", baseline, judged)
        limit, name = GRADIENT_MEMORY_LIMIT, name.format(f"{_sizes(CASE)}, temporary memory")
        yield Result(name, "MB", memory[target], limit, "ratio", memory["theirs"])


def _with_gradient(
    loss: Callable[..., jax.Array], hidden: jax.Array, weight: jax.Array, labels: jax.Array, cotangent: jax.Array
) -> Any:
    def of_floats(hidden: jax.Array, weight: jax.Array) -> jax.Array:
        return loss(hidden, weight, labels)

    losses, pull = cast(Any, jax.vjp(of_floats, hidden, weight))
    return losses, pull(cotangent.astype(losses.dtype))


def naive(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    """The loss as people write it. The kernel's reference does more: it also handles labels out of range."""
    logits = hidden @ weight
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def _sizes(case: Case) -> str:
    return f"{case.tokens}×{case.vocabulary}, D={case.width}"


def _megabytes(run: Any, *arrays: Any) -> float:
    """Megabytes of a program's temporary memory, by XLA's account."""
    return run.lower(*arrays).compile().memory_analysis().temp_size_in_bytes / 1e6
