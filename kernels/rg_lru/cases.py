"""Gated linear recurrences of real models, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from tilekern.kernels.small_cases import shrunk


@dataclass(frozen=True)
class Case:
    """x and both gates [batch, tokens, channels], and a parameter for each channel."""

    name: str
    tokens: int
    channels: int
    batch: int = 1
    scale_first: bool = True

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of `rg_lru`, and of its reference."""
        return {"scale_first": self.scale_first}

    def arrays(self, key: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Random x and gates, standard normal; decays from 0.9 to 0.999 at full gates, as models begin."""
        shape = self.batch, self.tokens, self.channels
        *keys, last = jax.random.split(key, 4)
        x, of_input, of_recurrence = (jax.random.normal(k, shape, dtype) for k in keys)
        decays = jnp.sqrt(jax.random.uniform(last, (self.channels,), jnp.float32, 0.9**2, 0.999**2))
        return x, of_input, of_recurrence, jnp.log(jnp.expm1(-jnp.log(decays) / 8))

    def small(self) -> Case:
        """The same for fast tests: at most two sequences, sizes below 96 with their remainders modulo 32."""
        sizes = {name: shrunk(getattr(self, name)) for name in ("tokens", "channels")}
        return replace(self, name=f"{self.name}_small", batch=min(2, self.batch), **sizes)


CASES = (
    # https://huggingface.co/google/recurrentgemma-2b and -9b: lru_width
    Case("recurrentgemma_2b", 2048, 2560),
    Case("recurrentgemma_9b", 1000, 4096, scale_first=False),
    Case("recurrentgemma_2b_decode", 1, 2560, batch=8),
)
