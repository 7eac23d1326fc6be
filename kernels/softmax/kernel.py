"""The softmax kernel and its blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.rows import cached_blocks, coarse_blocks, gpu_blocks, like_first, tpu_blocks


@tk.kernel(out_type=like_first)
def softmax_forward(x: tk.Ref, out: tk.Ref, *, block_rows: tk.Block = 4, block_columns: tk.Block = 8192) -> None:
    """out[R, C] = the softmax of each row of x[R, C], C > 0, computed in float32 (float64 for float64).

    Rows that fit a block are read once. A longer row is read twice: first for its maximum and its sum by online softmax
    (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867, algorithm 3), then for the result.
    """
    i = tk.parallel(x.shape[0], block_rows)
    wide = tk.accumulator(x.dtype)

    if x.shape[1] <= block_columns:
        s = x[i].astype(wide)
        weights = jnp.exp(s - s.max(axis=1, keepdims=True))
        out[i] = (weights / weights.sum(axis=1, keepdims=True)).astype(out.dtype)
        return

    def gather(j: tk.Tile, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        m, d = carry
        s = x.load((i, j), fill=-jnp.inf).astype(wide)
        grown = jnp.maximum(m, s.max(axis=1))
        # Nothing but -inf so far: exp(-inf - 0) = 0, where -inf - -inf would be NaN.
        base = jnp.where(grown == -jnp.inf, 0, grown)
        return grown, d * jnp.exp(m - base) + jnp.exp(s - base[:, None]).sum(axis=1)

    columns = tk.serial(x.shape[1], block_columns)
    m, d = tk.fold(columns, gather, (tk.full(i, -jnp.inf, wide), tk.zeros(i, wide)))

    def write(j: tk.Tile) -> None:
        out[i, j] = (jnp.exp(x[i, j].astype(wide) - m[:, None]) / d[:, None]).astype(out.dtype)

    tk.foreach(columns, write)


softmax_forward.schedule("cpu")(coarse_blocks)
softmax_forward.schedule("cpu:llvm")(cached_blocks)
softmax_forward.schedule("cuda")(gpu_blocks)
softmax_forward.schedule("tpu")(tpu_blocks)
