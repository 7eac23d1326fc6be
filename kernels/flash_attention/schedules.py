"""Blocks of the kernels of flash attention's derivatives, and of all of its kernels under a block map."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from tilekern.kernels.blocks import even, power_of_two, tiled
from tilekern.kernels.flash_attention.arguments import Config, Extras

Schedule = Callable[..., Mapping[str, int]]


def of_map(schedule: Schedule) -> Schedule:
    """A schedule whose tiles divide those of the block map, if there is one."""

    @wraps(schedule)
    def chosen(query: Any, key: Any, value: Any, extras: Extras, *others: Any, **statics: Any) -> Mapping[str, int]:
        blocks = schedule(query, key, value, extras, *others, **statics)
        if extras.block_map is None:
            return blocks
        coarse = {"block_q": extras.block_map.block_q, "block_k": extras.block_map.block_k}
        return {name: _divisor(coarse[name], size) if name in coarse else size for name, size in blocks.items()}

    return chosen


def _divisor(whole: int, most: int) -> int:
    """The largest divisor of `whole` that is at most `most`."""
    return max(n for n in range(1, whole + 1) if whole % n == 0 and n <= most)


def declare(kernel: Any) -> None:
    """Give a kernel of derivatives its schedules."""
    for target, schedule in (("cpu", _cpu), ("cuda", _cuda), ("tpu", _tpu)):
        kernel.schedule(target)(of_map(schedule))


def _cpu(query: Any, key: Any, value: Any, extras: Extras, *others: Any, config: Config) -> dict[str, int]:
    return {"block_q": even(query.shape[1], 256), "block_k": even(key.shape[1], 256), **dict(config.blocks)}


def _cuda(query: Any, key: Any, value: Any, extras: Extras, *others: Any, config: Config) -> dict[str, int]:
    """Two accumulators and two matrices of scores have to fit the registers."""
    wide = max(query.shape[3], value.shape[3]) * query.dtype.itemsize
    block_q, block_k, num_warps = (64, 64, 4) if wide <= 128 else (64, 64, 8) if wide <= 256 else (32, 32, 4)
    return {
        "block_q": power_of_two(query.shape[1], block_q, 16),
        "block_k": power_of_two(key.shape[1], block_k, 16),
        "num_warps": num_warps,
        "num_stages": 2 if wide <= 256 else 1,
        **dict(config.blocks),
    }


def _tpu(query: Any, key: Any, value: Any, extras: Extras, *others: Any, config: Config) -> dict[str, int]:
    blocks = {"block_q": tiled(query.shape[1], 512, 128), "block_k": tiled(key.shape[1], 512, 128)}
    return {**blocks, **dict(config.blocks)}
