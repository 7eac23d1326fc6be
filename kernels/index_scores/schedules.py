"""The blocks of the kernel."""

from __future__ import annotations

from typing import Any

from tilekern.kernels.index_scores.kernel import scores_of_keys
from tilekern.kernels.paged_attention.schedules import keys_of_tile


@scores_of_keys.schedule("cpu")
def _cpu(query: Any, weights: Any, keys: Any, scale: Any, places: Any) -> dict[str, int]:
    return {"block_k": keys_of_tile(keys.shape[1], 256)}


@scores_of_keys.schedule("cuda")
def _cuda(query: Any, weights: Any, keys: Any, scale: Any, places: Any) -> dict[str, int]:
    """Products of 64 heads and 128 keys; wider dtypes are multiplied in registers, and have fewer keys."""
    most = 128 if query.dtype.itemsize == 2 else 16
    return {"block_k": keys_of_tile(keys.shape[1], most), "num_warps": 8}


@scores_of_keys.schedule("tpu")
def _tpu(query: Any, weights: Any, keys: Any, scale: Any, places: Any) -> dict[str, int]:
    """At most 16 pages, each of which is a load of its own: no load reads places of a vector."""
    page = keys.shape[1]
    return {"block_k": keys_of_tile(page, min(256, 16 * page)), "block_p": 1}
