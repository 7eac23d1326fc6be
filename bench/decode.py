"""Decode: one query a sequence against 8,192 keys in pages, beside the bandwidth of a copy and beside `jnp`."""

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
from tilekern.kernels import paged_attention

BANDWIDTH_SHARE_LIMIT = 0.8
PAGED_LIMIT = 1.1  # × pages in order
PEER_LIMIT = 1.0  # × the best formula
QUANTIZED_LIMIT = 1.2  # × the share of the bytes
_KEYS, _PAGE, _WIDTH = 8192, 16, 128
_HEADS, _KV_HEADS = 32, 8  # Llama 3 8B
_BATCHES = (1, 16)
_ROUNDS = 9


def measure() -> Iterator[Result]:
    """All results of this file; none on a CPU that "cpu:llvm" has no code for."""
    if host() is not None:
        for batch in _BATCHES:
            yield from _decode(batch)


def _decode(batch: int) -> Iterator[Result]:
    pages = batch * _KEYS // _PAGE
    key = jax.random.key(0)
    query = jax.random.normal(key, (batch, _HEADS, _WIDTH), jnp.bfloat16)
    cache = jax.random.normal(key, (pages, _PAGE, 2 * _KV_HEADS, _WIDTH), jnp.bfloat16)
    lengths = jnp.full(batch, _KEYS, jnp.int32)
    in_order = np.arange(pages, dtype=np.int32).reshape(batch, -1)
    drawn = np.random.default_rng(0).permutation(pages).astype(np.int32).reshape(batch, -1)
    ours = jax.jit(partial(paged_attention, target="cpu:llvm"))
    run: dict[str, Contestant] = {
        "ours": lambda: ours(query, cache, lengths, drawn),
        "in order": lambda: ours(query, cache, lengths, in_order),
        "copy": copy(cache.nbytes),
        "jnp, gathered": partial(_gathered, query, cache, drawn),
        "jnp, without pages": partial(_formula, query, cache.reshape(batch, _KEYS, 2 * _KV_HEADS, _WIDTH)),
    }
    for dtype in ("int8", "float8_e4m3fn"):
        narrow = (cache * (32 if dtype == "int8" else 1)).astype(dtype)
        scales = {"key_scale": 1 / 32, "value_scale": 1 / 32} if dtype == "int8" else {}
        quantized = jax.jit(partial(paged_attention, target="cpu:llvm", **scales))
        run[dtype] = partial(quantized, query, narrow, lengths, drawn)
    yield from _results(batch, cache.nbytes, take_turns({name: clock(call) for name, call in run.items()}, _ROUNDS))


def _results(batch: int, nbytes: int, times: dict[str, list[float]]) -> Iterator[Result]:
    """The time of the kernel beside each contestant."""
    title = f"paged_attention of {batch} × {_KEYS} keys, bfloat16"
    ms = {name: statistics.median(seconds) * 1e3 for name, seconds in times.items()}
    rates = {name: nbytes / 1e6 / ms[name] for name in ("ours", "copy")}
    share = by_round(times["copy"], times["ours"]) / 2  # a copy reads and writes
    yield Result(f"{title}, of a copy", "GB/s", rates["ours"], BANDWIDTH_SHARE_LIMIT, "share", 2 * rates["copy"], share)
    peers = {"in order": PAGED_LIMIT, "jnp, gathered": PEER_LIMIT, "jnp, without pages": PEER_LIMIT}
    for peer, limit in peers.items():
        ratio = by_round(times["ours"], times[peer])
        yield Result(f"{title}, {peer}", "ms", ms["ours"], limit, "ratio", ms[peer], ratio)
    for dtype in ("int8", "float8_e4m3fn"):
        ratio = by_round(times[dtype], times["ours"])
        yield Result(f"{title}, cache of {dtype}", "ms", ms[dtype], QUANTIZED_LIMIT / 2, "ratio", ms["ours"], ratio)


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
