"""Steps of decoding of real models, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Case:
    """query[sequences, heads, width + rope], and a cache of all pages of sequences of up to `keys` keys, shuffled.

    Attributes:
      name: unique among the cases.
      heads: of the queries.
      width: of a latent.
      rope: width of a rotated key.
      sequences: the number of sequences.
      keys: the most keys of a sequence.
      page: the number of keys in a page.
      scale: of the scores.
    """

    name: str
    heads: int
    width: int
    rope: int
    sequences: int
    keys: int
    page: int
    scale: float = 192**-0.5

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of `mla_attention`, and of its reference."""
        return {"scale": self.scale, "value_width": self.width}

    def arrays(self, key: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Random query and cache, standard normal; lengths from 1 to `keys`, the first one `keys`."""
        for_query, for_pages, for_lengths, for_table = jax.random.split(key, 4)
        pages_of_sequence = -(-self.keys // self.page)
        pages = self.sequences * pages_of_sequence
        query = jax.random.normal(for_query, (self.sequences, self.heads, self.width + self.rope), dtype)
        cache = jax.random.normal(for_pages, (pages, self.page, self.width + self.rope), dtype)
        lengths = jax.random.randint(for_lengths, (self.sequences,), 1, self.keys + 1).at[0].set(self.keys)
        table = jax.random.permutation(for_table, np.arange(pages, dtype=np.int32))
        return query, cache, lengths.astype(jnp.int32), table.reshape(self.sequences, pages_of_sequence)

    def small(self) -> Case:
        """The same for fast tests: few sequences, heads and keys, narrow latents."""
        sizes = {"heads": min(self.heads, 18), "width": self.width // 16, "rope": self.rope // 8}
        sizes |= {"sequences": min(self.sequences, 3), "keys": 70, "page": min(self.page, 16)}
        return replace(self, name=f"{self.name}_small", **sizes)


CASES = (
    # Heads, kv_lora_rank and qk_rope_head_dim come from each model's config.json. Pages of 64 are FlashMLA's.
    Case("deepseek_v2_lite", 16, 512, 64, 16, 8192, 64),  # https://huggingface.co/deepseek-ai/DeepSeek-V2-Lite
    Case("deepseek_v3", 128, 512, 64, 16, 8192, 64),  # https://huggingface.co/deepseek-ai/DeepSeek-V3
    Case("kimi_k2", 64, 512, 64, 4, 8192, 1024),  # https://huggingface.co/moonshotai/Kimi-K2-Instruct
)
