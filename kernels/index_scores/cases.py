"""Steps of decoding of real models, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Case:
    """query[sequences, heads, width], and a cache of all pages of sequences of up to `keys` keys, shuffled.

    Attributes:
      name: unique among the cases.
      heads: of the indexer.
      width: of a key.
      sequences: the number of sequences.
      keys: the most keys of a sequence.
      page: the number of keys in a page.
    """

    name: str
    heads: int
    width: int
    sequences: int
    keys: int
    page: int

    def arrays(self, key: jax.Array, dtype: Any) -> tuple[jax.Array, ...]:
        """Random query, weights of heads and cache, standard normal; lengths from 1 to `keys`, the first one `keys`."""
        for_query, for_weights, for_pages, for_lengths, for_table = jax.random.split(key, 5)
        pages_of_sequence = -(-self.keys // self.page)
        pages = self.sequences * pages_of_sequence
        query = jax.random.normal(for_query, (self.sequences, self.heads, self.width), dtype)
        weights = jax.random.normal(for_weights, query.shape[:2], dtype) * (self.heads * self.width) ** -0.5
        cache = jax.random.normal(for_pages, (pages, self.page, self.width), dtype)
        lengths = jax.random.randint(for_lengths, (self.sequences,), 1, self.keys + 1).at[0].set(self.keys)
        table = jax.random.permutation(for_table, np.arange(pages, dtype=np.int32))
        table = table.reshape(self.sequences, pages_of_sequence)
        return query, weights, cache, lengths.astype(jnp.int32), table

    def small(self) -> Case:
        """The same for fast tests: few sequences, heads and keys, narrow keys."""
        sizes = {"heads": min(self.heads, 6), "width": self.width // 8, "sequences": min(self.sequences, 3)}
        return replace(self, name=f"{self.name}_small", **sizes, keys=70, page=min(self.page, 16))


CASES = (
    # index_n_heads and index_head_dim of config.json: https://huggingface.co/deepseek-ai/DeepSeek-V3.2-Exp
    Case("deepseek_v3_2", 64, 128, 16, 8192, 64),
    Case("deepseek_v3_2_one", 64, 128, 1, 131072, 64),
)
