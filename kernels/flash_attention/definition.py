"""The tangent of attention in plain JAX, by portions of queries; JAX differentiates it for second and higher orders.

Each portion keeps only its inputs for the backward pass (`jax.checkpoint`), so that memory stays linear in the number
of keys at any order. The backward pass is the transpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.authoring import masked, type_beside
from tilekern.kernels.flash_attention.arguments import Config, Extras, Residuals, Tangents
from tilekern.kernels.flash_attention.masks import mask_of
from tilekern.kernels.flash_attention.mods import call, carried_by, places
from tilekern.kernels.flash_attention.scores import dropped, settled
from tilekern.kernels.softcap import softcapped

# Scores of a portion of queries, for all heads and keys.
_PORTION, _MOST_QUERIES = 1 << 23, 128


def tangent(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    extras: Extras,
    out: jax.Array,
    residuals: Residuals,
    tangents: Tangents,
    *,
    config: Config,
) -> tuple[jax.Array, jax.Array]:
    """The tangents of out[B, T, N, Hv] and logsumexp[B, T, N], as the kernel `flash_attention_tangent` computes them.

    Weights are computed from the scores again, so that JAX differentiates them. Residuals give their dtype only.
    """
    batch, queries, heads, _ = query.shape
    if not residuals.largest.size:
        return jnp.zeros_like(out), jnp.zeros_like(residuals.largest)
    size = max(1, min(queries, _MOST_QUERIES, _PORTION // max(1, batch * heads * key.shape[1])))
    count = tk.cdiv(queries, size)

    def portions(x: Any, axis: int = 1) -> Any:
        """An array with T along `axis` as portions along a new first dim: [count, ..., size, ...]; None stays None."""
        if x is None:
            return None
        padded = jnp.pad(x, [(0, count * size - queries if d == axis else 0) for d in range(x.ndim)])
        cut = padded.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])
        return jnp.moveaxis(cut, axis, 0)

    def rows_of(x: Any) -> Any:
        return None if x is None or x.shape[2] == 1 else portions(x, 2)

    @jax.checkpoint
    def portion(shared: Any, cut: Any) -> Any:
        key, value, extras, tangents = shared
        start, query, out, dquery, bias, dbias, mask, ids = cut
        own = extras._replace(
            bias=extras.bias if bias is None else bias,
            mask=extras.mask if mask is None else mask,
            segments=None if ids is None else (ids, extras.segments[1]),
        )
        along = tangents._replace(query=dquery, bias=tangents.bias if dbias is None else dbias)
        return _portion(query, key, value, own, out, along, (start, queries), config)

    segments = None if extras.segments is None else portions(extras.segments[0])
    starts = jnp.arange(count, dtype=jnp.int32) * size
    cut = (
        starts,
        *map(portions, (query, out, tangents.query)),
        rows_of(extras.bias),
        rows_of(tangents.bias),
    )
    shared = key, value, extras, tangents._replace(query=None)
    results = cast(Any, jax.lax.map(partial(portion, shared), (*cut, rows_of(extras.mask), segments)))
    whole = (jnp.moveaxis(x, 0, 1).reshape(batch, count * size, *x.shape[3:])[:, :queries] for x in results)
    return tuple(whole)  # pyright: ignore[reportReturnType] -- of two


def backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    extras: Extras,
    out: jax.Array,
    residuals: Residuals,
    cotangents: tuple[Any, Any],
    *,
    config: Config,
    types: Tangents,
) -> Tangents:
    """The transpose of `tangent`: the cotangent of each tangent whose type `types` has; None for the rest."""
    along = partial(tangent, query, key, value, extras, out, residuals, config=config)
    zeros = (jnp.zeros_like(x) for x in (out, residuals.largest))
    whole = tuple(z if c is None else c for z, c in zip(zeros, cotangents, strict=True))

    def beside(x: Any) -> Any:
        return type_beside(x, out)

    return cast(Any, jax.linear_transpose(along, jax.tree.map(beside, types)))(whole)[0]


def _portion(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    extras: Extras,
    out: jax.Array,
    tangents: Tangents,
    span: tuple[jax.Array, int],
    config: Config,
) -> tuple[jax.Array, jax.Array]:
    """`tangent` of the queries from `span[0]` on, with the whole matrix of scores; from `span[1]` on is padding."""
    start, queries = span
    wide = tk.accumulator(query.dtype)
    heads = query.shape[2]
    b, n, i, j = jnp.indices((query.shape[0], heads, query.shape[1], key.shape[1]), dtype=jnp.int32, sparse=True)
    inside = i + start < queries
    # Functions of the user need not know positions that do not exist.
    i = jnp.minimum(i + start, queries - 1)

    def of_queries(x: jax.Array) -> jax.Array:
        return _until(x, extras.q_lengths, start).astype(wide)

    def of_keys(x: jax.Array) -> jax.Array:
        return jnp.repeat(_until(x, extras.kv_lengths, 0).astype(wide), heads // max(x.shape[2], 1), axis=2)

    attends = _attends(config, extras, b, n, i, j) & inside
    primals = [query, key, extras.bias, *carried_by(extras.score_mod)]
    moved = [tangents.query, tangents.key, tangents.bias, *(tangents.carried or [None] * (len(primals) - 3))]
    which = [number for number, t in enumerate(moved) if t is not None]

    def scores(*some: jax.Array) -> jax.Array:
        terms = [some[which.index(m)] if m in which else x for m, x in enumerate(primals)]
        s = _dot("btnh,bsnh->bnts", of_queries(terms[0]), of_keys(terms[1])) * config.scale
        if terms[2] is not None:
            s = s + terms[2].astype(wide)
        # Masked scores and their derivatives may be infinite.
        s = softcapped(jnp.where(attends, s, 0), config.softcap)
        if extras.score_mod is not None:
            s = _modified(extras.score_mod, terms[3:], s, attends, i, j)
        return jnp.where(attends, settled(s), -jnp.inf)

    s, ds = jax.jvp(scores, [primals[m] for m in which], [moved[m] for m in which]) if which else (scores(), 0)
    p, of_sinks = _softmax(s, None if extras.sinks is None else extras.sinks.astype(wide)[:, None, None])
    weighted = jnp.where(attends, p * ds, 0)
    total = weighted.sum(axis=3, keepdims=True)
    if tangents.sinks is not None:
        total = total + of_sinks * tangents.sinks.astype(wide)[:, None, None]
    moved_out = _dot("bnts,bsnh->btnh", _drop_weights(config, extras, weighted, b, n, i, j), of_keys(value))
    if tangents.value is not None:
        moved_out = moved_out + _dot(
            "bnts,bsnh->btnh", _drop_weights(config, extras, p, b, n, i, j), of_keys(tangents.value)
        )
    total = jnp.moveaxis(total, 1, 2)  # [B, T, N, 1]
    return (moved_out - total * out.astype(wide)).astype(out.dtype), total[..., 0]


def _modified(
    mod: Any, arrays: Sequence[Any], s: jax.Array, attends: jax.Array, i: jax.Array, j: jax.Array
) -> jax.Array:
    """The result of a `score_mod` that carries `arrays` on scores[B, N, T, S]; 0 where a query does not attend."""
    if not s.size:  # nothing can be read of an array without elements
        return s

    def of_head(b: jax.Array, n: jax.Array, s: jax.Array, attends: jax.Array) -> jax.Array:
        positions = {"b": b, "n": n, "i": i[0, 0], "j": j[0, 0]}
        read = [arrays[place.array][place.index(positions)] for place in places(mod, b, n)]

        def function(s: jax.Array, *values: jax.Array) -> jax.Array:
            reads = iter(values)
            return jnp.broadcast_to(call(mod, positions, lambda _: next(reads), s), s.shape).astype(s.dtype)

        return masked(attends, function, s, *read)

    each_head = jax.vmap(of_head, (None, 0, 0, 0))
    batch, heads = s.shape[:2]
    attends = jnp.broadcast_to(attends, s.shape)
    return jax.vmap(each_head, (0, None, 0, 0))(jnp.arange(batch), jnp.arange(heads), s, attends)


def _softmax(s: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, Any]:
    """The weights of scores[B, N, T, S], and the weights of sinks, [B, N, T, 1] (0 if sinks are None)."""
    top = jnp.max(s, axis=3, keepdims=True, initial=-jnp.inf)
    top = top if sinks is None else jnp.maximum(top, sinks)
    # The same result for every `top`: it has no derivatives. Of a row that attends to nothing, all weights are 0.
    top = jax.lax.stop_gradient(jnp.where(top == -jnp.inf, 0, top))
    p, sink = jnp.exp(s - top), 0 if sinks is None else jnp.exp(sinks - top)
    total = p.sum(axis=3, keepdims=True) + sink
    total = jnp.where(total == 0, 1, total)
    return p / total, sink / total


def _dot(dims: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(dims, left, right, precision=jax.lax.Precision.HIGHEST)


def _until(x: jax.Array, lengths: Any, start: Any) -> jax.Array:
    """x[B, T, N, H], whose first position is `start`, with zeros at positions >= lengths[B]."""
    if lengths is None:
        return x
    inside = start + jnp.arange(x.shape[1]) < lengths[:, None]
    return jnp.where(inside[:, :, None, None], x, 0)


class _WholePairs(NamedTuple):
    """All pairs of query and key as arrays that broadcast to [B, N, T, S], as masks see them."""

    b: jax.Array
    n: jax.Array
    i: jax.Array
    j: jax.Array
    positions: jax.Array

    def of_element(self, array: Any) -> jax.Array:
        return array[:, None, None, None]

    def rows(self, x: jax.Array) -> jax.Array:
        return x

    def columns(self, x: jax.Array) -> jax.Array:
        return x

    def of_queries(self, array: Any) -> jax.Array:
        return array[:, None, :, None]

    def of_keys(self, array: Any) -> jax.Array:
        return array[:, None, None, :]

    def of_scores(self, array: Any) -> jax.Array:
        return array

    def call(self, function: Any) -> Any:
        return function(self.b, self.n, self.i, self.j)


def _attends(config: Config, extras: Extras, b: jax.Array, n: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
    """The mask, bool that broadcasts to [B, N, T, S]: True where a query attends to a key."""
    offset = config.offset if extras.q_offset is None else extras.q_offset[:, None, None, None] + config.offset
    return mask_of(config, extras).attends(_WholePairs(b, n, i, j, i + offset))


def _drop_weights(
    config: Config, extras: Extras, weights: jax.Array, b: jax.Array, n: jax.Array, i: jax.Array, j: jax.Array
) -> jax.Array:
    """weights[B, N, T, S] after dropout."""
    if not config.dropout_rate:
        return weights
    bits = tk.random_bits(extras.dropout_key, *((0, 0) if config.dropout_broadcast else (b, n)), i, j)
    return dropped(config.dropout_rate, bits, weights)
