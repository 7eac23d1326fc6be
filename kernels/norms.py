"""The backward kernel of the norms of rows, `rms_norm` and `layer_norm`.

With the mean μ of a row (0 where it is not subtracted), its deviation σ, h = (x - μ) / σ and g = cotangent * weight,

    dx = (g - mean g - h mean(g h)) / σ  (without mean g where μ is not subtracted),
    dweight = Σ cotangent h  and  dbias = Σ cotangent  over rows.

A row in several tiles: Σ (g - mean g) (x - μ) of parts is merged as Σ (x - μ)² is, by Chan, Golub and LeVeque 1979,
Updating formulae, equation 2.1, whose proof holds for products of two deviations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.blocks import power_of_two
from tilekern.kernels.rows import cached_blocks, coarse_blocks, like_first, tpu_blocks, warps_for


def _types(x: Any, weight: Any, cotangent: Any, *, needs: tuple[bool, bool, bool]) -> tuple[Any, ...]:
    sums = (jax.ShapeDtypeStruct(x.shape[1:], tk.accumulator(x.dtype)) if n else None for n in needs[1:])
    return like_first(x) if needs[0] else None, *(None if s is None else tk.Sum(s) for s in sums)


@tk.kernel(out_type=_types)
def norm_backward(
    x: tk.Ref,
    weight: tk.Ref | None,
    cotangent: tk.Ref,
    dx: tk.Ref | None,
    dweight: tk.Ref | None,
    dbias: tk.Ref | None,
    *,
    eps: float,
    offset: float,
    centered: bool,
    needs: tuple[bool, bool, bool],
    block_rows: tk.Block = 4,
    block_columns: tk.Block = 8192,
    tiles: tk.Block = 1,
) -> None:
    """x[R, C], weight[C], cotangent[R, C] -> dx[R, C], dweight[C], dbias[C]; None without a flag in `needs`.

    The sums over rows are in float32 (float64 for float64). A program computes `tiles` tiles of whole rows, and adds
    its part of the sums once. Rows that fit a block are read once. Longer rows are read twice, by programs of one tile.
    """
    rows, width = x.shape
    wide = tk.accumulator(x.dtype)
    sums = dweight, dbias

    def load(i: tk.Tile, j: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x, the cotangent, and g."""
        c = cotangent[i, j].astype(wide)
        g = c if weight is None else c * (weight[j].astype(wide) + offset)[None, :]
        return x[i, j].astype(wide), c, g

    def inverse(i: tk.Tile, squares: jax.Array) -> jax.Array:
        """1 / σ; 0 for rows past the end, which would add NaN to the sums where eps is 0."""
        return jnp.where(i.valid, jax.lax.rsqrt(squares / width + eps), 0)[:, None]

    def whole(i: tk.Tile) -> tuple[jax.Array, jax.Array]:
        """Store dx of a tile of whole rows, and return the addends of dweight and dbias, [rows, C]."""
        s, c, g = load(i, slice(None))
        s = s - s.mean(axis=1, keepdims=True) if centered else s
        r = inverse(i, (s * s).sum(axis=1))
        h = s * r
        if dx is not None:
            moved = g - g.mean(axis=1, keepdims=True) if centered else g
            dx[i] = ((moved - h * (g * h).mean(axis=1, keepdims=True)) * r).astype(dx.dtype)
        return c * h, c

    if width <= block_columns:
        _over_rows(rows, block_rows, tiles if any(needs[1:]) else 1, whole, sums, wide)
        return

    def merge(j: tk.Tile, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        mean, mean_g, squares, products = carry
        s, _, g = load(i, j)
        if not centered:
            return mean, mean_g, squares + (s * s).sum(axis=1), products + (g * s).sum(axis=1)
        before = jnp.asarray(j.start, wide)
        count = jnp.minimum(width - before, j.size)
        shift, shift_g = s.sum(axis=1) / count - mean, g.sum(axis=1) / count - mean_g
        s = jnp.where(j.valid[None, :], s - (mean + shift)[:, None], 0)
        between = before * count / (before + count)
        squares = squares + (s * s).sum(axis=1) + shift * shift * between
        # Deviations from a mean add up to 0, so g needs no subtraction of its mean here.
        products = products + (g * s).sum(axis=1) + shift * shift_g * between
        share = count / (before + count)
        return mean + shift * share, mean_g + shift_g * share, squares, products

    i = tk.parallel(rows, block_rows)
    columns = tk.serial(width, block_columns)
    mean, mean_g, squares, products = tk.fold(columns, merge, (tk.zeros(i, wide),) * 4)
    r = inverse(i, squares)

    def write(j: tk.Tile) -> None:
        s, c, g = load(i, j)
        h = (s - mean[:, None]) * r
        if dx is not None:
            dx[i, j] = ((g - mean_g[:, None] - h * (products[:, None] * r / width)) * r).astype(dx.dtype)
        _add(sums, j, (c * h, c))

    tk.foreach(columns, write)


Addends = tuple[jax.Array | None, ...]


def _over_rows(
    rows: int, block: int, tiles: int, whole: Callable[[tk.Tile], Addends], sums: tuple[tk.Ref | None, ...], wide: Any
) -> None:
    """Run `whole` on all tiles of rows, `tiles` tiles in a program, and sum the addends that it returns."""
    if tiles == 1:
        _add(sums, slice(None), whole(tk.parallel(rows, block)))
        return
    p = tk.parallel(tk.cdiv(rows, block * tiles))

    def step(t: jax.Array, carry: Addends) -> Addends:
        addends = whole(tk.tile(rows, block, p * tiles + t))
        return tuple(None if c is None or a is None else c + a for c, a in zip(carry, addends, strict=True))

    zeros = tuple(None if s is None else tk.zeros((block, s.shape[0]), wide) for s in sums)
    _add(sums, slice(None), tk.fold(tk.serial(tiles), step, zeros))


def _add(sums: tuple[tk.Ref | None, ...], j: Any, addends: Addends) -> None:
    for total, addend in zip(sums, addends, strict=True):
        if total is not None and addend is not None:
            total.at[j].add(addend.sum(axis=0))


norm_backward.schedule("cpu")(coarse_blocks)
norm_backward.schedule("cpu:llvm")(cached_blocks)
norm_backward.schedule("tpu")(tpu_blocks)


@norm_backward.schedule("cuda")
def _cuda(x: Any, weight: Any, cotangent: Any, *, device: tk.Device) -> dict[str, int]:
    """Four programs for each multiprocessor; each adds its part of the sums over rows once.

    The sums stay in registers beside x and the cotangent, so rows longer than 8192 are cut.
    """
    rows, columns = x.shape
    block_columns = power_of_two(columns, 8192) if columns <= 8192 else 4096
    block_rows = power_of_two(rows, max(1, 2048 // block_columns))
    tiles = max(1, tk.cdiv(rows, block_rows * 4 * device.cores)) if columns <= block_columns else 1
    num_warps = warps_for(block_rows * block_columns)
    return {"block_rows": block_rows, "block_columns": block_columns, "tiles": tiles, "num_warps": num_warps}
