"""The kernel of the logarithm of softmax, which adds no logarithm of a weight that is rounded to 0."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.rows import cached_blocks, coarse_blocks, gpu_blocks, like_first, tpu_blocks
from tilekern.kernels.softmax.kernel import online_sums, softmax_forward


@tk.kernel(out_type=like_first)
def log_softmax_forward(x: tk.Ref, out: tk.Ref, *, block_rows: tk.Block = 4, block_columns: tk.Block = 8192) -> None:
    """out[R, C] = x - the logsumexp of each row of x[R, C], C > 0, computed in float32 (float64 for float64).

    Rows that fit a block are read once, longer rows twice, as by `softmax_forward`.
    """
    i = tk.parallel(x.shape[0], block_rows)
    wide = tk.accumulator(x.dtype)

    if x.shape[1] <= block_columns:
        s = x[i].astype(wide)
        shifted = s - s.max(axis=1, keepdims=True)
        out[i] = (shifted - jnp.log(jnp.exp(shifted).sum(axis=1, keepdims=True))).astype(out.dtype)
        return

    columns = tk.serial(x.shape[1], block_columns)
    m, d = online_sums(x, i, columns)

    def write(j: tk.Tile) -> None:
        # The difference from the maximum comes first: beside a large maximum log(d) would be lost.
        out[i, j] = (x[i, j].astype(wide) - m[:, None] - jnp.log(d)[:, None]).astype(out.dtype)

    tk.foreach(columns, write)


@log_softmax_forward.defjvp
def _forward_jvp(primals: tuple[Any], tangents: tuple[Any], **blocks: int) -> tuple[jax.Array, jax.Array]:
    """d out = t - Σ p t of each row, with p the softmax, from x: exp(out) would take on the rounding of out."""
    (x,), (t,) = primals, tangents
    wide = tk.accumulator(x.dtype)
    p, t = softmax_forward(x, **blocks).astype(wide), t.astype(wide)
    return log_softmax_forward(x, **blocks), (t - (p * t).sum(axis=1, keepdims=True)).astype(x.dtype)


log_softmax_forward.schedule("cpu")(coarse_blocks)
log_softmax_forward.schedule("cpu:llvm")(cached_blocks)
log_softmax_forward.schedule("cuda")(gpu_blocks)
log_softmax_forward.schedule("tpu")(tpu_blocks)
