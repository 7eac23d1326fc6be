"""The layer norms of real models, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax

from tilekern.kernels.small_cases import shrunk


@dataclass(frozen=True)
class Case:
    """x[rows, columns], weight[columns] and bias[columns]; rows are tokens, columns hidden_size of config.json."""

    name: str
    rows: int
    columns: int
    eps: float = 1e-5

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of `layer_norm`, and of its reference."""
        return {"eps": self.eps}

    def arrays(self, key: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Random x, standard normal around 1; a weight around 1, and a bias around 0."""
        for_x, for_weight, for_bias = jax.random.split(key, 3)
        x = 1 + jax.random.normal(for_x, (self.rows, self.columns), dtype)
        weight = 1 + 0.1 * jax.random.normal(for_weight, (self.columns,), dtype)
        return x, weight, 0.1 * jax.random.normal(for_bias, (self.columns,), dtype)

    def small(self) -> Case:
        """The same for fast tests: sizes below 96 with their remainders modulo 32."""
        return replace(self, name=f"{self.name}_small", rows=shrunk(self.rows), columns=shrunk(self.columns))


CASES = (
    Case("square", 4096, 4096),
    Case("gpt2", 1024, 768),  # https://huggingface.co/openai-community/gpt2
    Case("bert_base", 8 * 512, 768, eps=1e-12),  # https://huggingface.co/google-bert/bert-base-uncased
    Case("vit_b16", 16 * 197, 768, eps=1e-12),  # https://huggingface.co/google/vit-base-patch16-224
    Case("whisper_large", 1500, 1280),  # https://huggingface.co/openai/whisper-large-v3: 30 s of audio
    Case("phi_2", 2048, 2560),  # https://huggingface.co/microsoft/phi-2
    Case("falcon_40b_decode", 1, 8192),  # https://huggingface.co/tiiuae/falcon-40b
)
