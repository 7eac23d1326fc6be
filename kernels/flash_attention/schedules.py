"""Blocks of the kernels of flash attention's derivatives, and of all of its kernels under a block map."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import tilekern as tk
from tilekern.kernels.blocks import divisor, even, power_of_two, takes_registers, tiled
from tilekern.kernels.flash_attention.arguments import Config, Extras
from tilekern.kernels.flash_attention.mods import carried_by

Schedule = Callable[..., Mapping[str, int]]


def of_map(schedule: Schedule) -> Schedule:
    """The schedule, with tiles that divide the tiles of the block map if a call has one."""

    @wraps(schedule)
    def chosen(query: Any, key: Any, value: Any, extras: Extras, *inputs: Any, **statics: Any) -> Mapping[str, int]:
        blocks = schedule(query, key, value, extras, *inputs, **statics)
        if extras.block_map is None:
            return blocks
        coarse = {"block_q": extras.block_map.block_q, "block_k": extras.block_map.block_k}
        return {name: divisor(coarse[name], size) if name in coarse else size for name, size in blocks.items()}

    return chosen


def declare(kernel: Any) -> None:
    """Give a kernel of derivatives its schedules."""

    def cuda(
        query: Any, key: Any, value: Any, extras: Extras, *unused: Any, config: Config, device: tk.Device
    ) -> dict[str, int]:
        return _cuda(kernel.__name__, query, key, value, config=config, device=device)

    for target, schedule in (("cpu", _cpu), ("cuda", cuda), ("tpu", _tpu)):
        kernel.schedule(target)(of_map(schedule))


def _cpu(query: Any, key: Any, value: Any, extras: Extras, *unused: Any, config: Config) -> dict[str, int]:
    return {"block_q": even(query.shape[1], 256), "block_k": even(key.shape[1], 256), **dict(config.blocks)}


# For 16-bit numbers, by kernel and target, for heads up to a width: (queries, keys, warps, stages), then the same with
# smaller tiles for few programs. No tile spills registers when compiled with grouped heads and causal masks.
#
# A kernel streams one kind of rows past the rows that it owns: the more it owns, the less it loads for each product,
# and 128 is as many as the accumulators leave room for; FlashAttention-3 (https://arxiv.org/abs/2407.08608) has 128
# keys and 64 to 128 queries, with the backward kernels in one. Where heads are narrow, two programs fit on a
# multiprocessor, and one multiplies while the other computes exponentials.
_Tile = tuple[int, int, int, int]
_Tiles = tuple[tuple[int, _Tile, _Tile], ...]
_CUDA_TILES: dict[str, dict[str, _Tiles]] = {
    "flash_attention_backward_key": {
        "mma": (
            (64, (32, 128, 8, 2), (32, 64, 4, 3)),
            (128, (64, 64, 8, 2), (64, 64, 8, 2)),
            (192, (64, 64, 8, 1), (64, 64, 8, 1)),
            (256, (32, 64, 8, 2), (32, 64, 8, 2)),
        ),
        "mfma": (
            (64, (32, 128, 8, 2), (32, 64, 4, 3)),
            # 64 queries would spill on gfx950, and 32 of heads of 256 with two stages.
            (128, (32, 64, 8, 2), (32, 64, 8, 2)),
            (192, (64, 64, 8, 1), (64, 64, 8, 1)),
            (256, (32, 64, 8, 1), (32, 64, 8, 1)),
        ),
        "wgmma": (
            (64, (64, 128, 8, 3), (64, 64, 4, 3)),
            (128, (32, 128, 8, 2), (32, 64, 4, 2)),
            (192, (32, 64, 8, 2), (32, 64, 8, 2)),
            # 64 keys would spill: warpgroups do not compute products of 32 rows.
            (256, (64, 32, 8, 2), (64, 32, 8, 2)),
        ),
        "tcgen05": (
            (64, (64, 128, 8, 2), (64, 64, 4, 2)),
            (192, (64, 64, 8, 2), (64, 64, 8, 2)),
            (256, (32, 64, 8, 1), (32, 64, 8, 1)),
        ),
    },
    "flash_attention_backward_query": {
        "mma": (
            (128, (64, 64, 4, 2), (64, 64, 4, 2)),
            (192, (64, 32, 8, 2), (64, 32, 8, 2)),
            (256, (32, 32, 4, 2), (32, 32, 4, 2)),
        ),
        "wgmma": (
            (64, (128, 64, 8, 3), (64, 64, 4, 3)),
            (128, (128, 64, 8, 2), (64, 64, 4, 2)),
            (256, (128, 32, 8, 2), (64, 32, 4, 2)),
        ),
        "tcgen05": (
            (128, (128, 64, 8, 2), (64, 64, 4, 2)),
            (192, (128, 64, 8, 2), (64, 64, 4, 1)),
            (256, (128, 32, 8, 2), (64, 64, 4, 1)),
        ),
    },
    "flash_attention_tangent": {
        "mma": (
            (64, (64, 32, 4, 2), (64, 32, 4, 2)),
            (128, (32, 32, 4, 2), (32, 32, 4, 2)),
            (192, (32, 32, 4, 1), (32, 32, 4, 1)),
            (256, (16, 32, 4, 1), (16, 32, 4, 1)),
        ),
        "wgmma": (
            (128, (128, 64, 8, 2), (64, 64, 4, 2)),
            (192, (128, 32, 8, 2), (64, 64, 4, 1)),
            (256, (128, 16, 8, 1), (64, 16, 4, 1)),
        ),
        "tcgen05": (
            (128, (128, 64, 8, 2), (64, 64, 4, 2)),
            (192, (128, 64, 8, 1), (64, 64, 4, 1)),
            (256, (64, 32, 8, 1), (64, 32, 8, 1)),
        ),
    },
}

# For float32 and float64, whose operands are in registers: the same for rows of a head up to a number of bytes. A
# tangent in float32 of heads wider than 64 has too many operands for any tile, and spills.
_CUDA_WIDE_TILES: dict[str, tuple[tuple[int, tuple[int, int, int, int]], ...]] = {
    "flash_attention_backward_key": ((1024, (16, 32, 8, 2)),),
    "flash_attention_backward_query": ((512, (32, 16, 4, 2)), (1024, (16, 16, 4, 1))),
    "flash_attention_tangent": ((256, (16, 16, 4, 1)),),
}


def _cuda(kernel: str, query: Any, key: Any, value: Any, *, config: Config, device: tk.Device) -> dict[str, int]:
    """Tiles by kernel and the width of a head; smaller tiles where there are few programs."""
    # The kernel of terms is the kernel of queries without the last product.
    kernel = kernel if kernel in _CUDA_TILES else "flash_attention_backward_query"
    (batch, queries, heads, width), (keys, groups) = query.shape, key.shape[1:3]
    width = max(width, value.shape[3])
    if device.emitter == "gluon":
        # For each of two warpgroups, which share the streamed rows. The key gradient has two
        # sums, which leave no registers for masks of 64 queries of wide heads.
        narrow = kernel == "flash_attention_backward_key" and width > 64
        return {"block_q": 32 if narrow else 64, "block_k": 64, "num_warps": 8, **dict(config.blocks)}
    if query.dtype.itemsize > 2:
        row = width * query.dtype.itemsize
        tile = next((tile for limit, tile in _CUDA_WIDE_TILES[kernel] if row <= limit), (16, 16, 8, 1))
    else:
        tables = _CUDA_TILES[kernel]
        table = tables.get(device.matrix_unit, tables["mma"])
        tile, small = next((pair for limit, *pair in table if width <= limit), ((16, 16, 8, 1), (16, 16, 8, 1)))
        owns_keys = kernel == "flash_attention_backward_key"
        programs = groups * tk.cdiv(keys, tile[1]) if owns_keys else heads * tk.cdiv(queries, tile[0])
        if batch * programs < device.cores:
            tile = small  # more multiprocessors have work
        tile = _fitting(kernel, tile, query.shape[3], value.shape[3], device)
    block_q, block_k, num_warps, num_stages = tile
    return {
        "block_q": power_of_two(queries, block_q, 16),
        "block_k": power_of_two(keys, block_k, 16),
        "num_warps": num_warps,
        "num_stages": num_stages,
        **dict(config.blocks),
    }


def _fitting(kernel: str, tile: _Tile, width: int, of_values: int, device: tk.Device) -> _Tile:
    """Tile (block_q, block_k, num_warps, num_stages) of 16-bit numbers whose operands fit the shared memory.

    The streamed rows are halved, down to 16, until the operands fit. The streamed rows are the queries in the kernel
    "flash_attention_backward_key", and the keys in all other kernels. A halved tile has one stage, because with more
    some would spill.
    The shared memory also holds a tile of scores on its way from sums to operands; or three tiles, of different
    layouts, where products take operands from registers.
    """
    block_q, block_k, num_warps, num_stages = tile
    owns_keys = kernel == "flash_attention_backward_key"
    own, streamed = (block_k, block_q) if owns_keys else (block_q, block_k)
    per_owned = per_streamed = width + of_values  # elements of a row
    if kernel == "flash_attention_tangent":
        per_owned, per_streamed = 2 * width, 2 * (width + of_values)
    in_registers = takes_registers(device)
    buffers, scores = max(1, num_stages - in_registers), 3 if in_registers else 1  # buffers as in `stages`
    while (
        streamed > 16
        and 2 * (own * per_owned + streamed * (buffers * per_streamed + scores * own)) > device.fast_memory
    ):
        streamed, num_stages, buffers = streamed // 2, 1, 1
    return (streamed, own, num_warps, num_stages) if owns_keys else (own, streamed, num_warps, num_stages)


def _tpu(query: Any, key: Any, value: Any, extras: Extras, *unused: Any, config: Config, target: str) -> dict[str, int]:
    """Best by the static estimate, for 1024 and 4096 queries and heads of 64 to 256: 1024 queries and keys, or 512.

    On the diagonal half of a tile is wasted. Where matrix units are slow this costs more than large tiles save, because
    they bound all derivatives. Values between a score and its exponential spill: with large tiles they take up to
    35 MiB, and compiling takes ten times as long. The same holds for float32, whose products take several passes.
    """
    slow = target in ("tpu:v5e", "tpu:v5p")
    slow_terms = extras.bias is not None or extras.score_mod is not None or config.softcap or config.dropout_rate
    limit = 512 if query.dtype.itemsize > 2 or slow_terms or (slow and config.causal) else 1024
    blocks = {"block_q": tiled(query.shape[1], limit, 128), "block_k": tiled(key.shape[1], limit, 128)}
    return {**blocks, **dict(config.blocks)}


def tpu_backward(
    query: Any, key: Any, value: Any, extras: Extras, *unused: Any, config: Config, device: tk.Device
) -> dict[str, int]:
    """One kernel for all cotangents, which computes scores once, if its sums of a head fit VMEM as a whole.

    The sums are dq, and where heads share keys dk and dv, in float32. With query and its cotangent they may take 0.6 of
    VMEM, in two buffers each. Arrays with an element for each score leave no room.
    """
    (queries, heads, width), (keys, groups) = query.shape[1:], key.shape[1:3]
    width, of_values = (tk.cdiv(n, device.lanes) * device.lanes for n in (width, value.shape[3]))
    nbytes = queries * (4 * width + query.dtype.itemsize * (width + of_values))
    if heads > groups:
        nbytes += 4 * keys * (width + of_values)
    tables = has_terms(extras) or _is_table(extras.mask)
    return {"one_kernel": 2 * nbytes <= 0.6 * device.fast_memory and not tables}


def has_terms(extras: Extras) -> bool:
    """True if a bias or a `score_mod` adds numbers from a matrix to scores."""
    return any(map(_is_table, (extras.bias, *carried_by(extras.score_mod))))


def _is_table(x: Any) -> bool:
    return x is not None and len(x.shape) >= 2 and min(x.shape[-2:]) > 1


def cpu_backward(query: Any, key: Any, value: Any, extras: Extras, *unused: Any, target: str) -> dict[str, int]:
    """Guards large logits where the last bits of dot products vary: with XLA by shape, with cpu:llvm for one row."""
    return {"guarded": target == "cpu:xla" or query.shape[1] == 1}
