"""Group norm of large samples: a kernel computes the moments of parts of the positions, a second kernel the result.

Between the kernels plain JAX merges the moments of parts and groups, a few numbers for each channel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tilekern as tk
from tilekern.kernels.blocks import even, power_of_two, tiled
from tilekern.kernels.derivatives import derive
from tilekern.kernels.group_norm import kernel as whole
from tilekern.kernels.group_norm.reference import definition
from tilekern.kernels.rows import CACHED_ELEMENTS, TILE_ELEMENTS, like_first

Pair = tuple[jax.Array, jax.Array]
Steps = Callable[[Any, tk.Tile, Any], Callable[[tk.Tile, Pair], Pair]]


def _of_parts(x: Any, *unused: Any, part: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    shape = x.shape[0], tk.cdiv(x.shape[1], part), x.shape[2]
    sums = jax.ShapeDtypeStruct(shape, tk.accumulator(x.dtype))
    return sums, sums


def _over_part(x: tk.Ref, out: tuple[tk.Ref, tk.Ref], part: int, blocks: tuple[int, int], add: Steps) -> None:
    """Store add(n, c, first)(j, sums) over the tiles j of positions from `first` on, for each part."""
    n, c, rows = tk.parallel(x.shape[0]), tk.parallel(x.shape[2], blocks[1]), x.shape[1]
    zero = tk.zeros(c, tk.accumulator(x.dtype))
    zeros = zero, zero
    if part == blocks[0]:
        j = tk.parallel(rows, part)
        p, sums = j.index, add(n, c, j.start)(j, zeros)
    else:
        p = tk.parallel(out[0].shape[1])
        positions = tk.serial(rows, blocks[0], start=p * part, stop=(p + 1) * part)
        sums = tk.fold(positions, add(n, c, p * part), zeros)
    for ref, value in zip(out, sums, strict=True):
        ref[n, p, c] = value


@tk.kernel(out_type=_of_parts)
def group_norm_moments(
    x: tk.Ref, means: tk.Ref, squares: tk.Ref, *, part: int, block_s: tk.Block = 64, block_c: tk.Block = 128
) -> None:
    """x[N, S, C] -> the means[N, P, C] of each channel in P parts of `part` positions, and Σ (x - mean)² [N, P, C].

    `block_s` divides `part`.
    """

    def add(n: Any, c: tk.Tile, first: Any) -> Callable[[tk.Tile, Pair], Pair]:
        return lambda j, moments: whole.merged(j, first, x.shape[1], x[n, j, c].astype(means.dtype), moments)

    _over_part(x, (means, squares), part, (block_s, block_c), add)


@tk.kernel(out_type=like_first)
def group_norm_apply(
    x: tk.Ref,
    mean: tk.Ref,
    inverse: tk.Ref,
    weight: tk.Ref | None,
    bias: tk.Ref | None,
    out: tk.Ref,
    *,
    activation: str | None,
    block_s: tk.Block = 64,
    block_c: tk.Block = 128,
) -> None:
    """x[N, S, C], mean[N, C] and inverse[N, C] of each channel's group, weight[C], bias[C] -> out[N, S, C]."""
    n, j, c = tk.parallel(x.shape[0]), tk.parallel(x.shape[1], block_s), tk.parallel(x.shape[2], block_c)
    wide = mean.dtype
    h = (x[n, j, c].astype(wide) - mean[n, c][None, :]) * inverse[n, c][None, :]
    affine = whole.channels(weight, c, wide), whole.channels(bias, c, wide)
    out[n, j, c] = whole.result(h, *affine, activation).astype(out.dtype)


def _normalized(
    x: tk.Ref, cotangent: tk.Ref, numbers: tuple[tk.Ref, tk.Ref], affine: Any, activation: str | None, place: Any
) -> Pair:
    """h and g of the elements at `place`, an index (sample, positions, channels)."""
    n, _, c = place
    mean, inverse = (ref[n, c][None, :] for ref in numbers)
    h = (x[place].astype(mean.dtype) - mean) * inverse
    return h, whole.through_activation(cotangent[place].astype(mean.dtype), h, affine[0], affine[1], activation)


