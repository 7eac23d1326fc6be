"""The losses of real models, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax

from tilekern.kernels.small_cases import shrunk


@dataclass(frozen=True)
class Case:
    """hidden[tokens, width], weight[width, vocabulary]: hidden_size and vocab_size of config.json."""

    name: str
    tokens: int
    width: int
    vocabulary: int
    softcap: float | None = None
    z_loss: float = 0.0
    label_smoothing: float = 0.0

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of `cross_entropy`, and of its reference."""
        return {"softcap": self.softcap, "z_loss": self.z_loss, "label_smoothing": self.label_smoothing}

    def arrays(self, key: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Random hidden and weight, whose logits are standard normal, and labels."""
        for_hidden, for_weight, for_labels = jax.random.split(key, 3)
        hidden = jax.random.normal(for_hidden, (self.tokens, self.width), dtype)
        weight = jax.random.normal(for_weight, (self.width, self.vocabulary), dtype) / self.width**0.5
        return hidden, weight, jax.random.randint(for_labels, (self.tokens,), 0, self.vocabulary)

    def small(self) -> Case:
        """A smaller case for fast tests: sizes below 96 with their remainders modulo 32."""
        sizes = {name: shrunk(getattr(self, name)) for name in ("tokens", "width", "vocabulary")}
        return replace(self, name=f"{self.name}_small", **sizes)


CASES = (
    Case("llama2_7b", 4096, 4096, 32000),  # https://huggingface.co/meta-llama/Llama-2-7b
    Case("llama3_8b", 4096, 4096, 128256),  # https://huggingface.co/meta-llama/Meta-Llama-3-8B
    Case("llama3_8b_answer", 128, 4096, 128256),  # the tokens of an answer: few, so the words are divided
    Case("gemma2_2b", 4096, 2304, 256000, softcap=30.0),  # https://huggingface.co/google/gemma-2-2b
    Case("gpt2", 1024, 768, 50257),  # https://huggingface.co/openai-community/gpt2: a vocabulary of odd size
    Case("olmo2_7b", 4096, 4096, 100352, z_loss=1e-5),  # https://huggingface.co/allenai/OLMo-2-1124-7B
    Case(
        "transformer_big", 1000, 1024, 37000, label_smoothing=0.1
    ),  # https://arxiv.org/abs/1706.03762, sections 5.1, 5.4
)
