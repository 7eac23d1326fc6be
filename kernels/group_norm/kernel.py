"""The group_norm kernel and its backward kernel, for samples of which a program computes whole groups.

Sums over positions are by channel, so that lanes are channels; then sums by group add few numbers. With the mean μ_c
and M_c = Σ (x - μ_c)² of each channel over S positions, a group of D channels has (Chan, Golub and LeVeque 1979,
Updating formulae, equation 2.1)

    μ = Σ μ_c / D   and   S D var = Σ M_c + S Σ (μ_c - μ)².

With h = (x - μ) / σ, z = h weight + bias and g = cotangent act'(z), the cotangents are dbias = Σ g and
dweight = Σ g h over samples and positions. With P = Σ weight Σ_s g and Q = Σ weight Σ_s g h over a group's channels,

    dx = (g weight - P / (S D) - h Q / (S D)) / σ.
"""

from __future__ import annotations

from collections.abc import Callable
from math import lcm
from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.blocks import even, power_of_two, takes_registers, tiled
from tilekern.kernels.derivatives import cast_like, derive
from tilekern.kernels.group_norm.reference import definition
from tilekern.kernels.rows import CACHED_ELEMENTS, TILE_ELEMENTS, like_first, warps_for

Moments = tuple[jax.Array, jax.Array]


def by_group(values: jax.Array, size: int) -> jax.Array:
    """[C]: for each channel the sum of values[C] over the channels of its group.

    C is a multiple of `size`. Masked lanes are summed, because no reshape of lanes is cheap on all targets.
    """
    count = values.shape[0] // size
    if size == 1:
        return values
    if count == 1:
        return jnp.broadcast_to(values.sum(), values.shape)
    shape = count, values.shape[0]
    mine = jax.lax.broadcasted_iota(jnp.int32, shape, 0) == jax.lax.broadcasted_iota(jnp.int32, shape, 1) // size
    sums = jnp.where(mine, values[None, :], 0).sum(axis=1)
    return jnp.where(mine, sums[:, None], 0).sum(axis=0)


def of_groups(moments: Moments, rows: int, size: int, eps: float) -> Moments:
    """The mean and 1 / σ of each channel's group, [C] each, from each channel's mean and Σ (x - mean)²."""
    means, squares = moments
    first = by_group(means, size) / size
    mean = first + by_group(means - first, size) / size
    between = means - mean
    variance = by_group(squares + rows * (between * between), size) / (rows * size)
    return mean, jax.lax.rsqrt(variance + eps)


def moments_of(s: jax.Array, count: Any, valid: jax.Array | None = None) -> Moments:
    """The mean and Σ (x - mean)² of each channel over the `count` valid rows of s; invalid rows are 0.

    The sum of many numbers with a large mean loses their last digits; the sum of deviations restores the digits.
    """
    first = s.sum(axis=0) / count
    centered = s - first[None, :]
    centered = centered if valid is None else jnp.where(valid[:, None], centered, 0)
    shift = centered.sum(axis=0) / count
    return first + shift, jnp.maximum((centered * centered).sum(axis=0) - count * shift * shift, 0)


def merged(j: tk.Tile, first: Any, rows: int, s: jax.Array, earlier: Moments) -> Moments:
    """The moments of rows `first` to the end of tile j, from `earlier` (the rows before j) and s, the elements of j."""
    before, count = (jnp.asarray(n, s.dtype) for n in (j.start - first, jnp.minimum(rows - j.start, j.size)))
    means, squares = moments_of(s, count, j.valid)
    shift, share = means - earlier[0], count / (before + count)
    return earlier[0] + shift * share, earlier[1] + squares + shift * shift * (before * share)


def channels(values: tk.Ref | None, c: Any, wide: Any) -> jax.Array | None:
    """The weights or biases of channels c; None if absent."""
    return None if values is None else values[c].astype(wide)


def result(h: jax.Array, weight: jax.Array | None, bias: jax.Array | None, activation: str | None) -> jax.Array:
    """The result for normalised elements h[S, C]."""
    z = h if weight is None else h * weight[None, :]
    z = z if bias is None else z + bias[None, :]
    return jax.nn.silu(z) if activation == "silu" else z


def through_activation(
    cotangent: jax.Array, h: jax.Array, weight: jax.Array | None, bias: jax.Array | None, activation: str | None
) -> jax.Array:
    """g: the cotangent before the activation, from the cotangent of the result."""
    if activation is None:
        return cotangent
    z = result(h, weight, bias, None)
    share = jax.nn.sigmoid(z)
    return cotangent * share * (1 + z * (1 - share))


