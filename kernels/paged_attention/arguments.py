"""The arguments of the kernels: the cache, the tables of its pages, and what scores are made of."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tilekern.kernels.symbolic_rows import ends_within


class Cache(NamedTuple):
    """Pages of keys [pages, page, K, H] and of values [pages, page, K, Hv]; or both in one array, and values None.

    The one array is [pages, page, 2 K, H], with the keys of head g at 2 g and its values at 2 g + 1. Of 4-bit numbers
    it is uint8[pages, page, K, H]: a key in the low half of each byte, its value in the high half.
    """

    keys: Any
    values: Any | None

    @property
    def heads(self) -> int:
        """K, the number of heads of keys and values."""
        return self.keys.shape[2] // (1 if self.is_packed or self.values is not None else 2)

    @property
    def is_packed(self) -> bool:
        """True for bytes of two 4-bit numbers."""
        return self.keys.dtype == jnp.uint8

    @property
    def width(self) -> int:
        """Hv, the elements of a value."""
        return (self.keys if self.values is None else self.values).shape[3]

    @property
    def page(self) -> int:
        """The number of keys in a page."""
        return self.keys.shape[1]


class Pages(NamedTuple):
    """A cache after a write, in the form of the arguments of the public functions.

    Attributes:
      kv_pages: an array [pages, page, 2 K, H] or uint8[pages, page, K, H], or a pair of arrays.
      key_scale: what keys are multiplied by: None, a number, or floats of shape (), [K] or [pages, page, K].
      value_scale: the same for values.
    """

    kv_pages: Any
    key_scale: Any = None
    value_scale: Any = None


jax.export.register_namedtuple_serialization(Pages, serialized_name="tilekern.Pages")


class Tables(NamedTuple):
    """The place of each sequence's tokens and keys.

    Attributes:
      starts: int32[S + 1]; the tokens of sequence s are rows starts[s], ..., starts[s + 1] - 1 of the queries.
      lengths: int32[S]; the number of keys of each sequence, with the keys of its tokens.
      pages: int32[S, P]; the pages of each sequence in the order of its keys.
      count: int32[1]; sequences from this number on do not exist, and may have any entries.
    """

    starts: Any
    lengths: Any
    pages: Any
    count: Any

    def of_sequences(self, start: Any, lengths: Any, pages: Any) -> Tables:
        """The tables of sequences start, start + 1, ... of one token each, with the given lengths and pages."""
        starts = jnp.arange(lengths.shape[0] + 1, dtype=jnp.int32)
        return self if isinstance(start, int) else Tables(starts, lengths, pages, self.count - start)

    def of_tokens(self, start: Any, tokens: int) -> Tables:
        """The tables of `tokens` tokens from token `start` on. Keys of later tokens are left out."""
        if isinstance(start, int):
            return self
        inside = ends_within(self.starts, start, tokens)
        later = self.starts[1:] - start - inside[1:]
        return self._replace(starts=inside, lengths=self.lengths - jnp.maximum(later, 0))


class Items(NamedTuple):
    """What programs of tiles of tokens compute: the tokens of a sequence in a tile, in the order of the tiles.

    Attributes:
      sequences: int32[I], the numbers of the sequences; -1 for items that are left over.
      tiles: int32[I], the numbers of the tiles.
    """

    sequences: Any
    tiles: Any


class Terms(NamedTuple):
    """Arrays that scores and values are made of beside queries, keys and values; None for an array that is missing.

    Attributes:
      key_scale: float32, of shape [1], [K] or [pages, page, K]: what keys are multiplied by.
      value_scale: the same for values.
      sinks: float [N], logits that take part in each row's softmax, but have no value.
    """

    key_scale: Any = None
    value_scale: Any = None
    sinks: Any = None


class Settings(NamedTuple):
    """The static arguments of the kernels.

    Attributes:
      scale: what the dot products are multiplied by.
      window: the number of keys that a token attends to, its own included; None for all up to its own.
      softcap: the bound of the scores; None for none.
      cache_dtype: of the numbers in a cache of bytes; None for a cache of any other dtype.
    """

    scale: float
    window: int | None
    softcap: float | None
    cache_dtype: str | None = None
