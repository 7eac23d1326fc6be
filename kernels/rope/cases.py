"""The rotary embeddings of real models, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from tilekern.kernels.small_cases import shrunk


@dataclass(frozen=True)
class Case:
    """x[batch, length, heads, width] at the positions offset, offset + 1, ...; theta is rope_theta of config.json."""

    name: str
    length: int
    heads: int
    width: int
    theta: float = 10000.0
    interleaved: bool = False
    offset: int = 0
    batch: int = 1

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of `rope`, and of its reference."""
        return {"theta": self.theta, "interleaved": self.interleaved}

    def arrays(self, key: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array | None]:
        """Random x, standard normal, and positions, None if they count from 0."""
        x = jax.random.normal(key, (self.batch, self.length, self.heads, self.width), dtype)
        return x, jnp.arange(self.length) + self.offset if self.offset else None

    def small(self) -> Case:
        """A smaller case for fast tests: lengths below 96 with their remainders modulo 32, four heads, two batches."""
        return replace(
            self,
            name=f"{self.name}_small",
            length=shrunk(self.length),
            heads=min(self.heads, 4),
            width=min(self.width, 80),
            batch=min(self.batch, 2),
        )


CASES = (
    Case("llama3_8b_queries", 4096, 32, 128, theta=5e5),  # https://huggingface.co/meta-llama/Meta-Llama-3-8B
    Case("llama3_8b_keys", 4096, 8, 128, theta=5e5),
    Case("llama3_8b_decode", 1, 32, 128, theta=5e5, offset=8191, batch=8),
    Case("qwen2_7b", 1000, 28, 128, theta=1e6),  # https://huggingface.co/Qwen/Qwen2-7B
    Case("gemma_2b", 4096, 8, 256),  # https://huggingface.co/google/gemma-2b
    Case("deepseek_v3", 4096, 128, 64, interleaved=True),  # https://huggingface.co/deepseek-ai/DeepSeek-V3
    # https://huggingface.co/stabilityai/stablelm-3b-4e1t: 80 wide heads, of which a quarter is rotated
    Case("stablelm_3b", 2048, 32, 20),
)
