"""The rms_norm kernel and its blocks."""

from __future__ import annotations

from collections.abc import Callable
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

    Rows that fit a block are read once, longer rows twice.
    """
    i = tk.parallel(x.shape[0], block_rows)
    wide = tk.accumulator(x.dtype)
    _normalize(lambda j: x[i, j].astype(wide), weight, (out, None), i, eps, offset, block_columns)


def _two_results(x: Any, residual: Any, weight: Any) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return like_first(x), like_first(x)


@tk.kernel(out_type=_two_results)
def add_rms_norm_forward(
    x: tk.Ref,
    residual: tk.Ref,
    weight: tk.Ref | None,
    out: tk.Ref,
    total: tk.Ref,
    *,
    eps: float,
    offset: float,
    block_rows: tk.Block = 4,
    block_columns: tk.Block = 8192,
) -> None:
    """total[R, C] = x + residual, and out[R, C] = `rms_norm_forward` of the total as it is stored.

    Rows that fit a block are read once. Longer rows are read and added twice.
    """
    i = tk.parallel(x.shape[0], block_rows)
    wide = tk.accumulator(x.dtype)

    def add(j: Any) -> jax.Array:
        return (x[i, j].astype(wide) + residual[i, j].astype(wide)).astype(total.dtype).astype(wide)

    _normalize(add, weight, (out, total), i, eps, offset, block_columns)


def _normalize(
    load: Callable[[Any], jax.Array],
    weight: tk.Ref | None,
    results: tuple[tk.Ref, tk.Ref | None],
    i: tk.Tile,
    eps: float,
    offset: float,
    block_columns: int,
) -> None:
    """Store the normalised rows i, and the rows themselves if asked for; `load(j)` returns their columns j, wide."""
    out, total = results
    wide = tk.accumulator(out.dtype)
    width = out.shape[1]

    def store(s: jax.Array, j: Any, squares: jax.Array) -> None:
        if total is not None:
            total[i, j] = s.astype(total.dtype)
        s = s * jax.lax.rsqrt(squares / width + eps)[:, None]
        out[i, j] = (s if weight is None else s * (weight[j].astype(wide) + offset)[None, :]).astype(out.dtype)

    if width <= block_columns:
        s = load(slice(None))
        store(s, slice(None), (s * s).sum(axis=1))
        return

    def add(j: tk.Tile, squares: jax.Array) -> jax.Array:
        s = load(j)
        return squares + (s * s).sum(axis=1)

    columns = tk.serial(width, block_columns)
    squares = tk.fold(columns, add, tk.zeros(i, wide))
    tk.foreach(columns, lambda j: store(load(j), j, squares))


for _kernel in (rms_norm_forward, add_rms_norm_forward):
    _kernel.schedule("cpu")(coarse_blocks)
    _kernel.schedule("cpu:llvm")(cached_blocks)
    _kernel.schedule("cuda")(gpu_blocks)
    _kernel.schedule("tpu")(tpu_blocks)


def _backward(
    x: jax.Array,
    weight: jax.Array | None,
    cotangent: jax.Array,
    *,
    needs: tuple[bool, bool],
    eps: float,
    offset: float,
) -> Any:
    needs_sums = *needs, False
    cotangents = norm_backward(x, weight, cotangent, eps=eps, offset=offset, centered=False, needs=needs_sums)
    return cast_like(cotangents[:2], (x, weight))


rms_norm_tangent, rms_norm_backward = derive(rms_norm_forward, reference, _backward)


@add_rms_norm_forward.defjvp
def _add_jvp(primals: Any, tangents: Any, *, eps: float, offset: float, **blocks: int) -> Any:
    """The derivative of rms_norm at the stored total: the backward pass keeps only the total and the weight."""
    weight, (dx, dresidual, dweight) = primals[2], tangents
    out, total = add_rms_norm_forward(*primals, eps=eps, offset=offset, **blocks)
    moved = [d for d in (dx, dresidual) if d is not None]
    dtotal = sum(moved[1:], moved[0]) if moved else None
    settings = (("eps", eps), ("offset", offset))
    dout = rms_norm_tangent((total, weight), (dtotal, dweight), settings=settings)
    return (out, total), (dout, dtotal)
