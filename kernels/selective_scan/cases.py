"""Selective scans of real models, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from tilekern.kernels.small_cases import shrunk


@dataclass(frozen=True)
class Case:
    """x, dt and z [batch, tokens, channels], b and c [batch, tokens, states]; a, d and a bias of channels."""

    name: str
    tokens: int
    channels: int
    states: int = 16
    batch: int = 1

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of `selective_scan`, and of its reference."""
        return {"dt_softplus": True}

    def arrays(self, key: jax.Array, dtype: Any) -> tuple[jax.Array, ...]:
        """(x, dt, a, b, c, d, z, dt_bias) of `selective_scan`, as models begin.

        x, dt, z, b and c are standard normal, in `dtype`. In float32 a is -1, -2, …, -N for each channel, d is 1, and
        dt_bias is the inverse softplus of steps from 0.001 to 0.1.
        """
        *keys, last = jax.random.split(key, 6)
        shape = self.batch, self.tokens, self.channels
        x, dt, z = (jax.random.normal(k, shape, dtype) for k in keys[:3])
        b, c = (jax.random.normal(k, (*shape[:2], self.states), dtype) for k in keys[3:])
        a = -jnp.broadcast_to(jnp.arange(1.0, self.states + 1, dtype=jnp.float32), (self.channels, self.states))
        steps = jnp.exp(jax.random.uniform(last, (self.channels,), jnp.float32, jnp.log(0.001), jnp.log(0.1)))
        return x, dt, a, b, c, jnp.ones(self.channels), z, jnp.log(jnp.expm1(steps))

    def small(self) -> Case:
        """A Case for fast tests: tokens and channels below 96 with their remainders modulo 32, batch at most 2.

        The states stay. The name gets the ending "_small".
        """
        sizes = {name: shrunk(getattr(self, name)) for name in ("tokens", "channels")}
        return replace(self, name=f"{self.name}_small", batch=min(2, self.batch), **sizes)


CASES = (
    Case(
        "mamba_130m", 2048, 1536
    ),  # https://huggingface.co/state-spaces/mamba-130m: d_model 768, twice as many channels
    Case("mamba_2p8b", 1000, 5120),  # https://huggingface.co/state-spaces/mamba-2.8b
    # https://huggingface.co/tiiuae/falcon-mamba-7b and https://huggingface.co/ai21labs/Jamba-v0.1: hidden_size 4096
    Case("falcon_mamba_7b", 4096, 8192),
    Case("jamba_decode", 1, 8192, batch=8),
)
