"""Writes of new latents to a cache in pages, by the scatter of `write_pages`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tilekern.authoring import hide_frames, static_int, takes_python_numbers
from tilekern.kernels.mla_attention import checks
from tilekern.kernels.mla_attention.arguments import LatentPages
from tilekern.kernels.paged_attention.checks import scale_of_written_rows
from tilekern.kernels.paged_attention.checks import tables as checked_tables
from tilekern.kernels.paged_attention.pages import places_of, put, stored_rows
from tilekern.kernels.rope import rope

hide_frames(__file__)


@takes_python_numbers
def write_latents(
    kv_pages: jax.Array | tuple[jax.Array, jax.Array],
    new_latents: jax.Array | tuple[jax.Array, jax.Array],
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array | None = None,
    num_seqs: jax.Array | int | None = None,
    *,
    value_width: int = 512,
    latent_scale: jax.Array | float | None = None,
    rope_scale: jax.Array | float | None = None,
    theta: float | None = None,
    frequencies: jax.Array | None = None,
    interleaved: bool = False,
    target: str | None = None,
) -> LatentPages:
    """The cache with the latents of new tokens, for the `mla_attention` of the same tables.

    Where `jax.jit` takes the cache over (`donate_argnums`), rows are written in place, and no page is copied. Places
    are as in `write_pages`: the new tokens of a sequence are its last ones, and nothing is written for a token of no
    sequence, behind the table, before the sequence, or in a page that is not in the cache.

    Args:
      kv_pages: the cache, as in `mla_attention`.
      new_latents: [T, C + R], or a pair [T, C] and [T, R], of the dtype of the cache, or for a cache of int8,
        float8_e4m3fn or float8_e5m2 of any float.
      kv_lens: integers [S], the number of keys of each sequence, its new tokens' keys included.
      page_indices: integers [S, P].
      cu_q_lens: integers [S + 1], as in `mla_attention`; None for one token of each sequence, T = S.
      num_seqs: the number of sequences; S if None.
      value_width: C, the width of a latent.
      latent_scale: what latents are divided by: a number, or floats of shape (). Of shape [pages, page], for a
        quantised cache, it is written, too: the largest number of each new latent gives its scale. None for 1.
      rope_scale: the same for rotated keys.
      theta: rotate the last R numbers by their positions as `rope` does, with frequencies of this base; None for no
        rotation, unless `frequencies` are given.
      frequencies: floats [R / 2], radians per position.
      interleaved: rotate pairs of neighbours, as in `rope`; so do DeepSeek's models.
      target: lower the rotation for this target's blocks, e.g. "cpu:xla".

    Returns:
      (kv_pages, latent_scale, rope_scale), a named tuple; scales of shape [pages, page] with the new ones, others as
      they came. Numbers are rounded and clamped as in `write_pages`.

    Raises:
      tilekern.errors.ArgumentError: shapes or dtypes do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.mla_attention import write_latents
      >>> cache, lengths, table = jnp.zeros((8, 16, 576)), jnp.array([17, 0]), jnp.array([[3, 7], [0, 0]])
      >>> cache = write_latents(cache, jnp.ones((2, 576)), lengths, table).kv_pages
      >>> bool((cache[7, 0] == 1).all()), float(cache.sum())
      (True, 576.0)
    """
    width = static_int(value_width, "value_width", 1)
    new, cache = checks.latents("write_latents", "new_latents", new_latents, kv_pages, width)
    tables = checked_tables("write_latents", new.latent.shape[0], kv_lens, page_indices, cu_q_lens, num_seqs)
    dtypes = cache.latent.dtype, (cache.latent if cache.rope is None else cache.rope).dtype
    for name, scale, dtype in zip(("latent_scale", "rope_scale"), (latent_scale, rope_scale), dtypes, strict=True):
        scale_of_written_rows("write_latents", name, scale, "kv_pages", cache.latent.shape[:2], dtype)
    if 0 in (new.latent.size, cache.latent.size, page_indices.size):
        return LatentPages(kv_pages, latent_scale, rope_scale)
    positions, place = places_of(tables, new.latent.shape[0], *cache.latent.shape[:2])
    latents, ropes = new.halves(width)
    if theta is not None or frequencies is not None:
        rotation: dict[str, Any] = {"frequencies": frequencies, "interleaved": interleaved, "target": target}
        rotation |= {} if theta is None else {"theta": theta}
        ropes = rope(ropes[None, :, None], positions[None], **rotation)[0, :, 0]
    latents, latent_scale = stored_rows(latents, latent_scale, dtypes[0], place)
    ropes, rope_scale = stored_rows(ropes, rope_scale, dtypes[1], place)
    rows = [jnp.concatenate([latents, ropes], axis=1)] if cache.rope is None else [latents, ropes]
    pools: list[Any] = [kv_pages] if cache.rope is None else [*kv_pages]
    written = [put(pool, row.reshape(-1, *pool.shape[2:]), place) for pool, row in zip(pools, rows, strict=True)]
    return LatentPages(written[0] if cache.rope is None else tuple(written), latent_scale, rope_scale)