@tk.kernel(out_type=_of_parts)
def group_norm_sums(
    x: tk.Ref,
    cotangent: tk.Ref,
    mean: tk.Ref,
    inverse: tk.Ref,
    weight: tk.Ref | None,
    bias: tk.Ref | None,
    of_g: tk.Ref,
    of_gh: tk.Ref,
    *,
    part: int,
    activation: str | None,
    block_s: tk.Block = 64,
    block_c: tk.Block = 128,
) -> None:
    """The arrays of `group_norm_apply`, cotangent[N, S, C] -> Σ g and Σ g h [N, P, C] over the positions of P parts."""

    def add(n: Any, c: tk.Tile, first: Any) -> Callable[[tk.Tile, Pair], Pair]:
        affine = whole.channels(weight, c, mean.dtype), whole.channels(bias, c, mean.dtype)

        def step(j: tk.Tile, sums: Pair) -> Pair:
            h, g = _normalized(x, cotangent, (mean, inverse), affine, activation, (n, j, c))
            return sums[0] + g.sum(axis=0), sums[1] + (g * h).sum(axis=0)

        return step

    _over_part(x, (of_g, of_gh), part, (block_s, block_c), add)


@tk.kernel(out_type=like_first)
def group_norm_pull(
    x: tk.Ref,
    cotangent: tk.Ref,
    mean: tk.Ref,
    inverse: tk.Ref,
    weight: tk.Ref | None,
    bias: tk.Ref | None,
    of_g: tk.Ref,
    of_gh: tk.Ref,
    dx: tk.Ref,
    *,
    size: int,
    activation: str | None,
    block_s: tk.Block = 64,
    block_c: tk.Block = 128,
) -> None:
    """The arrays of `group_norm_sums`, P and Q [N, C] of each channel's group -> dx[N, S, C]."""
    n, j, c = tk.parallel(x.shape[0]), tk.parallel(x.shape[1], block_s), tk.parallel(x.shape[2], block_c)
    affine = whole.channels(weight, c, mean.dtype), whole.channels(bias, c, mean.dtype)
    h, g = _normalized(x, cotangent, (mean, inverse), affine, activation, (n, j, c))
    sums = of_g[n, c], of_gh[n, c]
    dx[n, j, c] = whole.cotangent_of(h, g, affine[0], inverse[n, c], sums, x.shape[1], size).astype(dx.dtype)


# --- the ops ----------------------------------------------------------------------------------------------------------


def _group_moments(x: jax.Array, size: int, eps: float, part: int, blocks: dict[str, int]) -> Pair:
    """The mean and 1 / σ of each channel's group, [N, C]: parts are merged as in `kernel`."""
    rows = x.shape[1]
    means, squares = group_norm_moments(x, part=part, **blocks)
    counts = np.array([min(part, rows - first) for first in range(0, rows, part)]).astype(means.dtype)[:, None]

    def mean_of(values: jax.Array) -> jax.Array:
        total: jax.Array = jnp.sum(counts * values, axis=1)
        return by_groups(total, size) / (rows * size)

    first = mean_of(means)
    mean = first + mean_of(means - first[:, None])
    between = means - mean[:, None]
    total_squares = squares.sum(axis=1) + (counts * between * between).sum(axis=1)
    variance: jax.Array = by_groups(total_squares, size) / (rows * size)
    return mean, jax.lax.rsqrt(variance + eps)


def by_groups(values: jax.Array, size: int) -> jax.Array:
    """[N, C]: for each channel the sum of values[N, C] over the channels of its group."""
    groups: jax.Array = values.reshape(values.shape[0], -1, size).sum(axis=2, keepdims=True)
    return jnp.broadcast_to(groups, (*groups.shape[:2], size)).reshape(values.shape)


