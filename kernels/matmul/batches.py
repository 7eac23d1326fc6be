"""Leading dims of products, which broadcast as in `jnp.matmul`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax

from tilekern.authoring import describe, hide_frames, is_divided
from tilekern.errors import ArgumentError

hide_frames(__file__)


def misfit(function: str, transpose_lhs: bool, transpose_rhs: bool, **arrays: Any) -> ArgumentError:
    """The error for matrices that cannot be multiplied."""
    left, right = ("[*B, K, M]" if transpose_lhs else "[*B, M, K]"), ("[*B, N, K]" if transpose_rhs else "[*B, K, N]")
    return ArgumentError(
        f"the matrices of {function} do not fit",
        expected=f"lhs{left} and rhs{right} of one dtype, with leading dims that broadcast",
        got=", ".join(f"{name} = {describe(a)}" for name, a in arrays.items()),
        fix="both have the same K; leading dims must be equal or 1; cast with .astype",
    )


def broadcast(*leading: Sequence[int]) -> tuple[int, ...] | None:
    """The shape to which leading dims broadcast; None if they do not fit."""
    rank = max(map(len, leading))
    padded = [(1,) * (rank - len(dims)) + tuple(dims) for dims in leading]
    shape = tuple(next((s for s in sizes if s != 1), 1) for sizes in zip(*padded, strict=True))
    fits = all(s in (1, size) for dims in padded for s, size in zip(dims, shape, strict=True))
    return shape if fits else None


def over_batches(function: Callable[..., jax.Array], batch: Sequence[int], *arrays: jax.Array) -> jax.Array:
    """[*batch, ?, ?]: a function of matrices for each place of the batch; dims B of arrays [*B, ?, ?] broadcast to it.

    Along each dim `jax.vmap` maps only the arrays that have the dim, so no array is copied.
    """
    places = [(1,) * (len(batch) - a.ndim + 2) + a.shape[:-2] for a in arrays]
    arrays = _aligned(arrays, places)
    squeezed = [a.reshape(*(s for s in p if s != 1), *a.shape[-2:]) for a, p in zip(arrays, places, strict=True)]
    for number in reversed(range(len(batch))):
        if batch[number] != 1:
            function = jax.vmap(function, tuple(0 if p[number] != 1 else None for p in places))
    out = function(*squeezed)
    return out.reshape(*batch, *out.shape[-2:])


def _aligned(arrays: Sequence[jax.Array], places: Sequence[Sequence[int]]) -> tuple[jax.Array, ...]:
    """Arrays that explicit axes of a mesh divide alike along the batch, because `jax.vmap` takes no others.

    The first divided dim of the batch stays divided, by the axes of the first array that divides it. All other dims of
    the batch become whole. Dims of matrices keep their other axes. JAX has no rule for more.
    """
    if not any(map(is_divided, arrays)):
        return tuple(arrays)
    rank = len(places[0])
    specs = [_padded_spec(a, rank) for a in arrays]
    pairs = [*zip(specs, places, strict=True)]
    offered = ((n, s[n]) for n in range(rank) for s, p in pairs if p[n] != 1 and s[n])
    first, taken = next(offered, (0, ()))
    chosen = [taken if n == first else () for n in range(rank)]
    aligned: list[jax.Array] = []
    for array, (spec, place) in zip(arrays, pairs, strict=True):
        batch = [axes if size != 1 else () for axes, size in zip(chosen, place, strict=True)]
        matrix = [axes if set(taken).isdisjoint(axes) else () for axes in spec[rank:]]
        entries = [*batch, *matrix][rank + 2 - array.ndim :]
        moved = entries != spec[rank + 2 - array.ndim :]
        spec_of = jax.sharding.PartitionSpec(*(axes or None for axes in entries))
        aligned.append(cast(Any, jax).reshard(array, spec_of) if moved else array)
    return tuple(aligned)


def _padded_spec(array: Any, rank: int) -> list[tuple[str, ...]]:
    """The explicit axes that divide each dim of an array [*B, ?, ?]; () for each of the `rank` dims B that it lacks."""
    entries = jax.typeof(array).sharding.spec
    axes = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries]
    return [()] * (rank + 2 - array.ndim) + axes + [()] * (array.ndim - len(axes))
