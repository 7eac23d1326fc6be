"""Matrix products of real models, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax

from tilekern.kernels.small_cases import shrunk


@dataclass(frozen=True)
class Case:
    """x[rows, inner] @ w[inner, columns]."""

    name: str
    rows: int
    inner: int
    columns: int

    def arrays(self, key: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Random x and w; the elements of the product have standard deviation 1."""
        left, right = jax.random.split(key)
        x = jax.random.normal(left, (self.rows, self.inner), dtype)
        w = jax.random.normal(right, (self.inner, self.columns), dtype)
        return x, w / max(self.inner, 1) ** 0.5

    def small(self) -> Case:
        """A smaller case for fast tests: sizes below 96 with their remainders modulo 32; equal sizes stay equal."""
        sizes = {name: shrunk(getattr(self, name)) for name in ("rows", "inner", "columns")}
        return replace(self, name=f"{self.name}_small", **sizes)


CASES = (
    Case("square", 2048, 2048, 2048),
    # The MLPs of one prompt: rows are tokens. Sizes are hidden_size and intermediate_size of config.json.
    Case("llama3_8b_up", 4096, 4096, 14336),  # https://huggingface.co/meta-llama/Meta-Llama-3-8B
    Case("llama3_8b_down", 4096, 14336, 4096),
    Case("llama3_8b_decode", 1, 4096, 14336),  # one token
    Case("qwen2_7b_up", 1000, 3584, 18944),  # https://huggingface.co/Qwen/Qwen2-7B
    Case("gpt2_logits", 1024, 768, 50257),  # https://huggingface.co/openai-community/gpt2: a vocabulary of odd size
    Case("vit_b16_qkv", 197, 768, 2304),  # https://huggingface.co/google/vit-base-patch16-224: 14² patches and a class
    Case("whisper_large_up", 1500, 1280, 5120),  # https://huggingface.co/openai/whisper-large-v3: 30 s of audio
    Case(
        "deepseek_v3_compress", 4096, 7168, 576
    ),  # https://huggingface.co/deepseek-ai/DeepSeek-V3: kv_lora_rank + rope
)
