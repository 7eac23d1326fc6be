"""Steps of decoding of real models, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Case:
    """query[sequences, heads, width], and a cache of all pages of sequences of up to `keys` keys, in a random order."""

    name: str
    heads: int
    groups: int
    width: int
    sequences: int
    keys: int
    page: int
    window: int | None = None

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of `paged_attention`, and of its reference."""
        return {"window": self.window}

    def arrays(self, key: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Random query and cache, standard normal; lengths from 1 to `keys`, the first one `keys`."""
        for_query, for_pages, for_lengths, for_table = jax.random.split(key, 4)
        pages_of_sequence = -(-self.keys // self.page)
        pages = self.sequences * pages_of_sequence
        query = jax.random.normal(for_query, (self.sequences, self.heads, self.width), dtype)
        cache = jax.random.normal(for_pages, (pages, self.page, 2 * self.groups, self.width), dtype)
        lengths = jax.random.randint(for_lengths, (self.sequences,), 1, self.keys + 1).at[0].set(self.keys)
        table = jax.random.permutation(for_table, np.arange(pages, dtype=np.int32))
        return query, cache, lengths.astype(jnp.int32), table.reshape(self.sequences, pages_of_sequence)

    def small(self) -> Case:
        """The same for fast tests: few sequences and keys, two heads of keys, narrow heads."""
        small = {"heads": self.heads // self.groups * min(self.groups, 2), "groups": min(self.groups, 2)}
        sizes = {"width": self.width // 4, "sequences": min(self.sequences, 3), "keys": 70, "page": min(self.page, 16)}
        return replace(self, name=f"{self.name}_small", window=self.window and 20, **small, **sizes)


CASES = (
    # Heads come from each model's config.json; pages of 16 are vLLM's on GPUs, larger ones those on TPUs.
    Case("llama3_8b", 32, 8, 128, 16, 8192, 16),  # https://huggingface.co/meta-llama/Meta-Llama-3-8B
    Case("llama3_8b_one", 32, 8, 128, 1, 8192, 128),
    Case("gemma3_27b", 32, 16, 128, 8, 4096, 64, window=1024),  # https://huggingface.co/google/gemma-3-27b-it
    Case("falcon_7b", 71, 1, 64, 4, 2000, 32),  # https://huggingface.co/tiiuae/falcon-7b
)
