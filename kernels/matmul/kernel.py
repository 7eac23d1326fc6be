"""The matmul kernel and its blocks."""

from __future__ import annotations

from typing import Any

import jax

import tilekern as tk
from tilekern.errors import ArgumentError
from tilekern.kernels.blocks import even


def _out_type(x: Any, w: Any) -> jax.ShapeDtypeStruct:
    if len(x.shape) != 2 or len(w.shape) != 2 or x.shape[1] != w.shape[0] or x.dtype != w.dtype:
        raise ArgumentError(
            "matmul takes two matrices of one dtype that fit",
            expected="x[M, K] and w[K, N] of one dtype",
            got=f"x = {x.dtype}{list(x.shape)}, w = {w.dtype}{list(w.shape)}",
            fix="reshape leading dims into M; cast with .astype",
        )
    return jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)


@tk.kernel(out_type=_out_type)
def matmul(
    x: tk.Ref, w: tk.Ref, out: tk.Ref, *, block_m: tk.Block = 128, block_n: tk.Block = 128, block_k: tk.Block = 64
) -> None:
    """out[M, N] = x[M, K] @ w[K, N], accumulated in float32 (float64; int32 for integers), in the dtype of x.

    Any sizes, blocks need not divide them.
    """
    i = tk.parallel(x.shape[0], block_m)
    j = tk.parallel(w.shape[1], block_n)

    def step(k: tk.Tile, acc: jax.Array) -> jax.Array:
        return tk.dot(x[i, k], w[k, j], acc)

    wide = tk.accumulator(x.dtype)
    acc = tk.fold(tk.serial(x.shape[1], block_k), step, tk.zeros((i, j), wide))
    out[i, j] = acc.astype(out.dtype)


@matmul.schedule("cpu")
def _cpu(x: jax.ShapeDtypeStruct, w: jax.ShapeDtypeStruct) -> dict[str, int]:
    """XLA's own matrix product is fastest on large blocks."""
    return {
        "block_m": even(x.shape[0], 512),
        "block_n": even(w.shape[1], 2048),
        "block_k": even(x.shape[1], 2048),
    }
