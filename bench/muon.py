"""Products of a matrix with its transpose, and the Newton-Schulz steps of Muon, compared with `jnp`."""

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
from tilekern.kernels.matmul import symmetric_matmul
from tilekern.training import newton_schulz
from tilekern.training.muon import COEFFICIENTS

LIMIT = 1.0
DTYPES = ("float32", "bfloat16")
# Matrices of GPT-2 medium: of attention, and of the MLP.
SHAPES = ((1024, 1024), (1024, 4096))
_ROUNDS = 5


def measure() -> Iterator[Result]:
    """All results of this file."""
    target = "cpu:xla" if host() is None else "cpu:llvm"
    for shape in SHAPES:
        for dtype in DTYPES:
            x = jax.random.normal(jax.random.key(0), shape, dtype) / shape[1] ** 0.5
            yield _compare("symmetric_matmul", partial(symmetric_matmul, target=target), gram_matrix, x, target)
            ours = partial(newton_schulz, dtype=jnp.dtype(dtype), target=target)
            yield _compare("newton_schulz", ours, naive_newton_schulz, x, target)


def gram_matrix(x: jax.Array) -> jax.Array:
    """The product of a matrix with its transpose."""
    return x @ x.mT


def naive_newton_schulz(x: jax.Array) -> jax.Array:
    """Five steps as in Muon, in the dtype of x, of which the shorter side is the first."""
    a, b, c = COEFFICIENTS
    y = x.astype(jnp.float32)
    y = (y / jnp.maximum(jnp.sqrt(jnp.sum(y * y)), 1e-37)).astype(x.dtype)
    for _ in range(5):
        gram = y @ y.mT
        y = a * y + (b * gram + c * (gram @ gram)) @ y
    return y


def _compare(
    name: str, ours: Callable[..., jax.Array], theirs: Callable[..., jax.Array], x: jax.Array, target: str
) -> Result:
    runs: dict[str, Any] = {"ours": jax.jit(ours), "theirs": jax.jit(theirs)}
    times = take_turns({who: clock(partial(run, x)) for who, run in runs.items()}, rounds=_ROUNDS)
    ms = {who: statistics.median(seconds) * 1e3 for who, seconds in times.items()}
    shape = "×".join(map(str, x.shape))
    title = f"{name} {shape} {x.dtype}, {target}"
    return Result(title, "ms", ms["ours"], LIMIT, "ratio", ms["theirs"], by_round(times["ours"], times["theirs"]))
