"""The RMS norms of real models, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax

from tilekern.kernels.small_cases import shrunk


@dataclass(frozen=True)
class Case:
    """x[rows, columns] and weight[columns]; rows are tokens, columns hidden_size of config.json."""

    name: str
    rows: int
    columns: int
    eps: float = 1e-6
    offset: float = 0.0

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of `rms_norm`, and of its reference."""
        return {"eps": self.eps, "offset": self.offset}

    def arrays(self, key: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Random x, standard normal, and a weight around 1 - offset."""
        for_x, for_weight = jax.random.split(key)
        weight = 1 - self.offset + 0.1 * jax.random.normal(for_weight, (self.columns,), dtype)
        return jax.random.normal(for_x, (self.rows, self.columns), dtype), weight

    def small(self) -> Case:
        """The same for fast tests: sizes below 96 with their remainders modulo 32."""
        return replace(self, name=f"{self.name}_small", rows=shrunk(self.rows), columns=shrunk(self.columns))


CASES = (
    Case("square", 4096, 4096),
    Case("llama3_8b", 4096, 4096, eps=1e-5),  # https://huggingface.co/meta-llama/Meta-Llama-3-8B
    Case("llama3_8b_decode", 1, 4096, eps=1e-5),
    Case("qwen2_7b", 1000, 3584),  # https://huggingface.co/Qwen/Qwen2-7B
    Case("qwen3_8b_heads", 4096 * 32, 128),  # https://huggingface.co/Qwen/Qwen3-8B: of each head of the queries
    Case("gemma_2b", 4096, 2048, offset=1.0),  # https://huggingface.co/google/gemma-2b
    Case("deepseek_v3_compressed", 4096, 512),  # https://huggingface.co/deepseek-ai/DeepSeek-V3: kv_lora_rank
    Case("t5_11b", 512, 1024),  # https://huggingface.co/google-t5/t5-11b
)
