"""The cotangents of terms: of the bias, and of the arrays that a `score_mod` carries.

Two deterministic stages: a kernel sums the cotangents of the scores over the dims b, n, i and j that the array lacks.
Then XLA adds the sums at the places of the reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.flash_attention import schedules
from tilekern.kernels.flash_attention.arguments import Config, Extras, Residuals
from tilekern.kernels.flash_attention.mods import Place
from tilekern.kernels.flash_attention.scores import Scores

Dims = tuple[bool, bool, bool, bool]


def _out_type(query: Any, key: Any, *unused: Any, dims: Dims) -> Any:
    sizes = query.shape[0], query.shape[2], query.shape[1], key.shape[1]
    shape = tuple(size if keeps else 1 for size, keeps in zip(sizes, dims, strict=True))
    return jax.ShapeDtypeStruct(shape, tk.accumulator(query.dtype))


@tk.kernel(out_type=_out_type)
def flash_attention_backward_term(
    query: tk.Ref,
    key: tk.Ref,
    value: tk.Ref,
    extras: Extras,
    residuals: Residuals,
    cotangent: tk.Ref,
    delta: tk.Ref,
    out: tk.Ref,
    *,
    config: Config,
    term: int,
    dims: Dims,
    block_q: tk.Block = 128,
    block_k: tk.Block = 128,
) -> None:
    """The arrays of `flash_attention_backward_query` -> cotangents of a term, [B or 1, N or 1, T or 1, S or 1].

    `term` is the term's number in `Scores.terms`. `dims` has a flag for b, n, i and j: False if the cotangents are
    summed over the dim. `extras.ranges` are the ranges of queries for each key if only j of i and j has the flag, else
    the ranges of keys for each query.
    """
    (batch, queries, heads, _), keys, groups = query.shape, key.shape[1], key.shape[2]
    group = heads // max(groups, 1)
    keeps_b, keeps_n, keeps_i, keeps_j = dims
    b = tk.parallel(batch) if keeps_b else None
    g, r = (tk.parallel(groups), tk.parallel(group)) if keeps_n else (None, None)
    i: Any = tk.parallel(queries, block_q) if keeps_i else None
    j: Any = tk.parallel(keys, block_k) if keeps_j else None
    wide = tk.accumulator(query.dtype)
    summed_axes = tuple(axis for axis, keeps in enumerate((keeps_i, keeps_j)) if not keeps)

    def of_head(b: Any, g: Any, r: Any, total: jax.Array) -> jax.Array:
        n = g * group + r
        scores = Scores(config, extras, b, n, (queries, keys), wide, sums_queries=not keeps_i)

        def add(i: tk.Tile, j: tk.Tile, attends: jax.Array, total: jax.Array) -> jax.Array:
            pairs = (
                (scores.load_queries(query, i), scores.load_keys(key, j, g)),
                (scores.load_queries(cotangent, i), scores.load_keys(value, j, g)),
            )
            rows = residuals.at(b, i, n)
            moved, _ = scores.cotangents(i, j, *pairs, attends, rows, lambda: delta[b, i, n], term)
            return total + moved.sum(axis=summed_axes)

        def of_queries(i: tk.Tile, total: jax.Array) -> jax.Array:
            def step(j: tk.Tile, attends: jax.Array, total: jax.Array) -> jax.Array:
                return add(i, j, attends, total)

            return scores.over_keys(i, block_k, step, total)

        def of_keys(j: tk.Tile, total: jax.Array) -> jax.Array:
            def step(i: tk.Tile, attends: jax.Array, total: jax.Array) -> jax.Array:
                return add(i, j, attends, total)

            return scores.over_queries(j, block_q, step, total)

        if i is not None and j is not None:
            start, stop = scores.key_range(i)
            live = (start < j.stop) & (stop > j.start)
            once = tk.serial(1, stop=jnp.where(live, 1, 0))
            attends = scores.attends(i, j)

            def step(_: Any, total: jax.Array) -> jax.Array:
                return add(i, j, attends, total)

            return tk.fold(once, step, total)
        if i is not None:
            return of_queries(i, total)
        if j is not None:
            return of_keys(j, total)
        return tk.fold(tk.serial(queries, block_q), of_queries, total)

    total = tk.zeros([tile for tile in (i, j) if tile is not None], wide)
    axes = [tk.serial(n) for n, keeps in ((batch, keeps_b), (groups, keeps_n), (group, keeps_n)) if not keeps]

    def step(serial: Any, total: jax.Array) -> jax.Array:
        indices = iter(serial)
        return of_head(
            next(indices) if b is None else b, *((next(indices), next(indices)) if g is None else (g, r)), total
        )

    total = tk.fold(tuple(axes), step, total) if axes else step((), total)
    n = 0 if g is None else g * group + r
    out[0 if b is None else b, n, 0 if i is None else i, 0 if j is None else j] = total


schedules.declare(flash_attention_backward_term)


def dims_of_sums(place: Place) -> Dims:
    """A flag for each of b, n, i and j: True if the kernel's sums for a term have the dim."""
    whole = place.is_scattered
    return whole or place.has("b"), whole or place.has("n"), place.has("i"), place.has("j")


def put(place: Place, sums: jax.Array, like: Any, integers: Sequence[jax.Array]) -> jax.Array:
    """The cotangent of a term's array, of the shape and dtype of `like`, from the kernel's sums.

    Args:
      place: the place at which scores read the array.
      sums: [B or 1, N or 1, T or 1, S or 1].
      like: the array, or its type.
      integers: the entries of the place that are made of b and n, int32[B, N] each.
    """
    if not place.is_scattered:
        names = [e for e in place.entries if isinstance(e, str)]
        order = ["bnij".index(e) for e in names]
        absent = [d for d in range(4) if d not in order]
        values = jnp.transpose(sums, (*order, *absent)).reshape([sums.shape[d] for d in order])
        # The array may have more elements than there are positions.
        at = tuple(slice(sums.shape["bnij".index(e)]) if isinstance(e, str) else e for e in place.entries)
        return jnp.zeros(like.shape, values.dtype).at[at].set(values).astype(like.dtype)
    # One-hot products are deterministic; a scatter may add in any order. A read outside of the array gave 0.
    batch, heads = sums.shape[:2]
    b, n = (x.reshape(-1) for x in jnp.indices((batch, heads)))
    remaining = iter(integers)
    positions: dict[Any, jax.Array] = {"b": b, "n": n}
    across = [d for d, e in enumerate(place.entries) if not (isinstance(e, str) and e in "ij")]
    hot = jnp.ones((batch * heads, 1), sums.dtype)
    for d in across:
        e = place.entries[d]
        at = (
            positions[e]
            if isinstance(e, str)
            else jnp.full(b.shape, e)
            if isinstance(e, int)
            else next(remaining).reshape(-1)
        )
        of_dim = jax.nn.one_hot(at, like.shape[d], dtype=sums.dtype)
        hot = (hot[:, :, None] * of_dim[:, None, :]).reshape(batch * heads, -1)
    summed = jnp.einsum("xp,xr->pr", hot, sums.reshape(batch * heads, -1), precision=jax.lax.Precision.HIGHEST)
    along = [d for d in range(len(place.entries)) if d not in across]
    lengths = [sums.shape["bnij".index(place.entries[d])] for d in along]
    values = summed.reshape([*(like.shape[d] for d in across), *lengths])
    values = jnp.pad(
        values, [*[(0, 0)] * len(across), *((0, like.shape[d] - n) for d, n in zip(along, lengths, strict=True))]
    )
    return jnp.moveaxis(values, range(values.ndim), (*across, *along)).astype(like.dtype)
