"""Steps of AdamW in place, compared with the formula in `jnp`, whose state is donated too."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from bench.llvm.peak import host
from bench.result import Result
from bench.timing import by_round, clock, take_turns
from tilekern.training import adamw_in_place

LIMIT = 1.0
SHAPE = (4096, 4096)
RATE, DECAY = 1e-3, 0.1
_ROUNDS = 7
# bfloat16 weights beside float32 moments; random bits of the peer are JAX's.
CASES = (("float32", False), ("bfloat16", False), ("bfloat16", True))

State = tuple[Any, Any, Any]


def measure() -> Iterator[Result]:
    """All results of this file."""
    target = "cpu:xla" if host() is None else "cpu:llvm"
    for dtype, stochastic in CASES:
        times = take_turns(
            {
                "ours": clock(_ours(dtype, stochastic, target)),
                "theirs": clock(_theirs(dtype, stochastic)),
            },
            rounds=_ROUNDS,
        )
        ms = {who: statistics.median(seconds) * 1e3 for who, seconds in times.items()}
        name = f"adamw 4096² {dtype}{', stochastic rounding' if stochastic else ''}, {target}"
        yield Result(name, "ms", ms["ours"], LIMIT, "ratio", ms["theirs"], by_round(times["ours"], times["theirs"]))


def _arrays(dtype: str) -> tuple[jax.Array, jax.Array]:
    """A weight and its gradient, standard normal, of shape `SHAPE`."""
    weight, gradient = (jax.random.normal(k, SHAPE, dtype) for k in jax.random.split(jax.random.key(0)))
    return weight, gradient


def _ours(dtype: str, stochastic: bool, target: str) -> Callable[[], Any]:
    optimizer = adamw_in_place(RATE, weight_decay=DECAY, stochastic=stochastic, target=target)
    weight, gradient = _arrays(dtype)
    step, held = jax.jit(optimizer.step, donate_argnums=(0, 1)), [weight, optimizer.init(weight)]

    def call() -> Any:
        held[:] = step(*held, gradient)
        return held

    return call


def _theirs(dtype: str, stochastic: bool) -> Callable[[], Any]:
    weight, gradient = _arrays(dtype)
    run = jax.jit(partial(formula, stochastic=stochastic), donate_argnums=(0, 1))
    held = [weight, (jnp.int32(0), *(jnp.zeros(SHAPE) for _ in range(2)))]

    def call() -> Any:
        held[:] = run(*held, gradient)
        return held

    return call


def formula(weight: jax.Array, state: State, gradient: jax.Array, *, stochastic: bool) -> tuple[jax.Array, State]:
    """A step in `jnp`, with the moments in float32; stochastic rounding is to bfloat16, by bits of JAX's generator."""
    count, m, v = state
    g, w = gradient.astype(jnp.float32), weight.astype(jnp.float32)
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    first, second = m / (1 - 0.9 ** (count + 1)), v / (1 - 0.999 ** (count + 1))
    w = w - RATE * (first / (jnp.sqrt(second) + 1e-8) + DECAY * w)
    if stochastic:
        bits = jax.random.bits(jax.random.fold_in(jax.random.key(0), count), w.shape, "uint16")
        raised = jax.lax.bitcast_convert_type(w, jnp.uint32) + bits
        return _upper_half(raised), (count + 1, m, v)
    return w.astype(weight.dtype), (count + 1, m, v)


def _upper_half(bits: jax.Array) -> jax.Array:
    """The upper 16 bits of float32 numbers, as bfloat16."""
    return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
