"""Linear attention of real models, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from tilekern.kernels.small_cases import shrunk


@dataclass(frozen=True)
class Case:
    """query, key[batch, tokens, groups, depth], value[batch, tokens, heads, width], log decays of each token."""

    name: str
    batch: int
    tokens: int
    heads: int
    groups: int
    depth: int
    width: int

    def arrays(self, key: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """(query, key, value, log decays): normal numbers in `dtype`, keys about 1 long; float32[batch, tokens, heads].

        Log decays are -0.1 on average, exponentially distributed.
        """
        for_query, for_key, for_value, for_decay = jax.random.split(key, 4)
        shape = (self.batch, self.tokens, self.groups, self.depth)
        query, keys = (jax.random.normal(k, shape, dtype) for k in (for_query, for_key))
        value = jax.random.normal(for_value, (self.batch, self.tokens, self.heads, self.width), dtype)
        decays = -0.1 * jax.random.exponential(for_decay, (self.batch, self.tokens, self.heads), jnp.float32)
        return query, keys / max(self.depth, 1) ** 0.5, value, decays

    def small(self) -> Case:
        """The same for fast tests: at most two heads of a group, sizes below 96 with their remainders modulo 32."""
        sizes = {name: shrunk(getattr(self, name)) for name in ("tokens", "depth", "width")}
        heads = min(2, self.heads // self.groups)
        return replace(self, name=f"{self.name}_small", batch=1, heads=heads, groups=1, **sizes)


CASES = (
    Case("square", 1, 4096, 16, 16, 128, 128),
    # Mamba-2: d_state is the depth, headdim the width, and all heads share one group.
    Case("mamba2_130m", 1, 4096, 24, 1, 128, 64),  # https://huggingface.co/state-spaces/mamba2-130m
    Case("mamba2_2p7b", 1, 1000, 80, 1, 128, 64),  # https://huggingface.co/state-spaces/mamba2-2.7b
)
