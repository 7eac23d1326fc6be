"""The rms_norm kernel and its blocks."""

from __future__ import annotations

from typing import Any

import jax

import tilekern as tk
from tilekern.kernels.derivatives import cast_like, derive
from tilekern.kernels.norms import norm_backward
from tilekern.kernels.rms_norm.reference import reference
from tilekern.kernels.rows import cached_blocks, coarse_blocks, gpu_blocks, like_first, tpu_blocks


@tk.kernel(out_type=like_first)
def rms_norm_forward(
    x: tk.Ref,
    weight: tk.Ref | None,
    out: tk.Ref,
    *,
    eps: float,
    offset: float,
    block_rows: tk.Block = 4,
    block_columns: tk.Block = 8192,
) -> None:
    """out[R, C] = x[R, C] / √(mean x² + eps) * (weight[C] + offset), computed in float32 (float64 for float64).

    Rows that fit a block are read once, longer ones twice.
    """
    i = tk.parallel(x.shape[0], block_rows)
    wide = tk.accumulator(x.dtype)
    width = x.shape[1]

    def normalized(s: jax.Array, j: Any, squares: jax.Array) -> jax.Array:
        s = s * jax.lax.rsqrt(squares / width + eps)[:, None]
        return (s if weight is None else s * (weight[j].astype(wide) + offset)[None, :]).astype(out.dtype)

    if width <= block_columns:
        s = x[i].astype(wide)
        out[i] = normalized(s, slice(None), (s * s).sum(axis=1))
        return

    def add(j: tk.Tile, squares: jax.Array) -> jax.Array:
        s = x[i, j].astype(wide)
        return squares + (s * s).sum(axis=1)

    def write(j: tk.Tile) -> None:
        out[i, j] = normalized(x[i, j].astype(wide), j, squares)

    columns = tk.serial(width, block_columns)
    squares = tk.fold(columns, add, tk.zeros(i, wide))
    tk.foreach(columns, write)


rms_norm_forward.schedule("cpu")(coarse_blocks)
rms_norm_forward.schedule("cpu:llvm")(cached_blocks)
rms_norm_forward.schedule("cuda")(gpu_blocks)
rms_norm_forward.schedule("tpu")(tpu_blocks)


def _backward(
    x: jax.Array,
    weight: jax.Array | None,
    cotangent: jax.Array,
    *,
    wanted: tuple[bool, bool],
    eps: float,
    offset: float,
) -> Any:
    wanted_sums = *wanted, False
    found = norm_backward(x, weight, cotangent, eps=eps, offset=offset, centered=False, wanted=wanted_sums)
    return cast_like(found[:2], (x, weight))


rms_norm_tangent, rms_norm_backward = derive(rms_norm_forward, reference, _backward)
