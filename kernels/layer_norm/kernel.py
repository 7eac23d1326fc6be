"""The layer_norm kernel and its blocks.

A row in several tiles: with count n, mean μ and M = Σ (x - μ)² of the elements so far, and n', μ', M' of the next tile,
the elements together have (Chan, Golub and LeVeque 1979, Updating formulae, equation 2.1)

    μ + δ n' / (n + n')   and   M + M' + δ² n n' / (n + n'),   δ = μ' - μ.

Unlike Σ x² - n μ² nothing cancels where the mean is large against the deviation.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.derivatives import cast_like, derive
from tilekern.kernels.layer_norm.reference import reference
from tilekern.kernels.norms import norm_backward
from tilekern.kernels.rows import cached_blocks, coarse_blocks, gpu_blocks, like_first, tpu_blocks


@tk.kernel(out_type=like_first)
def layer_norm_forward(
    x: tk.Ref,
    weight: tk.Ref | None,
    bias: tk.Ref | None,
    out: tk.Ref,
    *,
    eps: float,
    block_rows: tk.Block = 4,
    block_columns: tk.Block = 8192,
) -> None:
    """out[R, C] = (x[R, C] - mean) / √(var + eps) * weight[C] + bias[C], computed in float32 (float64 for float64).

    Rows that fit a block are read once, longer rows twice.
    """
    i = tk.parallel(x.shape[0], block_rows)
    wide = tk.accumulator(x.dtype)
    width = x.shape[1]

    def normalized(centered: jax.Array, j: Any, squares: jax.Array) -> jax.Array:
        s = centered * jax.lax.rsqrt(squares / width + eps)[:, None]
        if weight is not None:
            s = s * weight[j].astype(wide)[None, :]
        return (s if bias is None else s + bias[j].astype(wide)[None, :]).astype(out.dtype)

    if width <= block_columns:
        s = x[i].astype(wide)
        centered = s - s.mean(axis=1, keepdims=True)
        out[i] = normalized(centered, slice(None), (centered * centered).sum(axis=1))
        return

    def merge(j: tk.Tile, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        mean, squares = carry
        s = x[i, j].astype(wide)
        before = jnp.asarray(j.start, wide)
        count = jnp.minimum(width - before, j.size)
        tile_mean = s.sum(axis=1) / count
        centered = jnp.where(j.valid[None, :], s - tile_mean[:, None], 0)
        shift, share = tile_mean - mean, count / (before + count)
        squares = squares + (centered * centered).sum(axis=1) + shift * shift * (before * share)
        return mean + shift * share, squares

    def write(j: tk.Tile) -> None:
        out[i, j] = normalized(x[i, j].astype(wide) - mean[:, None], j, squares)

    columns = tk.serial(width, block_columns)
    mean, squares = tk.fold(columns, merge, (tk.zeros(i, wide), tk.zeros(i, wide)))
    tk.foreach(columns, write)


layer_norm_forward.schedule("cpu")(coarse_blocks)
layer_norm_forward.schedule("cpu:llvm")(cached_blocks)
layer_norm_forward.schedule("cuda")(gpu_blocks)
layer_norm_forward.schedule("tpu")(tpu_blocks)


def _backward(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    cotangent: jax.Array,
    *,
    needs: tuple[bool, bool, bool],
    eps: float,
) -> Any:
    cotangents = norm_backward(x, weight, cotangent, eps=eps, offset=0.0, centered=True, needs=needs)
    return cast_like(cotangents, (x, weight, bias))


layer_norm_tangent, layer_norm_backward = derive(layer_norm_forward, reference, _backward)
