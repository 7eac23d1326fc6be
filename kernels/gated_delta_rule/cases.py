"""Gated delta rules of real models, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from tilekern.kernels.small_cases import shrunk


@dataclass(frozen=True)
class Case:
    """query, key[batch, tokens, groups, depth], value[batch, tokens, heads, width]; beta and log decays of tokens.

    With `by_channel`, log decays of tokens and channels of the key.
    """

    name: str
    batch: int
    tokens: int
    heads: int
    groups: int
    depth: int
    width: int
    by_channel: bool = False

    def arrays(self, key: jax.Array, dtype: Any) -> tuple[jax.Array, ...]:
        """(query, key, value, beta, log decays): random, keys of length 1; beta from 0 to 1 and log decays in float32.

        Log decays are -0.1 on average, exponentially distributed.
        """
        for_query, for_key, for_value, for_beta, for_decay = jax.random.split(key, 5)
        shape = (self.batch, self.tokens, self.groups, self.depth)
        query = jax.random.normal(for_query, shape, dtype) / max(self.depth, 1) ** 0.5
        keys = jax.random.normal(for_key, shape)
        keys = keys / jnp.maximum(jnp.sqrt((keys * keys).sum(axis=-1, keepdims=True)), 1e-6)
        value = jax.random.normal(for_value, (self.batch, self.tokens, self.heads, self.width), dtype)
        of_tokens = (self.batch, self.tokens, self.heads)
        beta = jax.random.uniform(for_beta, of_tokens, jnp.float32)
        of_decays = (*of_tokens, self.depth) if self.by_channel else of_tokens
        decays = -0.1 * jax.random.exponential(for_decay, of_decays, jnp.float32)
        return query.astype(dtype), keys.astype(dtype), value, beta, decays

    def small(self) -> Case:
        """The same for fast tests: at most two heads of a group, sizes below 96 with their remainders modulo 32."""
        sizes = {name: shrunk(getattr(self, name)) for name in ("tokens", "depth", "width")}
        heads = min(2, self.heads // self.groups)
        return replace(self, name=f"{self.name}_small", batch=1, heads=heads, groups=1, **sizes)


CASES = (
    # https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct: 16 heads of keys, 32 of values.
    Case("qwen3_next", 1, 4096, 32, 16, 128, 128),
    Case("gated_deltanet_1p3b", 1, 1000, 6, 6, 256, 512),  # https://github.com/NVlabs/GatedDeltaNet
    # https://huggingface.co/moonshotai/Kimi-Linear-48B-A3B-Instruct: Kimi delta attention.
    Case("kimi_linear", 1, 4096, 32, 32, 128, 128, by_channel=True),
)
