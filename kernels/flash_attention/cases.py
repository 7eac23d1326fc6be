"""The attention layers of real models, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax


@dataclass(frozen=True)
class Case:
    """query[batch, queries, heads, width], key[batch, keys, groups, width], value[batch, keys, groups, value_width]."""

    name: str
    heads: int
    groups: int
    width: int
    value_width: int
    queries: int
    keys: int
    causal: bool = False
    q_offset: int = 0
    batch: int = 1

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of `flash_attention`, and of its reference."""
        return {"causal": self.causal, "q_offset": self.q_offset}

    def arrays(self, key: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Random query, key and value, standard normal."""
        for_query, for_key, for_value = jax.random.split(key, 3)
        return (
            jax.random.normal(for_query, (self.batch, self.queries, self.heads, self.width), dtype),
            jax.random.normal(for_key, (self.batch, self.keys, self.groups, self.width), dtype),
            jax.random.normal(for_value, (self.batch, self.keys, self.groups, self.value_width), dtype),
        )

    def small(self) -> Case:
        """A smaller case of the same kind, for fast tests.

        Lengths fall below 96 with their remainders modulo 32, widths to a quarter, groups to at most two and batches to
        at most two. The heads of a group (at most 8), the ratio of the widths and the keys of the last query stay.
        """
        queries, keys = shrunk(self.queries), shrunk(self.keys)
        groups = min(self.groups, 2)
        return replace(
            self,
            name=f"{self.name}_small",
            heads=min(self.heads // self.groups, 8) * groups,
            groups=groups,
            width=self.width // 4,
            value_width=self.value_width // 4,
            queries=queries,
            keys=keys,
            q_offset=keys - queries if self.q_offset else 0,
            batch=min(self.batch, 2),
        )


def shrunk(length: int) -> int:
    """A length below 96 with the same remainder modulo 32: a power of two up to 32 divides both lengths or neither."""
    return length if length < 96 else 64 + length % 32


CASES = (
    # Sizes come from each model's config.json; lengths are usual ones for the model.
    Case("llama3_8b", 32, 8, 128, 128, 4096, 4096, causal=True),  # https://huggingface.co/meta-llama/Meta-Llama-3-8B
    # One token for each of 8 conversations, and the last 1000 tokens of a long prompt.
    Case("llama3_8b_decode", 32, 8, 128, 128, 1, 8192, causal=True, q_offset=8191, batch=8),
    Case("llama3_8b_chunk", 32, 8, 128, 128, 1000, 8192, causal=True, q_offset=7192),
    Case("qwen2_7b", 28, 4, 128, 128, 4096, 4096, causal=True),  # https://huggingface.co/Qwen/Qwen2-7B
    Case("gemma_2b", 8, 1, 256, 256, 4096, 4096, causal=True),  # https://huggingface.co/google/gemma-2b: multi-query
    Case("gpt2", 12, 12, 64, 64, 1024, 1024, causal=True, batch=4),  # https://huggingface.co/openai-community/gpt2
    Case("phi_2", 32, 32, 80, 80, 2048, 2048, causal=True),  # https://huggingface.co/microsoft/phi-2: no power of two
    # https://huggingface.co/deepseek-ai/DeepSeek-V3: qk_nope_head_dim + qk_rope_head_dim = 128 + 64, v_head_dim
    Case("deepseek_v3", 128, 128, 192, 128, 4096, 4096, causal=True),
    Case("bert_base", 12, 12, 64, 64, 512, 512, batch=8),  # https://huggingface.co/google-bert/bert-base-uncased
    # https://huggingface.co/google/vit-base-patch16-224: 14² patches and a class token
    Case("vit_b16", 12, 12, 64, 64, 197, 197, batch=16),
    # Cross attention: https://huggingface.co/openai/whisper-large-v3, 448 text tokens to 30 s of audio
    Case("whisper_large_cross", 20, 20, 64, 64, 448, 1500),
    # https://huggingface.co/stable-diffusion-v1-5/stable-diffusion-v1-5: 64² latents (320 channels) to 77 text tokens
    Case("stable_diffusion_cross", 8, 8, 40, 40, 4096, 77, batch=2),
)
