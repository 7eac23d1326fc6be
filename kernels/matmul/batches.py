"""Calls of products: leading dims, which broadcast as in `jnp.matmul`, and sums that are split over programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax

import tilekern as tk
from tilekern.authoring import (
    LAUNCH_OPTIONS,
    array_of,
    check_sizes,
    describe,
    hide_frames,
    is_divided,
    takes_python_numbers,
)
from tilekern.errors import ArgumentError

hide_frames(__file__)

# Products with fewer tiles of 64 × 64 than half of the multiprocessors of the largest GPU, whose sums are long.
FEW_TILES, LONG = 74, 4096


class Product(tk.Kernel):
    """A kernel of two matrices, whose calls take leading dims and split long sums. It is traced for matrices.

    Attributes:
      by_parts: the op that may split the sum; it has a target and blocks of its own, and the kernel's other arguments.
    """

    by_parts: Callable[..., jax.Array]

    def __call__(self, *args: Any, **keywords: Any) -> jax.Array:
        """x @ w by the kernel or by its op, for each place of the batch."""
        args, keywords = (args, keywords) if len(args) == 2 else self.signature.positional(args, keywords)
        if len(args) != 2 or any(getattr(a, "ndim", 0) < 2 for a in args):
            return super().__call__(*args, **keywords)
        split_k = checked_split("matmul", keywords.pop("split_k", None))
        x, w = map(array_of, args)
        check_sizes("matmul", {"x": x, "w": w})
        if x.ndim > 2 or w.ndim > 2:
            return _batched(self, x, w, split_k, keywords)
        transposes = keywords.get("transpose_x", False), keywords.get("transpose_w", False)
        # Launch options are for the programs of the kernel, not of the op.
        tuned = split_k is None and any(keywords.get(name) is not None for name in LAUNCH_OPTIONS)
        if not tuned and splits(x, w, *transposes, split_k):
            return self.by_parts(x, w, split_k=split_k, dtype=str(x.dtype), **keywords)
        return super().__call__(x, w, **keywords)


@takes_python_numbers
def checked_split(function: str, split_k: int | None) -> int | None:
    """`split_k`, checked.

    Raises:
      ArgumentError: `split_k` is not a positive int or None.
    """
    if split_k is None or (type(split_k) is int and split_k > 0):
        return split_k
    raise ArgumentError(
        f"{function} cannot split its sums into such a number of parts",
        expected="an int that is at least 1, or None",
        got=f"split_k = {split_k!r}",
        fix="leave it out, for the number that the schedule of the target chooses",
    )


def splits(x: Any, w: Any, transpose_x: bool, transpose_w: bool, split_k: int | None) -> bool:
    """True if a target may split the sum of a product of matrices.

    False for operands that a mesh divides by their types: only the kernel has a rule for such operands.
    """
    if split_k == 1 or x.dtype != w.dtype or any(is_divided(a) for a in (x, w)):
        return False
    rows, inner = reversed(x.shape) if transpose_x else x.shape
    columns = w.shape[0 if transpose_w else 1]
    fits = inner == w.shape[1 if transpose_w else 0] and min(rows, inner, columns) > 0
    few = tk.cdiv(rows, 64) * tk.cdiv(columns, 64) <= FEW_TILES
    return fits and (split_k is not None or (few and inner >= LONG))


def _batched(product: Product, x: jax.Array, w: jax.Array, split_k: int | None, keywords: dict[str, Any]) -> jax.Array:
    transpose_x, transpose_w = keywords.get("transpose_x", False), keywords.get("transpose_w", False)
    batch = broadcast(x.shape[:-2], w.shape[:-2])
    if batch is None or x.dtype != w.dtype or x.shape[-2 if transpose_x else -1] != w.shape[-1 if transpose_w else -2]:
        raise misfit("matmul", transpose_x, transpose_w, x=x, w=w)

    def of_matrices(x: jax.Array, w: jax.Array) -> jax.Array:
        return product(x, w, split_k=split_k, **keywords)

    if math.prod(w.shape[:-2]) == 1 and not transpose_x:
        out = of_matrices(rows_joined(x), w.reshape(w.shape[-2:]))
        return out.reshape(*batch, x.shape[-2], out.shape[-1])
    return over_batches(of_matrices, batch, x, w)


def misfit(function: str, transpose_x: bool, transpose_w: bool, **arrays: Any) -> ArgumentError:
    """The error for matrices that cannot be multiplied."""
    left, right = ("[*B, K, M]" if transpose_x else "[*B, M, K]"), ("[*B, N, K]" if transpose_w else "[*B, K, N]")
    return ArgumentError(
        f"the matrices of {function} do not fit",
        expected=f"x{left} and w{right} of one dtype, with leading dims that broadcast",
        got=", ".join(f"{name} = {describe(a)}" for name, a in arrays.items()),
        fix="leading dims must be equal or 1; cast with .astype",
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


def rows_joined(x: jax.Array) -> jax.Array:
    """x[*B, M, K] as [B M, K]."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
