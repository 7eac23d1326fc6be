"""Writes of the indexer's keys to a cache in pages, by the scatter of `write_pages`."""

from __future__ import annotations

from typing import NamedTuple

import jax

from tilekern.authoring import hide_frames, takes_python_numbers
from tilekern.kernels.checks import is_float, require
from tilekern.kernels.paged_attention.checks import QUANTIZED, scale_of_written_rows
from tilekern.kernels.paged_attention.checks import tables as checked_tables
from tilekern.kernels.paged_attention.pages import places_of, put, stored_rows

hide_frames(__file__)


class KeyPages(NamedTuple):
    """A cache of the indexer's keys after a write, in the form of the arguments of `index_scores`.

    Attributes:
      key_pages: [pages, page, D] or [pages, page, 1, D].
      key_scale: what keys are multiplied by: None, a number, or floats of shape () or [pages, page].
    """

    key_pages: jax.Array
    key_scale: jax.Array | float | None = None


jax.export.register_namedtuple_serialization(KeyPages, serialized_name="tilekern.KeyPages")


@takes_python_numbers
def write_index_keys(
    key_pages: jax.Array,
    new_keys: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array | None = None,
    num_seqs: jax.Array | int | None = None,
    *,
    key_scale: jax.Array | float | None = None,
) -> KeyPages:
    """The cache with the indexer's keys of new tokens, for `index_scores` and `select_keys` of the same tables.

    Where `jax.jit` takes the cache over (`donate_argnums`), rows are written in place, and no page is copied. Places
    are as in `write_pages`: the new tokens of a sequence are its last ones, and nothing is written for a token of no
    sequence, behind the table, before the sequence, or in a page that is not in the cache. Keys are written as they
    come: DeepSeek's models norm them, rotate a part by positions, and multiply by a Hadamard matrix before. Source of
    the scales: DeepSeek-V3.2-Exp, `inference/model.py`, class `Indexer`.

    Args:
      key_pages: the cache, as in `index_scores`.
      new_keys: [T, D], of the dtype of the cache, or for a cache of int8, float8_e4m3fn or float8_e5m2 of any float.
      kv_lens: integers [S], the number of keys of each sequence, its new tokens' keys included.
      page_indices: integers [S, P].
      cu_q_lens: integers [S + 1], as in `index_scores`; None for one token of each sequence, T = S.
      num_seqs: the number of sequences; S if None.
      key_scale: what keys are divided by: a number, or floats of shape (). Of shape [pages, page], for a quantised
        cache, it is written, too: the largest number of each new key gives its scale. None for 1.

    Returns:
      (key_pages, key_scale), a named tuple; scales of shape [pages, page] with the new ones, others as they came.
      Numbers are rounded and clamped as in `write_pages`.

    Raises:
      tilekern.errors.ArgumentError: shapes or dtypes do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.index_scores import write_index_keys
      >>> cache, scales, table = jnp.zeros((8, 16, 4), "int8"), jnp.ones((8, 16)), jnp.array([[3, 7]])
      >>> keys = jnp.array([[127.0, -254.0, 0.0, 63.0]])
      >>> cache, scales = write_index_keys(cache, keys, jnp.array([17]), table, key_scale=scales)
      >>> cache[7, 0], float(scales[7, 0])
      (Array([  64, -127,    0,   32], dtype=int8), 2.0)
    """
    is_cache = getattr(key_pages, "ndim", 0) == 3 or (getattr(key_pages, "ndim", 0) == 4 and key_pages.shape[2] == 1)
    fits = is_cache and key_pages.shape[1] > 0 and is_float(new_keys)
    require(
        fits
        and new_keys.shape[1:] == key_pages.shape[-1:]
        and str(key_pages.dtype) in (str(new_keys.dtype), *QUANTIZED),
        "write_index_keys",
        expected="new_keys[T, D] of a float dtype, and key_pages[pages, page, D] or [pages, page, 1, D] of its dtype "
        f"or {', '.join(QUANTIZED)}",
        fix="cast new_keys with .astype; a cache of 8 bits takes keys of any float",
        key_pages=key_pages,
        new_keys=new_keys,
    )
    tokens, places = new_keys.shape[0], key_pages.shape[:2]
    tables = checked_tables("write_index_keys", tokens, kv_lens, page_indices, cu_q_lens, num_seqs)
    scale_of_written_rows("write_index_keys", "key_scale", key_scale, "key_pages", places, key_pages.dtype)
    if 0 in (new_keys.size, key_pages.size, page_indices.size):
        return KeyPages(key_pages, key_scale)
    _, place = places_of(tables, tokens, *places)
    keys, key_scale = stored_rows(new_keys, key_scale, key_pages.dtype, place)
    return KeyPages(put(key_pages, keys.reshape(tokens, *key_pages.shape[2:]), place), key_scale)
