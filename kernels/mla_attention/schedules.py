"""The blocks of the ops and kernels."""

from __future__ import annotations

from typing import Any

import jax

import tilekern as tk
from tilekern.kernels.blocks import power_of_two, soonest_parts
from tilekern.kernels.mla_attention.arguments import Latents
from tilekern.kernels.mla_attention.kernel import latents_of_parts, latents_of_tokens
from tilekern.kernels.mla_attention.op import mla_decode_op, mla_ragged_op, mla_selected_op
from tilekern.kernels.paged_attention.arguments import Tables
from tilekern.kernels.paged_attention.schedules import few_tokens, keys_of_tile


def _rows(query: Latents, cache: Latents, device: tk.Device) -> int:
    """The most rows of a program, of heads and tokens."""
    if device.platform in ("cpu", "tpu"):
        return 128
    return _rows_and_keys(query, cache, device)[0]


def _rows_and_keys(query: Latents, cache: Latents, device: tk.Device) -> tuple[int, int]:
    """The most rows of a program on a GPU, and the most keys of a tile. 8 warps hold sums of rows of 512 numbers.

    64 rows fill wgmma, and take half of the registers for their sums; 32 keys in two stages take 147 KB of shared
    memory with their queries. Tiles of several pages take registers for the addresses, and numbers of 8 bits for their
    conversion. tcgen05 has no columns left for scores beside sums of 64 rows. On AMD's GPUs tiles of 16 keys spill
    nothing, while 32 keys spill 92 to 336 bytes, and 8 keys in float32 spill 760.
    """
    page = cache.latent.shape[1]
    if device.matrix_unit == "mfma":
        return (16 if query.latent.dtype.itemsize > 2 else 32), 16
    if query.latent.dtype.itemsize > 2:
        return 16, 8  # no tensor cores: operands and sums are all in registers
    if cache.latent.dtype.itemsize == 1:
        return 32, 16
    keys = 32 if page > 16 else 16
    shared = (64 + 2 * keys) * 2 * (query.latent.shape[-1] + (0 if query.rope is None else query.rope.shape[-1]))
    return (64 if device.matrix_unit != "tcgen05" and shared <= device.fast_memory else 32), keys


def _parts(query: Latents, cache: Latents, tables: Tables, device: tk.Device) -> int:
    """So many parts of the keys that all cores have work, where each part may have 512 keys or more."""
    programs = tables.lengths.shape[0] * tk.cdiv(query.latent.shape[1], _rows(query, cache, device))
    tiles = max(1, tables.pages.shape[1] * cache.latent.shape[1] // 512)
    return soonest_parts(programs, tiles, {"cpu": 16, "tpu": 1}.get(device.platform, device.cores))


@mla_decode_op.schedule("cpu")
@mla_decode_op.schedule("cuda")
@mla_decode_op.schedule("tpu")
def _decode(query: Latents, cache: Latents, tables: Tables, scales: Any, device: tk.Device) -> dict[str, int]:
    return {"parts": _parts(query, cache, tables, device)}


@mla_selected_op.schedule("cpu")
@mla_selected_op.schedule("cuda")
@mla_selected_op.schedule("tpu")
def _selected(query: Latents, cache: Latents, tables: Tables, scales: Any, device: tk.Device) -> dict[str, Any]:
    """On TPUs a load of one key would be a copy of its own from HBM; so XLA gathers the keys of all tokens."""
    rows = Latents(*(x if x is None else jax.ShapeDtypeStruct((1, 1, *x.shape[2:]), x.dtype) for x in cache))
    return {"parts": _parts(query, rows, tables, device), "gathered": device.platform == "tpu"}


@mla_ragged_op.schedule("cpu")
@mla_ragged_op.schedule("cuda")
@mla_ragged_op.schedule("tpu")
def _ragged(query: Latents, cache: Latents, tables: Tables, scales: Any, device: tk.Device) -> dict[str, int]:
    """Tiles of as many tokens as fit the rows of a program with all their heads."""
    tokens, heads, _ = query.latent.shape
    block_q = power_of_two(tokens, max(1, _rows(query, cache, device) // power_of_two(heads, 128)))
    return {
        "few": few_tokens(tokens, heads, tables),
        "parts": _parts(query, cache, tables, device),
        "block_q": block_q,
    }


@latents_of_tokens.schedule("cpu")
@latents_of_tokens.schedule("cuda")
@latents_of_tokens.schedule("tpu")
def _tokens(query: Latents, items: Any, cache: Latents, tables: Any, scales: Any, device: tk.Device) -> dict[str, int]:
    return _of_kernel(query, cache, device)


@latents_of_parts.schedule("cpu")
@latents_of_parts.schedule("cuda")
@latents_of_parts.schedule("tpu")
def _parts_of_keys(query: Latents, cache: Latents, tables: Any, scales: Any, device: tk.Device) -> dict[str, int]:
    """On GPUs, 16 rows or fewer leave registers for tiles of 64 keys, whose loads take the time: three stages.

    Not on GPUs with "mma" alone, for which ptxas takes 128 registers, and spills.
    Nor where shared memory has 64 KB (gfx942): three stages take 72.
    """
    blocks, page = _of_kernel(query, cache, device), cache.latent.shape[1]
    is_narrow = query.latent.shape[1] * blocks["block_n"] <= 16 and cache.latent.dtype.itemsize == 2
    if device.matrix_unit in ("", "mma") or device.fast_memory <= 64 << 10 or page <= 16 or not is_narrow:
        return blocks
    return {**blocks, "block_k": keys_of_tile(page, 64), "num_stages": 3}


def _of_kernel(query: Latents, cache: Latents, device: tk.Device) -> dict[str, int]:
    """On GPUs, parts of 256 columns: tensor copies take no more, and a product of queries reads shared memory.

    On TPUs a tile has 16 pages at most, each of which is a load of its own: no load reads places of a vector. CPUs
    gather the rows of a tile by one load, and multiply 256 keys at a time also where pages are single keys.
    """
    heads, page = query.latent.shape[-2], cache.latent.shape[1]
    if device.platform in ("cpu", "tpu"):
        most = 256 if device.platform == "cpu" else min(256, 16 * page)
        blocks = {"block_n": min(heads, _rows(query, cache, device)), "block_k": keys_of_tile(page, most)}
        return blocks | ({"block_p": 1} if device.platform == "tpu" else {})
    rows, keys = _rows_and_keys(query, cache, device)
    blocks = {"block_n": power_of_two(heads, rows), "block_k": keys_of_tile(page, keys), "block_c": 256}
    return {**blocks, "num_warps": 8, "num_stages": 2}
