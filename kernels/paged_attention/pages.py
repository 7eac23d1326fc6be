"""Writes to a cache in pages: keys and values of new tokens, and copies of whole pages.

They are formulas of jnp. Of pools that `jax.jit` takes over, XLA writes the rows of a scatter in place, at the speed of
memory on CPUs; a kernel of tiles has nothing to add.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tilekern.authoring import hide_frames, takes_python_numbers
from tilekern.kernels.checks import as_int32, is_integer, require
from tilekern.kernels.paged_attention import checks
from tilekern.kernels.paged_attention.arguments import Pages, Tables
from tilekern.kernels.paged_attention.op import positions_of
from tilekern.kernels.quantization import LARGEST, rounded, scale_of
from tilekern.kernels.rope import rope

hide_frames(__file__)


@takes_python_numbers
def write_pages(
    kv_pages: jax.Array | tuple[jax.Array, jax.Array],
    new_keys: jax.Array,
    new_values: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array | None = None,
    num_seqs: jax.Array | int | None = None,
    *,
    key_scale: jax.Array | float | None = None,
    value_scale: jax.Array | float | None = None,
    cache_dtype: str | None = None,
    theta: float | None = None,
    frequencies: jax.Array | None = None,
    interleaved: bool = False,
    target: str | None = None,
) -> Pages:
    """The cache with the keys and values of new tokens, for the `ragged_paged_attention` of the same tables.

    Where `jax.jit` takes the cache over (`donate_argnums`), rows are written in place, and no page is copied. The new
    tokens of a sequence are its last ones: the last of them is key kv_lens[s] - 1. Nothing is written for a token of no
    sequence, and for a key behind the table, before the sequence, or in a page that is not in the cache, such as page
    -1. If tables send two tokens to one place, either of them is written.

    Args:
      kv_pages: the cache, as in `ragged_paged_attention`.
      new_keys: [T, K, H], of the dtype of the cache, or for a cache of 8 or 4 bits of any float.
      new_values: [T, K, Hv], of the dtype of the keys.
      kv_lens: integers [S], the number of keys of each sequence, those of its new tokens included.
      page_indices: integers [S, P].
      cu_q_lens: integers [S + 1], as in `ragged_paged_attention`; None for one token of each sequence, T = S.
      num_seqs: the number of sequences; S if None.
      key_scale: what keys are divided by: a number, or floats of shape () for all, or [K] for each head. Of shape
        [pages, page, K], for a quantised cache, it is written, too: the largest number of each new key gives its scale,
        and becomes 127 (int8), 448 (float8_e4m3fn), 57344 (float8_e5m2), 7 (int4) or 6 (float4_e2m1fn). None for 1.
      value_scale: the same for values.
      cache_dtype: of the numbers in a cache of bytes, as in `ragged_paged_attention`.
      theta: rotate keys by their positions as `rope` does, with frequencies of this base; None for no rotation, unless
        `frequencies` are given.
      frequencies: floats [H / 2], radians per position.
      interleaved: rotate pairs of neighbours, as in `rope`.
      target: lower the rotation for this target's blocks, e.g. "cpu:xla".

    Returns:
      (kv_pages, key_scale, value_scale), a named tuple; scales of shape [pages, page, K] with the new ones, others as
      they came. Integers are rounded to nearest, ties to even; numbers that are too large for the dtype are clamped.

    Raises:
      tilekern.errors.ArgumentError: shapes or dtypes do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.paged_attention import write_pages
      >>> cache, lengths, table = jnp.zeros((8, 16, 2 * 2, 32)), jnp.array([17, 0]), jnp.array([[3, 7], [0, 0]])
      >>> cache = write_pages(cache, jnp.ones((2, 2, 32)), jnp.ones((2, 2, 32)), lengths, table).kv_pages
      >>> bool((cache[7, 0] == 1).all()), float(cache.sum())
      (True, 128.0)
    """
    packed = checks.packed_dtype("write_pages", cache_dtype)
    cache = checks.written("write_pages", new_keys, new_values, kv_pages, packed)
    tables = checks.tables("write_pages", new_keys.shape[0], kv_lens, page_indices, cu_q_lens, num_seqs)
    for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        checks.scale_of_written("write_pages", name, scale, cache)
    if 0 in (new_keys.size, cache.keys.size, page_indices.size):
        return Pages(kv_pages, key_scale, value_scale)
    positions, place = places_of(tables, new_keys.shape[0], *cache.keys.shape[:2])
    if theta is not None or frequencies is not None:
        rotation: dict[str, Any] = {"frequencies": frequencies, "interleaved": interleaved, "target": target}
        rotation |= {} if theta is None else {"theta": theta}
        new_keys = rope(new_keys[None], positions[None], **rotation)[0]
    dtype = cache.keys.dtype if packed is None else jnp.dtype(packed)
    keys, key_scale = stored(new_keys, key_scale, dtype, place)
    values, value_scale = stored(new_values, value_scale, dtype, place)
    if cache.values is not None:
        return Pages((put(cache.keys, keys, place), put(cache.values, values, place)), key_scale, value_scale)
    if packed is not None:
        interleaved = jax.lax.bitcast_convert_type(jnp.stack([keys, values], axis=3), jnp.uint8)
    else:
        interleaved = jnp.stack([keys, values], axis=2).reshape(keys.shape[0], -1, keys.shape[2])
    return Pages(put(cache.keys, interleaved, place), key_scale, value_scale)


def copy_pages[ArrayTree](kv_pages: ArrayTree, sources: jax.Array, targets: jax.Array) -> ArrayTree:
    """The cache with page sources[n] in the place of page targets[n], for each n: forks of sequences, compaction.

    All sources are read before the first target is written, so a page may be both. Of several pairs of one target the
    last one counts. A pair does nothing if one of its pages is not in the cache, such as page -1. Where `jax.jit` takes
    the cache over (`donate_argnums`), pages are written in place, and only the sources are copied.

    Args:
      kv_pages: an array [pages, ...], or a pytree of such arrays: pairs of keys and values, scales, and caches of
        several layers.
      sources: integers [N].
      targets: integers [N].

    Returns:
      A tree like `kv_pages`.

    Raises:
      tilekern.errors.ArgumentError: the numbers of pages are no integers, or no vectors of one length, or arrays
        have different numbers of pages.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.paged_attention import copy_pages
      >>> copy_pages(jnp.arange(5) * 10, jnp.array([0, 1, 4]), jnp.array([1, 2, -1]))
      Array([ 0,  0, 10, 30, 40], dtype=int32)
    """
    pools = jax.tree.leaves(kv_pages)
    sizes = {x.shape[0] if getattr(x, "ndim", 0) else None for x in pools}
    vectors = is_integer(sources) and is_integer(targets) and sources.ndim == 1 and sources.shape == targets.shape
    require(
        vectors and len(sizes) == 1 and None not in sizes,
        "copy_pages",
        expected="arrays [pages, ...] of one number of pages, and integers sources[N] and targets[N]",
        fix="a pair that does nothing has page -1",
        sources=sources,
        targets=targets,
        **{f"kv_pages leaf {n}": x for n, x in enumerate(pools)},
    )
    (pages,) = sizes
    if not pages or not sources.size:
        return kv_pages
    sources, targets = as_int32(sources), as_int32(targets)
    order = jnp.arange(sources.shape[0])
    exists = (sources >= 0) & (sources < pages) & (targets >= 0) & (targets < pages)
    later = (targets[:, None] == targets) & (order[:, None] < order) & exists
    targets = jnp.where(exists & ~later.any(axis=1), targets, pages)
    sources = jnp.where(exists, sources, 0)

    def copied(pool: Any) -> jax.Array:
        pool = jnp.asarray(pool)
        return pool.at[targets].set(pool[sources], mode="drop")

    return jax.tree.map(copied, kv_pages)


def places_of(tables: Tables, tokens: int, pages: int, page_size: int) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """int32[T], the position of each new token; and its page, `pages` for none, and its place in the page."""
    sequence, position = positions_of(tables, tokens)
    number = position // page_size
    exists = (sequence >= 0) & (position >= 0) & (number < tables.pages.shape[1])
    page = tables.pages[sequence, jnp.where(exists, number, 0)]
    # `at` counts negative numbers from the end of the cache, and drops those behind it.
    page = jnp.where(exists & (page >= 0) & (page < pages), page, pages)
    return jnp.maximum(position, 0), (page, position % page_size)


def stored(new: jax.Array, scale: Any, dtype: Any, place: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, Any]:
    """New keys or values [T, K, H] in the dtype of the cache, and the scales, with the new ones if each key has one."""
    if scale is None and new.dtype == dtype:
        return new, None
    wide = new.astype(jnp.promote_types(new.dtype, jnp.float32))
    if scale is not None and jnp.ndim(scale) == 3:
        of_tokens = scale_of(jnp.abs(wide).max(axis=2), str(dtype)).astype(scale.dtype)
        scale, factor = put(scale, of_tokens, place), of_tokens[..., None].astype(wide.dtype)
    else:
        factor = jnp.asarray(1 if scale is None else scale, wide.dtype)
        factor = factor[:, None] if factor.size > 1 else factor.reshape(())
    scaled = wide / factor
    return (rounded(scaled, str(dtype)) if str(dtype) in LARGEST else scaled.astype(dtype)), scale


def stored_rows(new: jax.Array, scale: Any, dtype: Any, place: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, Any]:
    """Rows [T, W] in the dtype of a cache of one head, and the scales, () or [pages, page], after the write."""
    of_keys = getattr(scale, "ndim", 0) == 2
    rows, after = stored(new[:, None], scale[..., None] if of_keys else scale, dtype, place)
    return rows[:, 0], after[..., 0] if of_keys else after


def put(pool: jax.Array, rows: jax.Array, place: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The pool [pages, page, ...] with rows [T, ...] at their pages and places; page `pages` is none."""
    return jnp.asarray(pool).at[place].set(rows, mode="drop")
