"""Flash attention with its gradient on both backends for CPUs, compared with `jax.nn.dot_product_attention`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax

from bench.llvm.peak import host
from bench.result import Result
from bench.timing import by_round, clock, take_turns
from tilekern.kernels.flash_attention import flash_attention

LENGTH, HEADS = 4096, 8
LIMITS: dict[tuple[int, str, bool], dict[str, float]] = {
    (64, "float32", True): {"cpu:llvm": 0.30, "cpu:xla": 0.60},
    (64, "float32", False): {},
    (64, "bfloat16", True): {},
    (128, "float32", True): {},
    (128, "bfloat16", True): {},
}


def measure() -> Iterator[Result]:
    """All results of this file."""
    targets = ["cpu:xla"] if host() is None else ["cpu:llvm", "cpu:xla"]
    for (width, dtype, causal), limits in LIMITS.items():
        yield from _compare(width, dtype, causal, {target: limits.get(target) for target in targets})


def _compare(width: int, dtype: str, causal: bool, limits: dict[str, float | None]) -> Iterator[Result]:
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, cotangent = (jax.random.normal(key, (1, LENGTH, HEADS, width), dtype) for key in keys)

    def call(attention: Callable[..., jax.Array]) -> Callable[[], Any]:
        run = jax.jit(lambda q, k, v, cotangent: jax.vjp(attention, q, k, v)[1](cotangent))
        return lambda: run(q, k, v, cotangent)

    attentions = {target: partial(flash_attention, causal=causal, target=target) for target in limits}
    theirs = partial(jax.nn.dot_product_attention, is_causal=causal)
    times = take_turns({name: clock(call(f)) for name, f in {**attentions, "theirs": theirs}.items()})
    baseline = statistics.median(times["theirs"]) * 1e3
    for target, limit in limits.items():
        name = f"attention and its gradient S={LENGTH} D={width} {dtype} {'causal' if causal else 'full'}, {target}"
        ours = statistics.median(times[target]) * 1e3
        yield Result(name, "ms", ours, limit, "ratio", baseline, by_round(times[target], times["theirs"]))
