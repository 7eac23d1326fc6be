"""Logits of real models, and the settings that their authors recommend; shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax

from tilekern.kernels.small_cases import shrunk


@dataclass(frozen=True)
class Case:
    """Logits [rows, words], and how they are sampled."""

    name: str
    rows: int
    words: int
    temperature: float
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of `sample`, and of its reference."""
        return {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}

    def arrays(self, key: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Random logits of standard deviation 3, and the data of a key."""
        for_logits, for_tokens = jax.random.split(key)
        logits = 3 * jax.random.normal(for_logits, (self.rows, self.words), dtype)
        return logits, jax.random.key_data(for_tokens)

    def small(self) -> Case:
        """The same for fast tests: few rows and words."""
        words = 16 * shrunk(self.words)
        return replace(self, name=f"{self.name}_small", rows=min(self.rows, 3), words=words, top_k=self.top_k and 9)


CASES = (
    # https://huggingface.co/meta-llama/Meta-Llama-3-8B-Instruct, generation_config.json
    Case("llama3_8b", 64, 128256, 0.6, top_p=0.9),
    # https://huggingface.co/Qwen/Qwen2.5-7B-Instruct, generation_config.json
    Case("qwen2_5_7b", 16, 152064, 0.7, top_k=20, top_p=0.8),
    # https://huggingface.co/google/gemma-3-27b-it, generation_config.json
    Case("gemma3_27b", 1, 262208, 1.0, top_k=64, top_p=0.95),
    Case("gpt2_greedy", 8, 50257, 0.0),  # https://huggingface.co/openai-community/gpt2
    Case("gpt2_min_p", 8, 50257, 1.5, min_p=0.1),
)