def _blocks(block_s: int, block_c: int) -> dict[str, int]:
    return {"block_s": block_s, "block_c": block_c}


@tk.op(out_type=like_first)
def group_norm_parts_forward(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    *,
    size: int,
    eps: float,
    activation: str | None,
    block_s: tk.Block = 64,
    block_c: tk.Block = 128,
    tiles: tk.Block = 1,
) -> jax.Array:
    """As `group_norm_forward`; the moments are computed in parts of `tiles` tiles."""
    blocks = _blocks(block_s, block_c)
    moments = _group_moments(x, size, eps, block_s * tiles, blocks)
    return group_norm_apply(x, *moments, weight, bias, activation=activation, **blocks)


def _backward_types(
    x: Any, weight: Any, bias: Any, cotangent: Any, *, needs: tuple[bool, bool, bool]
) -> tuple[Any, ...]:
    return tuple(like_first(a) if n else None for a, n in zip((x, weight, bias), needs, strict=True))


@tk.op(out_type=_backward_types)
def group_norm_parts_pullback(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    cotangent: jax.Array,
    *,
    needs: tuple[bool, bool, bool],
    size: int,
    eps: float,
    activation: str | None,
    block_s: tk.Block = 64,
    block_c: tk.Block = 128,
    tiles: tk.Block = 1,
) -> tuple[Any, ...]:
    """dx, dweight and dbias of `group_norm` in parts; None without a flag in `needs`."""
    blocks, part = _blocks(block_s, block_c), block_s * tiles
    moments = _group_moments(x, size, eps, part, blocks)
    arrays = x, cotangent, *moments, weight, bias
    parts = group_norm_sums(*arrays, part=part, activation=activation, **blocks)
    of_g, of_gh = (p.sum(axis=1) for p in parts)
    dx = None
    if needs[0]:
        of_group = [by_groups(s if weight is None else s * weight.astype(s.dtype), size) for s in (of_g, of_gh)]
        dx = group_norm_pull(*arrays, *of_group, size=size, activation=activation, **blocks)
    return whole.summed((dx, of_gh if needs[1] else None, of_g if needs[2] else None), (x, weight, bias))


group_norm_parts_tangent, group_norm_parts_backward = derive(
    group_norm_parts_forward, definition, group_norm_parts_pullback
)


# --- blocks -----------------------------------------------------------------------------------------------------------


def _tasks(x: Any, elements: int) -> dict[str, int]:
    """All channels, tiles of about `elements` elements, and at most 16 parts."""
    _, rows, columns = x.shape
    block_s = even(rows, max(1, elements // columns))
    return {"block_s": block_s, "block_c": columns, "tiles": tk.cdiv(tk.cdiv(rows, block_s), 16)}


def _cpu(x: Any, *unused: Any) -> dict[str, int]:
    return _tasks(x, TILE_ELEMENTS)


def _llvm(x: Any, *unused: Any) -> dict[str, int]:
    return _tasks(x, CACHED_ELEMENTS)


def _cuda(x: Any, *unused: Any) -> dict[str, int]:
    """A part is four tiles, so that the sums of parts are small beside x."""
    block_c = power_of_two(x.shape[2], 64)
    return {"block_s": 4096 // block_c, "block_c": block_c, "tiles": 4}


def _tpu(x: Any, *unused: Any) -> dict[str, int]:
    _, rows, columns = x.shape
    block_c = tiled(columns, 1024, 128)
    return {"block_s": whole.tpu_rows(rows, block_c), "block_c": block_c, "tiles": 1}


for _op in (group_norm_parts_forward, group_norm_parts_pullback):
    _op.schedule("cpu")(_cpu)
    _op.schedule("cpu:llvm")(_llvm)
    _op.schedule("cuda")(_cuda)
    _op.schedule("tpu")(_tpu)
