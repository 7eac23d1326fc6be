"""The gated activations of real models, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax

from tilekern.kernels.small_cases import shrunk


@dataclass(frozen=True)
class Case:
    """gate[rows, columns] and up[rows, columns]; rows are tokens, columns intermediate_size of config.json."""

    name: str
    rows: int
    columns: int

    def arrays(self, key: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Random gate and up, standard normal."""
        for_gate, for_up = jax.random.split(key)
        shape = self.rows, self.columns
        return jax.random.normal(for_gate, shape, dtype), jax.random.normal(for_up, shape, dtype)

    def small(self) -> Case:
        """The same for fast tests: sizes below 96 with their remainders modulo 32."""
        return replace(self, name=f"{self.name}_small", rows=shrunk(self.rows), columns=shrunk(self.columns))


CASES = (
    Case("square", 4096, 4096),
    Case("llama3_8b", 4096, 14336),  # https://huggingface.co/meta-llama/Meta-Llama-3-8B
    Case("llama3_8b_decode", 1, 14336),
    Case("llama2_7b", 2048, 11008),  # https://huggingface.co/meta-llama/Llama-2-7b: 43 · 256
    Case("qwen2_7b", 1000, 18944),  # https://huggingface.co/Qwen/Qwen2-7B
    Case("deepseek_v3_expert", 4096, 2048),  # https://huggingface.co/deepseek-ai/DeepSeek-V3: moe_intermediate_size
)
