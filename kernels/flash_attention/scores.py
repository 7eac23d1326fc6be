"""The scores of attention: the way of a logit from its dot product to its softmax, and the loops over unmasked tiles.

All kernels of flash attention, forward, tangent and backward, see the scores through `Scores`, tile by tile:

    s = score_mod(softcap tanh((scale q·k + bias) / softcap), b, n, i, j), and -inf where the query does not attend.

Weights are 2^(factor (s - largest)), with log2(e) in the factor: 2^x is one instruction where e^x is several. The
largest logit is subtracted first. Were s multiplied first, a compiler might round the product and the difference once
(fma), but the largest one twice, and half a unit in the last place of a logit of 10^10 is 512. For the same reason the
scale is part of the factor where s is scale q·k alone.

A *term* is an array that a score depends on: the bias, and each array that a `score_mod` carries. A score reads a term
at one place, given by b and n, the query i and the key j, so that the derivative is elementwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

import tilekern as tk
from tilekern.kernels.flash_attention.arguments import Config, Extras, Residuals
from tilekern.kernels.flash_attention.masks import Pairs, Span, mask_of
from tilekern.kernels.flash_attention.mods import Place, call, carried_by, ends_in_product, place_of, places
from tilekern.kernels.softcap import softcapped

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)


def of_queries(
    config: Config, extras: Extras, query: Any, key: Any, block_q: int, block_n: int = 1
) -> tuple[Scores, Any, tk.Tile]:
    """(scores, the head of the keys, the tile of queries) of a program that owns a tile of queries.

    A program owns queries of one head; if heads are `alike`, of `block_n` heads that share a head of the keys.
    """
    groups = key.shape[2]
    group = query.shape[2] // max(groups, 1)
    b = tk.parallel(query.shape[0])
    g = tk.parallel(groups)
    several = block_n > 1 and group > 1 and alike(config, extras)
    r = tk.parallel(group, block_n) if several else tk.parallel(group)
    # The last queries see the most keys: their programs start first, so that none is left alone in the end.
    i = tk.parallel(query.shape[1], block_q, order="descending" if config.causal else None)
    wide = tk.accumulator(query.dtype)
    n, heads = (None, (g * group, group, r)) if several else (g * group + r, None)
    return Scores(config, extras, b, n, (query.shape[1], key.shape[1]), wide, heads=heads), g, i


def alike(config: Config, extras: Extras) -> bool:
    """True if scores are dot products masked by position, length and segment only, alike for all heads."""
    has_terms = extras.bias is not None or extras.score_mod is not None
    return not config.dropout_rate and not has_terms and mask_of(config, extras).all_alike_for_heads()


class Scores:
    """The scores of one head of one element of the batch, inside of a kernel.

    A tile of scores is [queries, keys], or with `transposed` [keys, queries]. With `sums_queries` queries past the end
    attend to nothing, so that sums over queries may be taken.

    `heads` is (the first head of a group, the size of the group, a tile of the group). With `heads` a tile of scores is
    [queries x heads, keys], where the heads of a query are neighbours, and `n` is None.
    """

    def __init__(
        self,
        config: Config,
        extras: Extras,
        b: Any,
        n: Any,
        lengths: tuple[int, int],
        wide: Any,
        *,
        transposed: bool = False,
        sums_queries: bool = False,
        heads: tuple[Any, int, tk.Tile] | None = None,
    ) -> None:
        self.config, self.extras, self.b, self.n, self.heads = config, extras, b, n, heads
        self.queries, self.keys = lengths
        self.wide, self.transposed, self.sums_queries = wide, transposed, transposed or sums_queries
        self.offset: Any = config.offset if extras.q_offset is None else extras.q_offset[b] + config.offset
        self.mask = mask_of(config, extras)
        self.plain, self.folds = is_plain(config, extras), folds(config, extras)
        self.factor = wide.type(factor(config, extras))
        self.carried = [] if extras.score_mod is None else places(extras.score_mod, b, n)
        self.carried_leaves = carried_by(extras.score_mod)

    # --- positions ---

    def rows(self, x: jax.Array) -> jax.Array:
        """A vector[queries] as [queries, 1], or [1, queries] if `transposed`; with `heads`, repeated for each head."""
        if self.heads is not None:
            x = jnp.broadcast_to(x[:, None], (x.size, self.heads[2].size)).reshape(-1)
        return x[None, :] if self.transposed else x[:, None]

    def columns(self, x: jax.Array) -> jax.Array:
        """A vector[keys] as [1, keys], or [keys, 1] if `transposed`."""
        return x[:, None] if self.transposed else x[None, :]

    def products(self, queries: jax.Array, keys: jax.Array, precision: str | None) -> jax.Array:
        """The dot products of the rows of two tiles, as a tile of scores."""
        left, right = (keys, queries) if self.transposed else (queries, keys)
        return tk.dot(left, right.T, precision=precision)

    def load_queries(self, array: Any, i: tk.Tile) -> jax.Array:
        """Tile i of an array like query, [queries, H]; zeros for queries past the length.

        With `heads`, [queries x heads, H].
        """
        ref, index = self._rows_of_queries(array, i)
        if self.extras.q_lengths is None:
            tile = ref[index]
        else:
            inside = i.indices < self.extras.q_lengths[self.b]
            tile = ref.load(index, mask=inside[:, None] if self.heads is None else inside[:, None, None])
        return tile if self.heads is None else tile.reshape(i.size * self.heads[2].size, tile.shape[-1])

    def store_queries(self, array: Any, i: tk.Tile, value: jax.Array) -> None:
        """Store a tile of an array like query, or a number for each of its rows."""
        ref, index = self._rows_of_queries(array, i)
        ref[index] = value if self.heads is None else value.reshape(i.size, self.heads[2].size, *value.shape[1:])

    def of_heads(self, vector: Any, i: tk.Tile) -> Any:
        """vector[N] as a vector with a number for each row of a tile of scores; a scalar without `heads`."""
        if self.heads is None:
            return vector[self.n]
        first, count, r = self.heads
        numbers = vector.at[tk.ds(first, count)][r]
        return jnp.broadcast_to(numbers[None, :], (i.size, r.size)).reshape(-1)

    def _rows_of_queries(self, array: Any, i: tk.Tile) -> tuple[Any, tuple[Any, ...]]:
        """(view, index) of tile i of an array like query: view[index] is [queries, H], or [queries, heads, H]."""
        if self.heads is None:
            return array, (self.b, i, self.n)
        first, count, r = self.heads
        return array.at[self.b, :, tk.ds(first, count)], (i, r)

    def load_keys(self, array: Any, j: tk.Tile, g: Any) -> jax.Array:
        """Tile j of key or value, [keys, H]; zeros for keys past the length."""
        if self.extras.kv_lengths is None:
            return array[self.b, j, g]
        return array.load((self.b, j, g), mask=(j.indices < self.extras.kv_lengths[self.b])[:, None])

    # --- scores ---

    def terms(self, i: tk.Tile, j: tk.Tile, bias: Any, carried: Sequence[Any]) -> list[Any]:
        """The tile of each term, of `bias` and `carried`: the terms' arrays, or arrays like them; None is zero."""
        values: list[Any] = []
        if self.extras.bias is not None:
            values.append(None if bias is None else self.broadcast_to_scores(bias, i, j).astype(self.wide))
        for place in self.carried:
            array = carried[place.array]
            values.append(None if array is None else self._at(array, place, i, j))
        return values

    def own_terms(self, i: tk.Tile, j: tk.Tile) -> list[Any]:
        """The tiles of `terms`, for the arrays that the scores depend on."""
        return self.terms(i, j, self.extras.bias, self.carried_leaves)

    def transform(self, i: tk.Tile, j: tk.Tile) -> Callable[..., jax.Array]:
        """The elementwise function (scaled dot products, terms) -> scores."""

        def transformed(raw: jax.Array, terms: Sequence[jax.Array]) -> jax.Array:
            remaining = iter(terms)
            s = softcapped(raw if self.extras.bias is None else raw + next(remaining), self.config.softcap)
            if self.extras.score_mod is not None:
                s = call(self.extras.score_mod, self._positions(i, j), lambda _: next(remaining), s)
            return jnp.broadcast_to(s, raw.shape).astype(raw.dtype)

        return transformed

    def logits(self, i: tk.Tile, j: tk.Tile, products: jax.Array, attends: jax.Array) -> jax.Array:
        """A tile of scores, -inf where a query does not attend.

        Where the scale `folds` into the factor: dot products, or their negatives for a negative scale.
        """
        if self.folds:
            return jnp.where(attends, products if self.config.scale > 0 else -products, -jnp.inf)
        raw = products * self.wide.type(self.config.scale)
        return self._masked(self.transform(i, j)(raw, self.own_terms(i, j)), attends)

    def _masked(self, s: jax.Array, attends: jax.Array) -> jax.Array:
        capped = self.config.softcap or 0
        if self.plain or (
            capped > 1 << 20 if self.extras.score_mod is None else ends_in_product(self.extras.score_mod)
        ):
            s = settled(s)
        return jnp.where(attends, s, -jnp.inf)

    def weights(self, logits: jax.Array, rows: Residuals) -> jax.Array:
        """The softmax of a tile of logits; `rows` are vectors over its queries."""
        return jnp.exp2((logits - self.rows(rows.largest)) * self.factor - self.rows(rows.log_sum))

    def tangents(
        self, i: tk.Tile, j: tk.Tile, products: jax.Array, moved: jax.Array | None, bias: Any, carried: Sequence[Any]
    ) -> jax.Array | None:
        """The tangents of the scores, from tangents of products (`moved`), `bias` and `carried`; None is zero."""
        scale = self.wide.type(self.config.scale)
        if self.plain:
            return None if moved is None else moved * scale
        directions = self.terms(i, j, bias, carried or [None] * len(self.carried_leaves))
        if moved is None and all(t is None for t in directions):
            return None
        raw, own = products * scale, self.own_terms(i, j)
        along = jnp.zeros_like(raw) if moved is None else moved * scale
        which = [number for number, t in enumerate(directions) if t is not None]

        def function(raw: jax.Array, *some: jax.Array) -> jax.Array:
            return self.transform(i, j)(raw, [some[which.index(m)] if m in which else t for m, t in enumerate(own)])

        _, ds = jax.jvp(function, (raw, *(own[m] for m in which)), (along, *(directions[m] for m in which)))
        return ds

    def cotangents(
        self,
        i: tk.Tile,
        j: tk.Tile,
        query_key: tuple[jax.Array, jax.Array],
        cotangent_value: tuple[jax.Array, jax.Array],
        attends: jax.Array,
        rows: Residuals,
        delta: Callable[[], jax.Array],
        term: int | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """The cotangents of the scaled dot products, or of the term number `term`; and the weights.

        `rows` and `delta` are vectors over queries. `delta` is loaded after the products, because before them GPUs have
        no register to spare.
        """
        of_scores, of_values = self.config.precision
        products = self.products(*query_key, of_scores)
        scale = self.wide.type(self.config.scale)
        pull: Any = None
        if self.plain:
            logits = self.logits(i, j, products, attends)
        else:
            own = self.own_terms(i, j)
            # A term at full size: masked elements must not take part in a sum, because they may be NaN.
            at = products * scale if term is None else jnp.broadcast_to(own[term], products.shape)

            def score(x: jax.Array) -> jax.Array:
                if term is None:
                    return self.transform(i, j)(x, own)
                return self.transform(i, j)(products * scale, [*own[:term], x, *own[term + 1 :]])

            s, pull = cast(Any, jax.vjp(score, at))
            logits = self._masked(s, attends)
        p = self.weights(logits, rows)
        dp = self.drop_weights(i, j, self.products(*cotangent_value, of_values))
        ds = jnp.where(attends, p * (dp - self.rows(delta())), 0)
        if pull is not None:
            (ds,) = pull(ds)
            ds = jnp.where(attends, ds, 0)
        return ds, p

    def attends(self, i: tk.Tile, j: tk.Tile, *, full: bool = False) -> jax.Array:
        """The mask of a tile: True where a query attends to a key. `full`: the block map knows the mask to be True."""
        attends: Any = self.columns(j.valid)
        if self.sums_queries:
            attends = attends & self.rows(i.valid)
        mask = self.mask.outside_of_block_map() if full else self.mask
        return mask.among(attends, TilePairs(self, i, j))

    def drop_weights(self, i: tk.Tile, j: tk.Tile, weights: jax.Array) -> jax.Array:
        """Weights of a tile after dropout; without dropout as they are."""
        rate = self.config.dropout_rate
        if not rate:
            return weights
        positions = self._positions(i, j)
        if self.config.dropout_broadcast:
            positions |= {"b": 0, "n": 0}
        return dropped(rate, tk.random_bits(self.extras.dropout_key[...], *positions.values()), weights)

    def call(self, mask_mod: Any, i: tk.Tile, j: tk.Tile) -> Any:
        """The result of a `mask_mod`, in a shape that broadcasts against a tile of scores."""
        leaves = carried_by(mask_mod)

        def read(place: Place) -> Any:
            return self._at(leaves[place.array], place, i, j)

        return call(mask_mod, self._positions(i, j), read)

    def _positions(self, i: tk.Tile, j: tk.Tile) -> dict[str, Any]:
        return {"b": self.b, "n": self.n, "i": self.rows(i.indices), "j": self.columns(j.indices)}

    def _at(self, array: Any, place: Place, i: tk.Tile, j: tk.Tile) -> jax.Array:
        """The tile of a term, in a shape that broadcasts against a tile of scores."""
        tile = array[place.index({"b": self.b, "n": self.n, "i": i, "j": j})]
        dims = [e for e in place.entries if isinstance(e, str) and e in "ij"]
        if not dims:
            return tile
        if len(dims) == 1:
            return self.rows(tile) if dims == ["i"] else self.columns(tile)
        return tile if (dims == ["i", "j"]) is not self.transposed else tile.T

    def broadcast_to_scores(self, array: Any, i: tk.Tile, j: tk.Tile) -> jax.Array:
        """The tile of array[B or 1, N or 1, T or 1, S or 1], in a shape that broadcasts against a tile of scores."""
        return self._at(array, place_of(array.shape), i, j)

    # --- loops ---

    def over_keys(self, i: tk.Tile, block: int, step: Callable[..., Any], init: Any) -> Any:
        """Fold `step(j, attends, carry)` over the tiles of keys to which some query of tile i may attend."""
        return self._fold("keys", i, self.keys, block, step, init)

    def over_queries(self, j: tk.Tile, block: int, step: Callable[..., Any], init: Any) -> Any:
        """Fold `step(i, attends, carry)` over the tiles of queries that may attend to some key of tile j."""
        return self._fold("queries", j, self.queries, block, step, init)

    def _fold(self, dim: str, fixed: tk.Tile, extent: int, block: int, step: Callable[..., Any], init: Any) -> Any:
        def at(tile: tk.Tile, carry: Any, full: bool) -> Any:
            i, j = (fixed, tile) if dim == "keys" else (tile, fixed)
            return step(tile, self.attends(i, j, full=full), carry)

        if self.extras.block_map is None:
            start, stop = self.key_range(fixed) if dim == "keys" else self.query_range(fixed)
            axis = tk.serial(extent, block, start=start, stop=stop, whole_tiles=True)
            if dim == "keys":  # a loop is named after the first parameter of its body
                return tk.fold(axis, lambda j, carry: at(j, carry, False), init)
            return tk.fold(axis, lambda i, carry: at(i, carry, False), init)
        tiles, fulls, lives = self.extras.block_map.along(dim)
        per_b, per_n = (0 if size == 1 else x for size, x in zip(lives.shape[:2], (self.b, self.n), strict=True))
        parts = self.extras.block_map.parts(dim, block)
        row = fixed.index // self.extras.block_map.parts("queries" if dim == "keys" else "keys", fixed.size)

        def visit(full: bool) -> Callable[..., Any]:
            def body(t: Any, carry: Any) -> Any:
                index = tiles[per_b, per_n, row, t // parts] * parts + t % parts
                return at(tk.tile(extent, block, index), carry, full)

            return body

        full, live = fulls[per_b, per_n, row], lives[per_b, per_n, row]
        most = tiles.shape[3] * parts
        carry = tk.fold(tk.serial(most, stop=full * parts), visit(True), init)
        return tk.fold(tk.serial(most, start=full * parts, stop=live * parts), visit(False), carry)

    def key_range(self, i: tk.Tile) -> tuple[Any, Any]:
        """(start, stop) of keys: no query of tile i attends to a key outside."""
        keys = self.mask.keys_of(i, Span(0, self.keys, self.keys), self)
        return keys.start, keys.stop

    def query_range(self, j: tk.Tile) -> tuple[Any, Any]:
        """(start, stop) of queries: no query outside attends to a key of tile j."""
        queries = self.mask.queries_of(j, Span(0, self.queries, self.queries), self)
        return queries.start, queries.stop


@dataclass(frozen=True)
class TilePairs(Pairs):
    """All pairs of a tile of queries and a tile of keys, as masks see them."""

    scores: Scores
    queries: tk.Tile
    keys: tk.Tile

    @property
    def i(self) -> jax.Array:
        return self.queries.indices

    @property
    def j(self) -> jax.Array:
        return self.keys.indices

    @property
    def positions(self) -> jax.Array:
        return self.queries.indices + self.scores.offset

    def of_element(self, array: Any) -> jax.Array:
        return array[self.scores.b]

    def rows(self, x: jax.Array) -> jax.Array:
        return self.scores.rows(x)

    def columns(self, x: jax.Array) -> jax.Array:
        return self.scores.columns(x)

    def of_queries(self, array: Any) -> jax.Array:
        return array[self.scores.b, self.queries]

    def of_keys(self, array: Any) -> jax.Array:
        return array[self.scores.b, self.keys]

    def of_scores(self, array: Any) -> jax.Array:
        return self.scores.broadcast_to_scores(array, self.queries, self.keys)

    def call(self, function: Any) -> Any:
        return self.scores.call(function, self.queries, self.keys)


# --- inside and outside of kernels ----------------------------------------------------------------------------------


def is_plain(config: Config, extras: Extras) -> bool:
    """True if scores are scaled dot products."""
    return extras.bias is None and config.softcap is None and extras.score_mod is None


def folds(config: Config, extras: Extras) -> bool:
    """True if the scale is part of `factor`, so that logits are dot products.

    A scale of 0, or a scale whose product with another number might leave the range of float32, does not fold.
    """
    return is_plain(config, extras) and 2.0**-60 <= abs(config.scale) <= 2.0**60


def factor(config: Config, extras: Extras) -> float:
    """The factor f in a weight 2^(f (logit - largest))."""
    return LOG2_E * (abs(config.scale) if folds(config, extras) else 1)


def sink_logits(config: Config, extras: Extras, sinks: jax.Array, wide: Any) -> jax.Array:
    """Sinks in the unit of logits, [N] or a scalar, in the dtype `wide`."""
    sinks = sinks.astype(wide)
    return settled(sinks * wide.type(1 / abs(config.scale))) if folds(config, extras) else sinks


def settled(x: jax.Array) -> jax.Array:
    """x, rounded: a select, across which no compiler merges a product with a difference. NaN for +inf.

    A row with a logit of +inf is NaN anyway, because its largest logit is subtracted.
    """
    return jnp.where(x < jnp.inf, x, jnp.nan)


def dropped(rate: float, bits: jax.Array, weights: jax.Array) -> jax.Array:
    """Weights after dropout: a share of `rate` is 0, all others are divided by 1 - rate."""
    if rate == 1:
        return jnp.zeros_like(weights)
    survives = bits >= jnp.uint32(int(rate * 2**32))
    return jnp.where(survives, weights * np.asarray(1 / (1 - rate), weights.dtype), 0)
