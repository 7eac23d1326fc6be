"""The softmax kernel and its blocks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name  # pyright: ignore[reportUnknownVariableType] -- JAX's annotation

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

    columns = tk.serial(x.shape[1], block_columns)
    m, d = online_sums(x, i, columns)

    def write(j: tk.Tile) -> None:
        out[i, j] = (jnp.exp(x[i, j].astype(wide) - m[:, None]) / d[:, None]).astype(out.dtype)

    tk.foreach(columns, write)


def online_sums(x: tk.Ref, i: tk.Tile, columns: Any) -> tuple[jax.Array, jax.Array]:
    """(m, d) of some rows of x, read once: the maximum of each row, and the sum of exp(x - m)."""
    wide = tk.accumulator(x.dtype)

    def gather(j: tk.Tile, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        m, d = carry
        s = x.load((i, j), fill=-jnp.inf).astype(wide)
        grown = jnp.maximum(m, s.max(axis=1))
        # Nothing but -inf so far: exp(-inf - 0) = 0, where -inf - -inf would be NaN.
        base = jnp.where(grown == -jnp.inf, 0, grown)
        return grown, d * jnp.exp(m - base) + jnp.exp(s - base[:, None]).sum(axis=1)

    return tk.fold(columns, gather, (tk.full(i, -jnp.inf, wide), tk.zeros(i, wide)))


@tk.kernel(out_type=like_first, linear=("tangent",))
def softmax_tangent(
    weights: tk.Ref, tangent: tk.Ref, out: tk.Ref, *, block_rows: tk.Block = 4, block_columns: tk.Block = 8192
) -> None:
    """The derivative of `softmax_forward` at its result: weights[R, C] * (tangent[R, C] - Σ weights tangent).

    Its matrix diag(p) - p pᵀ is symmetric, so that it is its own transpose, and serves both modes.
    """
    i = tk.parallel(weights.shape[0], block_rows)
    wide = tk.accumulator(weights.dtype)

    if weights.shape[1] <= block_columns:
        p, t = weights[i].astype(wide), tangent[i].astype(wide)
        out[i] = (p * (t - (p * t).sum(axis=1, keepdims=True))).astype(out.dtype)
        return

    def add(j: tk.Tile, total: jax.Array) -> jax.Array:
        return total + (weights[i, j].astype(wide) * tangent[i, j].astype(wide)).sum(axis=1)

    def write(j: tk.Tile) -> None:
        p, t = weights[i, j].astype(wide), tangent[i, j].astype(wide)
        out[i, j] = (p * (t - total[:, None])).astype(out.dtype)

    columns = tk.serial(weights.shape[1], block_columns)
    total = tk.fold(columns, add, tk.zeros(i, wide))
    tk.foreach(columns, write)


@softmax_forward.defjvp
def _forward_jvp(primals: tuple[Any], tangents: tuple[Any], **blocks: int) -> tuple[jax.Array, jax.Array]:
    weights = checkpoint_name(softmax_forward(*primals, **blocks), "softmax_out")
    return weights, softmax_tangent(weights, *tangents, **blocks)


@softmax_tangent.deftranspose
def _tangent_transpose(cotangent: jax.Array, weights: jax.Array, tangent: Any, **blocks: int) -> dict[str, jax.Array]:
    return {"tangent": softmax_tangent(weights, cotangent, **blocks)}


@softmax_tangent.defjvp
def _tangent_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any], **blocks: int) -> tuple[jax.Array, jax.Array]:
    """Along the weights; d softmax_tangent = dp (t - Σ p t) - p Σ dp t."""
    (weights, _), (moved, _) = primals, tangents
    p, t, dp = (x.astype(tk.accumulator(x.dtype)) for x in (*primals, moved))
    total, moved_total = (jnp.sum(x * t, axis=1, keepdims=True) for x in (p, dp))
    return softmax_tangent(*primals, **blocks), (dp * (t - total) - p * moved_total).astype(weights.dtype)


for _kernel in (softmax_forward, softmax_tangent):
    _kernel.schedule("cpu")(coarse_blocks)
    _kernel.schedule("cpu:llvm")(cached_blocks)
    _kernel.schedule("cuda")(gpu_blocks)
    _kernel.schedule("tpu")(tpu_blocks)
