"""Grouped products of real models, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from tilekern.kernels.matmul.cases import shrunk


@dataclass(frozen=True)
class Case:
    """lhs[rows, inner], rhs[groups, inner, columns]: rows are tokens, one for each expert that a token is sent to."""

    name: str
    rows: int
    inner: int
    columns: int
    groups: int

    def arrays(self, key: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Random lhs and rhs; group sizes as of a random router, which add up to the rows."""
        for_lhs, for_rhs, for_router = jax.random.split(key, 3)
        lhs = jax.random.normal(for_lhs, (self.rows, self.inner), dtype)
        rhs = jax.random.normal(for_rhs, (self.groups, self.inner, self.columns), dtype)
        expert = jax.random.randint(for_router, (self.rows,), 0, self.groups)
        sizes = jnp.bincount(expert, length=self.groups).astype(jnp.int32)
        return lhs, rhs / max(self.inner, 1) ** 0.5, sizes

    def small(self) -> Case:
        """The same for fast tests: sizes below 96 with their remainders modulo 32, at most eight groups."""
        sizes = {name: shrunk(getattr(self, name)) for name in ("rows", "inner", "columns")}
        return replace(self, name=f"{self.name}_small", groups=min(self.groups, 8), **sizes)


CASES = (
    Case("square", 4096, 1024, 1024, 8),
    # The MLPs of experts: sizes are hidden_size, intermediate_size and the numbers of experts of config.json.
    Case("mixtral_8x7b_up", 2 * 2048, 4096, 14336, 8),  # https://huggingface.co/mistralai/Mixtral-8x7B-v0.1
    Case("mixtral_8x7b_down", 2 * 2048, 14336, 4096, 8),
    Case("mixtral_8x7b_decode", 2, 4096, 14336, 8),  # one token: most groups are empty
    Case("qwen3_30b_up", 8 * 1000, 2048, 768, 128),  # https://huggingface.co/Qwen/Qwen3-30B-A3B
    Case("deepseek_v3_up", 8 * 512, 7168, 2048, 256),  # https://huggingface.co/deepseek-ai/DeepSeek-V3
)
