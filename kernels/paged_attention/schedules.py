"""The blocks of the ops and kernels."""

from __future__ import annotations

from typing import Any

import tilekern as tk
from tilekern.kernels.blocks import power_of_two
from tilekern.kernels.paged_attention.arguments import Cache, Tables
from tilekern.kernels.paged_attention.kernel import attention_of_parts, attention_of_tokens
from tilekern.kernels.paged_attention.op import decode_op, paged_attention_op

_LEAST_KEYS = 16
"""Keys of a tile on CPUs, at least, unless pages are smaller."""

_TILE_BYTES = 128 << 10
"""Bytes of keys and values of a tile on CPUs. While it is multiplied, the next one comes to the second-level cache."""


def keys_of_tile(page: int, most: int) -> int:
    """The largest number of keys up to `most` that is whole pages, or that divides a page."""
    if page <= most:
        return page * (most // page)
    return max(n for n in range(1, most + 1) if page % n == 0)


def heads_of_tile(cache: Cache) -> int:
    """So many heads that a CPU reads a page, or most of it, in one piece; they divide the heads.

    A head alone is a few hundred bytes of each key, which lie in pages of the system of their own.
    """
    bytes_of_head = 2 * min(cache.page, _LEAST_KEYS) * cache.width * cache.keys.dtype.itemsize
    most = _TILE_BYTES // max(1, bytes_of_head)
    return max((n for n in range(1, cache.heads + 1) if cache.heads % n == 0 and n <= most), default=1)


def _parts(cache: Cache, tables: Tables, device: tk.Device, heads: int = 1) -> int:
    """So many parts of the keys that all cores have work. A program has `heads` heads, a part 512 keys or more.

    A multiprocessor of a GPU runs four programs, which wait for their loads at different times. A TPU's cores compute
    all programs in turn.
    """
    programs = tables.lengths.shape[0] * cache.heads // heads
    enough = {"cpu": 16, "tpu": 1}.get(device.platform, 4 * device.cores)
    return max(1, min(tk.cdiv(enough, max(1, programs)), tables.pages.shape[1] * cache.page // 512))


def few_tokens(tokens: int, group: int, tables: Tables) -> int:
    """The mean number of tokens of a sequence, as long as 16 rows, the least of a product on GPUs, hold them.

    A token has `group` rows.
    """
    return max(1, min(tk.cdiv(tokens, max(1, tables.lengths.shape[0])), 16 // max(1, group)))


@decode_op.schedule("cpu")
@decode_op.schedule("cuda")
@decode_op.schedule("tpu")
def _decode(query: Any, cache: Cache, tables: Tables, terms: Any, device: tk.Device) -> dict[str, int]:
    return {"parts": _parts(cache, tables, device)}


@decode_op.schedule("cpu:llvm")
def _decode_llvm(query: Any, cache: Cache, tables: Tables, terms: Any, device: tk.Device) -> dict[str, int]:
    return {"parts": _parts(cache, tables, device, heads_of_tile(cache))}


@paged_attention_op.schedule("cpu")
@paged_attention_op.schedule("cuda")
@paged_attention_op.schedule("tpu")
def _ragged(query: Any, cache: Cache, tables: Tables, terms: Any, device: tk.Device) -> dict[str, int]:
    """Tiles of about 128 rows, the tokens of all heads that share a head of the keys.

    More rows on CPUs and TPUs, less on GPUs without tensor cores for the dtype.
    """
    rows = 256 if device.platform in ("cpu", "tpu") else 128 if query.dtype.itemsize == 2 else 64
    group = query.shape[1] // max(1, cache.heads)
    block_q = power_of_two(query.shape[0], max(1, rows // max(1, group)), 8)
    return {
        "few": few_tokens(query.shape[0], group, tables),
        "parts": _parts(cache, tables, device),
        "block_q": block_q,
    }


@paged_attention_op.schedule("cpu:llvm")
def _ragged_llvm(query: Any, cache: Cache, tables: Tables, terms: Any, device: tk.Device) -> dict[str, int]:
    """As elsewhere, but programs of parts have several heads."""
    blocks = _ragged(query, cache, tables, terms, device)
    return {**blocks, "parts": _parts(cache, tables, device, heads_of_tile(cache))}


@attention_of_tokens.schedule("cpu")
def _tokens_cpu(query: Any, items: Any, cache: Cache, tables: Any, terms: Any) -> dict[str, int]:
    return {"block_k": keys_of_tile(cache.page, 256)}


@attention_of_tokens.schedule("cuda")
def _tokens_cuda(query: Any, items: Any, cache: Cache, tables: Any, terms: Any, device: tk.Device) -> dict[str, int]:
    """Keys and values of two stages beside the queries."""
    wide = max(cache.keys.shape[3], cache.width)
    if query.dtype.itemsize > 2:
        return {"block_k": keys_of_tile(cache.page, 16), "num_warps": 8, "num_stages": 1}  # all operands in registers
    most = 128 if wide <= 128 else 64 if wide <= 256 else 32
    if device.matrix_unit == "mma":  # it takes its operands from registers, where numbers of 4 bits are unpacked
        most = min(most, 32 if cache.is_packed else 64)
    return {"block_k": keys_of_tile(cache.page, most), "num_warps": 8}


@attention_of_tokens.schedule("tpu")
def _tokens_tpu(query: Any, items: Any, cache: Cache, tables: Any, terms: Any) -> dict[str, int]:
    """All heads in a tile: a page is fetched as it lies in memory, and once. No load reads places of a vector."""
    return {"block_k": keys_of_tile(cache.page, 256), "block_g": cache.heads, "block_p": 1}


@attention_of_parts.schedule("cpu")
def _parts_cpu(query: Any, cache: Cache, tables: Any, terms: Any) -> dict[str, int]:
    """At most a page, of one head."""
    return {"block_k": keys_of_tile(cache.page, min(cache.page, 256))}


@attention_of_parts.schedule("cpu:llvm")
def _parts_llvm(query: Any, cache: Cache, tables: Any, terms: Any) -> dict[str, int]:
    """At most a page: the keys are read where they lie, whereas several pages are first copied to one tile."""
    heads = heads_of_tile(cache)
    most = max(1, _TILE_BYTES // max(1, 2 * heads * cache.width * cache.keys.dtype.itemsize))
    return {"block_k": keys_of_tile(cache.page, min(cache.page, most, 256)), "block_g": heads, "block_p": 1}


@attention_of_parts.schedule("cuda")
def _parts_cuda(query: Any, cache: Cache, tables: Any, terms: Any) -> dict[str, int]:
    """Few rows: loading keys and values takes the time, three stages of loads are in flight."""
    wide = max(cache.keys.shape[3], cache.width)
    if query.dtype.itemsize > 2:
        # No tensor cores: operands and sums are all in registers.
        block_k, num_warps = (8, 8) if query.shape[2] > 32 else (16, 4)
        return {"block_k": keys_of_tile(cache.page, block_k), "num_warps": num_warps, "num_stages": 2}
    num_warps = 8 if query.shape[2] > 64 else 4
    return {"block_k": keys_of_tile(cache.page, 64 if wide <= 256 else 32), "num_warps": num_warps, "num_stages": 3}


@attention_of_parts.schedule("tpu")
def _parts_tpu(query: Any, cache: Cache, tables: Any, terms: Any) -> dict[str, int]:
    """All heads in a tile, as for tokens."""
    return {"block_k": keys_of_tile(cache.page, 256), "block_g": cache.heads, "block_p": 1}
