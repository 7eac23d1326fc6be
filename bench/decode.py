"""Decode: one query a sequence against 8,192 keys in pages, beside the bandwidth of a copy and beside `jnp`.

Pages of 16, 64 and 256 keys at random stand beside pages in order and beside keys without pages, caches of 8 and of 4
bits beside bfloat16, and attention to selected latents beside attention to all.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.llvm.peak import host
from bench.quantized import copy
from bench.result import Result
from bench.timing import Contestant, by_round, clock, take_turns
from tilekern.kernels import flash_attention, mla_attention, paged_attention

BANDWIDTH_SHARE_LIMIT = 0.8
PAGED_LIMIT = 1.1  # × pages in order, × keys without pages
PEER_LIMIT = 1.0  # × the best formula
QUANTIZED_LIMIT = 1.2  # × the share of the bytes
_KEYS, _PAGE, _WIDTH = 8192, 16, 128
_PAGES = (_PAGE, 64, 256)
_HEADS, _KV_HEADS = 32, 8  # Llama 3 8B
_BATCHES = (1, 16)
_NARROW = {"int8": 2, "float8_e4m3fn": 2, "int4": 4, "float4_e2m1fn": 4}
"""Caches, each with the number of its elements in the bytes of a bfloat16."""
_LATENT, _ROPE, _LATENT_HEADS, _LATENT_PAGE, _SELECTED = 512, 64, 128, 64, 2048  # DeepSeek-V3.2-Exp
_ROUNDS = 9


def measure() -> Iterator[Result]:
    """All results of this file; none on a CPU that "cpu:llvm" has no code for."""
    if host() is not None:
        for batch in _BATCHES:
            yield from _decode(batch)
            yield from _pages(batch)
        yield from _selected()


def _decode(batch: int) -> Iterator[Result]:
    query, cache, lengths = _arrays(batch)
    _, drawn = _tables(batch, _PAGE)
    ours = jax.jit(partial(paged_attention, target="cpu:llvm"))
    run: dict[str, Contestant] = {
        "ours": lambda: ours(query, cache, lengths, drawn),
        "copy": copy(cache.nbytes),
        "jnp, gathered": partial(_gathered, query, cache, drawn),
        "jnp, without pages": partial(_formula, query, cache.reshape(batch, _KEYS, 2 * _KV_HEADS, _WIDTH)),
    }
    for dtype in _NARROW:
        narrow, keywords = _quantized(cache, dtype)
        quantized = jax.jit(partial(paged_attention, target="cpu:llvm", **keywords))
        run[dtype] = partial(quantized, query, narrow, lengths, drawn)
    yield from _results(batch, cache.nbytes, take_turns({name: clock(call) for name, call in run.items()}, _ROUNDS))


def _arrays(batch: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries of a token of each sequence, a cache of standard normal numbers, and the lengths of the sequences."""
    key = jax.random.key(0)
    query = jax.random.normal(key, (batch, _HEADS, _WIDTH), jnp.bfloat16)
    cache = jax.random.normal(key, (batch * _KEYS // _PAGE, _PAGE, 2 * _KV_HEADS, _WIDTH), jnp.bfloat16)
    return query, cache, jnp.full(batch, _KEYS, jnp.int32)


def _tables(batch: int, page: int) -> tuple[np.ndarray, np.ndarray]:
    """Tables of all pages in order, and in a random order."""
    pages = batch * _KEYS // page
    in_order = np.arange(pages, dtype=np.int32).reshape(batch, -1)
    return in_order, np.random.default_rng(0).permutation(in_order.ravel()).reshape(batch, -1)


def _pages(batch: int) -> Iterator[Result]:
    """Pages of each size at random: beside the same pages in order, and beside keys and values without pages."""
    ours = jax.jit(partial(paged_attention, target="cpu:llvm"))
    contiguous = jax.jit(partial(flash_attention, target="cpu:llvm"))
    query, cache, lengths = _arrays(batch)
    keys, values = (cache[:, :, n::2].reshape(batch, _KEYS, _KV_HEADS, _WIDTH) for n in range(2))
    run: dict[str, Contestant] = {"without pages": partial(contiguous, query[:, None], keys, values)}
    for page in _PAGES:
        pool = cache.reshape(-1, page, *cache.shape[2:])
        for order, table in zip(("in order", "at random"), _tables(batch, page), strict=True):
            run[f"{page} {order}"] = partial(ours, query, pool, lengths, table)
    times = take_turns({name: clock(call) for name, call in run.items()}, _ROUNDS)
    ms = {name: statistics.median(seconds) * 1e3 for name, seconds in times.items()}
    for page in _PAGES:
        for peer, baseline in {"in order": f"{page} in order", "without pages": "without pages"}.items():
            name = f"{page} at random"
            title = f"paged_attention of {batch} × {_KEYS} keys, bfloat16, pages of {page}, {peer}"
            ratio = by_round(times[name], times[baseline])
            yield Result(title, "ms", ms[name], PAGED_LIMIT, "ratio", ms[baseline], ratio)


def _results(batch: int, nbytes: int, times: dict[str, list[float]]) -> Iterator[Result]:
    """The time of the kernel beside each contestant."""
    title = f"paged_attention of {batch} × {_KEYS} keys, bfloat16"
    ms = {name: statistics.median(seconds) * 1e3 for name, seconds in times.items()}
    rates = {name: nbytes / 1e6 / ms[name] for name in ("ours", "copy")}
    share = by_round(times["copy"], times["ours"]) / 2  # a copy reads and writes
    yield Result(f"{title}, of a copy", "GB/s", rates["ours"], BANDWIDTH_SHARE_LIMIT, "share", 2 * rates["copy"], share)
    peers = {"jnp, gathered": PEER_LIMIT, "jnp, without pages": PEER_LIMIT}
    for peer, limit in peers.items():
        ratio = by_round(times["ours"], times[peer])
        yield Result(f"{title}, {peer}", "ms", ms["ours"], limit, "ratio", ms[peer], ratio)
    for dtype, count in _NARROW.items():
        ratio = by_round(times[dtype], times["ours"])
        yield Result(f"{title}, cache of {dtype}", "ms", ms[dtype], QUANTIZED_LIMIT / count, "ratio", ms["ours"], ratio)


def _quantized(cache: jax.Array, dtype: str) -> tuple[jax.Array, dict[str, Any]]:
    """A cache of standard normal numbers in a narrower dtype, and the keywords of its scales and its dtype."""
    if _NARROW[dtype] == 2:
        scale = 1 / 32 if dtype == "int8" else 1.0
        narrow = (cache / scale).astype(dtype)
        return narrow, {"key_scale": scale, "value_scale": scale} if dtype == "int8" else {}
    # A byte has a number of a key, and the number of its value in the same place.
    pairs = (cache * 2).astype(dtype).reshape(*cache.shape[:2], -1, 2, cache.shape[3])
    packed = jax.lax.bitcast_convert_type(jnp.swapaxes(pairs, 3, 4), jnp.uint8)
    return packed, {"key_scale": 0.5, "value_scale": 0.5, "cache_dtype": dtype}


# --- attention to selected latents -----------------------------------------------------------------------------------


def _selected() -> Iterator[Result]:
    """One token to 2,048 of 8,192 latents: beside a formula in float32, and beside attention to all latents."""
    keys = jax.random.split(jax.random.key(0), 3)
    width, pages = _LATENT + _ROPE, _KEYS // _LATENT_PAGE
    query = jax.random.normal(keys[0], (1, _LATENT_HEADS, width), jnp.bfloat16)
    cache = jax.random.normal(keys[1], (pages, _LATENT_PAGE, width), jnp.bfloat16)
    chosen = jax.random.permutation(keys[2], jnp.arange(_KEYS, dtype=jnp.int32))[None, :_SELECTED]
    lengths = jnp.full(1, _KEYS, jnp.int32)
    table = np.random.default_rng(0).permutation(pages).astype(np.int32)[None]
    ours = jax.jit(partial(mla_attention, scale=192**-0.5, target="cpu:llvm"))
    run: dict[str, Contestant] = {
        "ours": lambda: ours(query, cache, lengths, table, selected=chosen),
        "all keys": lambda: ours(query, cache, lengths, table),
        "jnp": partial(_formula_of_selected, query, cache, table, chosen),
    }
    times = take_turns({name: clock(call) for name, call in run.items()}, _ROUNDS)
    ms = {name: statistics.median(seconds) * 1e3 for name, seconds in times.items()}
    title = f"mla_attention of 1 × {_SELECTED} of {_KEYS} keys, {_LATENT_HEADS} heads, bfloat16"
    for peer, limit in {"jnp": PEER_LIMIT, "all keys": QUANTIZED_LIMIT * _SELECTED / _KEYS}.items():
        yield Result(
            f"{title}, {peer}", "ms", ms["ours"], limit, "ratio", ms[peer], by_round(times["ours"], times[peer])
        )


@jax.jit
def _formula_of_selected(query: jax.Array, cache: jax.Array, table: Any, selected: jax.Array) -> jax.Array:
    """Attention of query[B, N, 512 + 64] to the selected latents of its sequence, gathered, in float32."""
    pages = jnp.take_along_axis(jnp.asarray(table), selected // cache.shape[1], axis=1)
    latents = cache[pages, selected % cache.shape[1]].astype(jnp.float32)
    scores = jnp.einsum("bnh,bsh->bns", query.astype(jnp.float32), latents) * 192**-0.5
    return jnp.einsum("bns,bsh->bnh", jax.nn.softmax(scores), latents[..., :_LATENT]).astype(query.dtype)


@jax.jit
def _formula(query: jax.Array, cache: jax.Array) -> jax.Array:
    """Attention of one query to keys and values[B, L, 2 K, H] that are interleaved by head, in float32.

    Sums of products, which XLA fuses with the casts. On a CPU with AVX2 they took 0.4 × the time of its best product
    and 0.25 × that of `jax.nn.dot_product_attention`.
    """
    keys, values = (cache[:, :, n::2, None].astype(jnp.float32) for n in range(2))
    batch, heads, width = query.shape
    rows = query.reshape(batch, 1, keys.shape[2], -1, width).astype(jnp.float32)
    weights = jax.nn.softmax((keys * rows).sum(-1) * width**-0.5, axis=1)
    return (weights[..., None] * values).sum(1).reshape(batch, heads, width).astype(query.dtype)


@jax.jit
def _gathered(query: jax.Array, cache: jax.Array, table: Any) -> jax.Array:
    """The same for a table of pages."""
    batch, count = table.shape
    return _formula(query, cache[table].reshape(batch, count * cache.shape[1], *cache.shape[2:]))
