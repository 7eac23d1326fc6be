"""Softmaxes of real models, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax

from tilekern.kernels.small_cases import shrunk


@dataclass(frozen=True)
class Case:
    """The softmax of x[rows, columns] over the last axis."""

    name: str
    rows: int
    columns: int

    def arrays(self, key: jax.Array, dtype: Any) -> tuple[jax.Array]:
        """Random x, standard normal."""
        return (jax.random.normal(key, (self.rows, self.columns), dtype),)

    def small(self) -> Case:
        """The same for fast tests: sizes below 96 with their remainders modulo 32."""
        return replace(self, name=f"{self.name}_small", rows=shrunk(self.rows), columns=shrunk(self.columns))


CASES = (
    Case("square", 4096, 4096),
    # Sampling: one row of logits for each sequence. Sizes are vocab_size of config.json.
    Case("llama3_8b_logits", 8, 128256),  # https://huggingface.co/meta-llama/Meta-Llama-3-8B
    Case("gemma_2b_logits", 1, 256000),  # https://huggingface.co/google/gemma-2b
    Case("gpt2_logits", 1024, 50257),  # https://huggingface.co/openai-community/gpt2: a vocabulary of odd size
    Case("gpt2_attention", 12 * 1024, 1024),  # heads × queries, keys
    Case("vit_b16_attention", 12 * 197, 197),  # https://huggingface.co/google/vit-base-patch16-224
    Case("vit_b16_classes", 256, 1000),  # ImageNet
    Case("deepseek_v3_router", 4096, 256),  # https://huggingface.co/deepseek-ai/DeepSeek-V3: n_routed_experts
)
