"""Logits of real models, and the settings that their authors recommend; shared by tests and benchmarks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

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


@dataclass(frozen=True)
class HiddenCase:
    """hidden [rows, width] and a weight [width, words], or [words, width] of tied embeddings, and how to sample.

    Attributes:
      name, rows, width, words: of the product.
      tied: True if the weight is the embedding of the model.
      temperature, top_k, top_p, min_p, softcap: as of `sample_hidden`.
    """

    name: str
    rows: int
    width: int
    words: int
    tied: bool
    temperature: float
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    softcap: float | None = None

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of `sample_hidden`, and of its reference."""
        names = ("softcap", "temperature", "top_k", "top_p", "min_p")
        return {"transpose_weight": self.tied} | {name: getattr(self, name) for name in names}

    def arrays(self, key: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Random operands of logits of standard deviation 2 to 4, and the data of a key.

        They are small multiples of powers of two, so that sums are exact in float32: the logits, and so the tokens
        without a softcap, are the same on every backend.
        """
        for_hidden, for_weight, for_tokens = jax.random.split(key, 3)
        hidden = jax.random.randint(for_hidden, (self.rows, self.width), -3, 4)
        shape = (self.words, self.width) if self.tied else (self.width, self.words)
        weight = jax.random.randint(for_weight, shape, -2, 3)
        # The products have a standard deviation of 2 sqrt(2).
        unit = 2.0 ** -round(math.log2(max(self.width, 1)) / 2)
        data = jax.random.key_data(for_tokens)
        return hidden.astype(dtype), (weight.astype(jnp.float32) * unit).astype(dtype), data

    def small(self) -> HiddenCase:
        """The same for fast tests: few rows, columns and words."""
        sizes = {"rows": min(self.rows, 3), "width": shrunk(self.width), "words": 16 * shrunk(self.words)}
        return replace(self, name=f"{self.name}_small", **sizes, top_k=self.top_k and 9)


HIDDEN_CASES = (
    # hidden_size and vocab_size of each model's config.json; settings as above.
    HiddenCase("llama3_8b_any", 256, 4096, 128256, False, 1.0),
    HiddenCase("llama3_8b", 64, 4096, 128256, False, 0.6, top_p=0.9),
    HiddenCase("qwen2_5_7b", 16, 3584, 152064, False, 0.7, top_k=20, top_p=0.8),
    HiddenCase("gemma3_27b", 1, 5376, 262208, True, 1.0, top_k=64, top_p=0.95),
    # final_logit_softcapping: https://huggingface.co/google/gemma-2-2b-it
    HiddenCase("gemma2_2b_capped", 64, 2304, 256000, True, 1.0, softcap=30.0),
    HiddenCase("gpt2_greedy", 8, 768, 50257, True, 0.0),
    HiddenCase("gpt2_min_p", 8, 768, 50257, True, 1.5, min_p=0.1),
)