@tk.kernel(out_type=like_first)
def group_norm_forward(
    x: tk.Ref,
    weight: tk.Ref | None,
    bias: tk.Ref | None,
    out: tk.Ref,
    *,
    size: int,
    eps: float,
    activation: str | None,
    block_s: tk.Block = 64,
    block_g: tk.Block = 1,
) -> None:
    """x[N, S, C], weight[C], bias[C] -> out[N, S, C], in groups of `size` channels, computed in float32 (or float64).

    A program computes block_g groups of one sample. It reads x once if all positions fit a block, else twice.
    """
    n, g = tk.parallel(x.shape[0]), tk.parallel(x.shape[2] // size, block_g)
    c, rows, wide = g * size, x.shape[1], tk.accumulator(x.dtype)
    scale, shift = channels(weight, c, wide), channels(bias, c, wide)

    def write(j: Any, s: jax.Array, moments: Moments) -> None:
        mean, factor = moments[0], moments[1] if scale is None else moments[1] * scale
        out[n, j, c] = result(s - mean[None, :], factor, shift, activation).astype(out.dtype)

    if rows <= block_s:
        s = x[n, :, c].astype(wide)
        write(slice(None), s, of_groups(moments_of(s, rows), rows, size, eps))
        return
    moments, positions = _moments(x, n, c, block_s), tk.serial(rows, block_s)
    group_moments = of_groups(moments, rows, size, eps)
    tk.foreach(positions, lambda j: write(j, x[n, j, c].astype(wide), group_moments))


def _moments(x: tk.Ref, n: Any, c: tk.Tile, block_s: int) -> Moments:
    """The moments of channels c of sample n, over tiles of positions."""
    wide = tk.accumulator(x.dtype)
    zeros = tk.zeros(c, wide), tk.zeros(c, wide)
    positions = tk.serial(x.shape[1], block_s)
    return tk.fold(positions, lambda j, m: merged(j, 0, x.shape[1], x[n, j, c].astype(wide), m), zeros)


def _backward_types(
    x: Any, weight: Any, bias: Any, cotangent: Any, *, needs: tuple[bool, bool, bool]
) -> tuple[Any, ...]:
    sums = jax.ShapeDtypeStruct((x.shape[0], x.shape[2]), tk.accumulator(x.dtype))
    return tuple(t if n else None for t, n in zip((like_first(x), sums, sums), needs, strict=True))


@tk.kernel(out_type=_backward_types)
def group_norm_backward_kernel(
    x: tk.Ref,
    weight: tk.Ref | None,
    bias: tk.Ref | None,
    cotangent: tk.Ref,
    dx: tk.Ref | None,
    dweight: tk.Ref | None,
    dbias: tk.Ref | None,
    *,
    needs: tuple[bool, bool, bool],
    size: int,
    eps: float,
    activation: str | None,
    block_s: tk.Block = 64,
    block_g: tk.Block = 1,
) -> None:
    """Like the forward kernel, with cotangent[N, S, C] -> dx[N, S, C], dweight[N, C] and dbias[N, C] of samples.

    A program reads x once if all positions fit a block, else three times.
    """
    n, g = tk.parallel(x.shape[0]), tk.parallel(x.shape[2] // size, block_g)
    c, rows, wide = g * size, x.shape[1], tk.accumulator(x.dtype)
    scale, shift = channels(weight, c, wide), channels(bias, c, wide)

    def pair(j: Any, moments: Moments, s: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """h and g of positions j."""
        s = x[n, j, c].astype(wide) if s is None else s
        h = (s - moments[0][None, :]) * moments[1][None, :]
        return h, through_activation(cotangent[n, j, c].astype(wide), h, scale, shift, activation)

    def write(j: Any, h: jax.Array, moved: jax.Array, inverse: jax.Array, sums: tuple[jax.Array, jax.Array]) -> None:
        if dx is not None:
            dx[n, j, c] = cotangent_of(h, moved, scale, inverse, sums, rows, size).astype(dx.dtype)

    def add(j: tk.Tile, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        h, moved = pair(j, moments)
        return sums[0] + moved.sum(axis=0), sums[1] + (moved * h).sum(axis=0)

    if rows <= block_s:
        s = x[n, :, c].astype(wide)
        moments = of_groups(moments_of(s, rows), rows, size, eps)
        h, moved = pair(slice(None), moments, s)
        sums = moved.sum(axis=0), (moved * h).sum(axis=0)
        write(slice(None), h, moved, moments[1], by_groups(sums, scale, size))
    else:
        positions = tk.serial(rows, block_s)
        moments = of_groups(_moments(x, n, c, block_s), rows, size, eps)
        sums = tk.fold(positions, add, (tk.zeros(c, wide), tk.zeros(c, wide)))
        if dx is not None:
            of_group = by_groups(sums, scale, size)
            tk.foreach(positions, lambda j: write(j, *pair(j, moments), moments[1], of_group))
    for value, total in zip(sums, (dbias, dweight), strict=True):
        if total is not None:
            total[n, c] = value


def by_groups(sums: tuple[jax.Array, jax.Array], weight: jax.Array | None, size: int) -> tuple[jax.Array, jax.Array]:
    """P and Q of each channel's group, [C] each, from Σ g and Σ g h of each channel."""
    of_g, of_gh = (s if weight is None else s * weight for s in sums)
    return by_group(of_g, size), by_group(of_gh, size)


def cotangent_of(
    h: jax.Array,
    moved: jax.Array,
    weight: jax.Array | None,
    inverse: jax.Array,
    sums: tuple[jax.Array, jax.Array],
    rows: int,
    size: int,
) -> jax.Array:
    """dx of some positions, from h, g (`moved`), 1 / σ (`inverse`), and P and Q (`sums`)."""
    of_g, of_gh = (s[None, :] / (rows * size) for s in sums)
    moved = moved if weight is None else moved * weight[None, :]
    return (moved - of_g - h * of_gh) * inverse[None, :]


def summed(cotangents: tuple[Any, ...], arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """dx, dweight[C] and dbias[C] from dx, dweight[N, C] and dbias[N, C] of samples."""
    dx, *sums = cotangents
    return cast_like((dx, *(None if s is None else s.sum(axis=0) for s in sums)), arrays)


def _backward(
    x: jax.Array, weight: Any, bias: Any, cotangent: jax.Array, *, needs: tuple[bool, bool, bool], **statics: Any
) -> tuple[Any, ...]:
    cotangents = group_norm_backward_kernel(x, weight, bias, cotangent, needs=needs, **statics)
    return summed(cotangents, (x, weight, bias))


group_norm_tangent, group_norm_backward = derive(group_norm_forward, definition, _backward)


# --- blocks -----------------------------------------------------------------------------------------------------------

Schedule = Callable[..., dict[str, int]]


def _cpu(x: Any, *unused: Any, size: int) -> dict[str, int]:
    """Large tiles of whole samples."""
    _, rows, columns = x.shape
    return {"block_s": even(rows, max(1, TILE_ELEMENTS // columns)), "block_g": columns // size}


def _llvm(x: Any, *unused: Any, size: int) -> dict[str, int]:
    """Channels of some cache lines, whose positions stay in a core's cache from one pass to the next.

    Their groups are a power of two, which divides the usual 32 groups: no tile is ragged.
    """
    _, rows, columns = x.shape
    block_g = min(columns // size, power_of_two(tk.cdiv(128, size), 128))
    return {"block_s": even(rows, max(1, CACHED_ELEMENTS // 4 // (block_g * size))), "block_g": block_g}


def _cuda(x: Any, *unused: Any, size: int, device: tk.Device) -> dict[str, int]:
    """As `_cuda_backward`, but half a tile where a whole tile spills."""
    return _gpu(x, size, 4096 if takes_registers(device) else 8192)


def _cuda_backward(x: Any, *unused: Any, size: int) -> dict[str, int]:
    """Up to 32 elements for a thread, so that few tiles follow each other.

    By the static estimate of 8 samples of 64² × 320 with silu, bfloat16, on sm_90: 46 µs, and 125 µs with a quarter
    tile; the forward kernel 23 µs, and 32 µs with half a tile.
    """
    return _gpu(x, size, 8192)


def _gpu(x: Any, size: int, elements: int) -> dict[str, int]:
    """A tile of `elements` elements; several groups only where groups have few elements."""
    _, rows, columns = x.shape
    block_g = power_of_two(columns // size, max(1, min(2048 // max(1, rows * size), 64 // size)))
    lanes = power_of_two(block_g * size, 1 << 20)
    block_s = power_of_two(rows, max(1, elements // lanes))
    return {"block_s": block_s, "block_g": block_g, "num_warps": warps_for(min(block_s * lanes, 4096))}


def _tpu(x: Any, *unused: Any, size: int) -> dict[str, int]:
    """Whole tiles of 128 channels and whole groups, if both end at the same channel; else all channels."""
    _, rows, columns = x.shape
    unit = lcm(size, 128)
    wide = columns if columns % unit or rows * columns <= 1 << 18 else unit
    return {"block_s": tpu_rows(rows, wide), "block_g": wide // size}


def tpu_rows(rows: int, columns: int) -> int:
    """Rows of a tile of a mebibyte, as float32; if possible a divisor of all rows, else XLA copies the array."""
    most = max(16, (1 << 18) // columns // 16 * 16)
    divisors = (rows // n for n in range(1, tk.cdiv(rows, 16) + 1) if rows % n == 0)
    return next((d for d in divisors if d <= most and d % 16 == 0), tiled(rows, most, 16))


for _kernel, _blocks in ((group_norm_forward, _cuda), (group_norm_backward_kernel, _cuda_backward)):
    _kernel.schedule("cpu")(_cpu)
    _kernel.schedule("cpu:llvm")(_llvm)
    _kernel.schedule("cuda")(_blocks)
    _kernel.schedule("tpu")(_tpu)
