"""The scores of attention: what becomes of a logit between its dot product and its softmax, and who attends to whom.

All kernels of flash attention, forward, tangent and backward, see the scores through `Scores`, tile by tile:

    s = score_mod(softcap tanh((scale q·k + bias) / softcap), b, n, i, j), and -inf where the query does not attend.

A *term* is an array that a score depends on: the bias, and those that a `score_mod` carries. A term is read at one
place for each score, given by b and n, the query i and the key j, so that its derivative is that of an elementwise
function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

import tilekern as tk
from tilekern import _jax
from tilekern.errors import ArgumentError
from tilekern.lang.tiles import describe

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)


@dataclass(frozen=True)
class Config:
    """What is static about an attention.

    Attributes:
      scale: of the dot products.
      causal: whether query i attends to keys j <= i + offset only.
      offset: the position of the first query among the keys, plus that of `Extras.q_offset`.
      window: query i attends to keys from i + offset - left to i + offset + right; None: unbounded.
      softcap: logits are softcap * tanh(logits / softcap).
      dropout_rate: the share of weights that are dropped.
      precision: of the products of query and key, and of weights and value, as for `tk.dot`.
      blocks: for the kernels of derivatives, as pairs of name and size.
    """

    scale: float
    causal: bool = False
    offset: int = 0
    window: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    dropout_rate: float = 0.0
    precision: tuple[str | None, str | None] = (None, None)
    blocks: tuple[tuple[str, int], ...] = ()

    @property
    def positional(self) -> bool:
        """Whether the offset matters."""
        return self.causal or self.window != (None, None)


class Extras(NamedTuple):
    """The arrays that scores depend on besides query and key; None: there is no such thing.

    Attributes:
      bias: float [B or 1, N or 1, T or 1, S or 1].
      mask: bool, of such a shape; True: attend.
      q_offset: int32[B].
      segments: (int32[B, T], int32[B, S]), equal ids attend.
      ranges: for each query the first key of its segment, and the last but one: int32[B, T] twice. For the kernel that
        loops over queries the same for each key.
      q_lengths: int32[B].
      kv_lengths: int32[B].
      sinks: float [N].
      dropout_key: uint32[2].
      mask_mod: a `jax.tree_util.Partial` of arrays.
      score_mod: a `jax.tree_util.Partial` of arrays.
      block_map: a `BlockMap` of `mask`, or of `mask_mod`.
    """

    bias: Any = None
    mask: Any = None
    q_offset: Any = None
    segments: Any = None
    ranges: Any = None
    q_lengths: Any = None
    kv_lengths: Any = None
    sinks: Any = None
    dropout_key: Any = None
    mask_mod: Any = None
    score_mod: Any = None
    block_map: Any = None


class Tangents(NamedTuple):
    """Tangents of what the scores and values are made of, each like its primal; None is zero.

    Attributes:
      query: [B, T, N, H].
      key: [B, S, K, H].
      value: [B, S, K, Hv].
      bias: like `Extras.bias`.
      sinks: [N].
      carried: of the arrays that `Extras.score_mod` carries, in their order.
    """

    query: Any = None
    key: Any = None
    value: Any = None
    bias: Any = None
    sinks: Any = None
    carried: tuple[Any, ...] = ()


# --- functions of the user that carry arrays --------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a score reads a term.

    Attributes:
      array: the number of the term's array among the leaves of the function that carries it.
      entries: one for each dim of the array: "b", "n", "i", "j", or an integer, known or traced, made of b and n.
    """

    array: int
    entries: tuple[Any, ...]

    def has(self, dim: str) -> bool:
        """Whether a dim of the term is one of the scores'."""
        return any(isinstance(entry, str) and entry == dim for entry in self.entries)

    def index(self, positions: dict[str, Any]) -> tuple[Any, ...]:
        """The entries, with positions in place of names."""
        return tuple(positions[e] if isinstance(e, str) else e for e in self.entries)


class Carried:
    """Stands for an array that a function of the user carries: to be indexed, by b, n, i and j."""

    def __init__(self, array: Any, number: int, positions: dict[str, Any], read: Callable[[Place], Any]) -> None:
        self.shape, self.dtype = tuple(array.shape), array.dtype
        self._number, self._positions, self._read = number, positions, read

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    def __getitem__(self, index: Any) -> Any:
        entries: tuple[Any, ...] = cast(Any, index) if isinstance(index, tuple) else (index,)
        if len(entries) != self.ndim:
            raise self._wrong(f"{len(entries)} indices", f"an index for each of its {self.ndim} dims")
        return self._read(Place(self._number, tuple(self._entry(entry) for entry in entries)))

    def _entry(self, entry: Any) -> Any:
        for name, position in self._positions.items():
            if entry is position:
                return name
        integer = hasattr(entry, "__index__") or (_jax.is_array(entry) and jnp.issubdtype(entry.dtype, jnp.integer))
        if integer and not isinstance(entry, bool) and getattr(entry, "shape", ()) == ():
            return entry
        raise self._wrong(f"the index {describe(entry)}", "i or j themselves, and integers made of b and n")

    def __jax_array__(self) -> Any:
        raise self._wrong("the array itself", "an element of it for each score, such as slopes[n]")

    def __iter__(self) -> Any:
        raise self._wrong("a loop over it", "an element of it for each score, such as slopes[n]")

    def _wrong(self, got: str, expected: str) -> ArgumentError:
        return ArgumentError(
            f"a score_mod or mask_mod uses array {self._number} that it carries in a way that tiles do not allow",
            expected=expected,
            got=f"{got}, for {describe(self)}",
            fix="carry a table of what is needed for each b and n, each i, each j, or each i and j",
        )


def call(mod: Any, positions: dict[str, Any], read: Callable[[Place], Any], *scores: Any) -> Any:
    """A `Partial` of the user at some positions; its arrays are read by `read`."""
    leaves, tree = _flatten(mod)
    carried = [Carried(x, k, positions, read) if x.shape else read(Place(k, ())) for k, x in enumerate(leaves)]
    args, keywords = jax.tree.unflatten(tree, carried)
    return mod.func(*args, *scores, *positions.values(), **keywords)


def carried_by(mod: Any) -> list[Any]:
    """The arrays, or in a kernel the refs, that a `Partial` carries; none, if it is None."""
    return [] if mod is None else _flatten(mod)[0]


def with_carried(mod: Any, arrays: Sequence[Any]) -> Any:
    """A `Partial` that carries other arrays."""
    args, keywords = jax.tree.unflatten(_flatten(mod)[1], arrays)
    return jax.tree_util.Partial(mod.func, *args, **keywords)


def _flatten(mod: Any) -> tuple[list[Any], Any]:
    return cast(Any, jax.tree.flatten((mod.args, mod.keywords), is_leaf=lambda x: isinstance(x, tk.Ref)))


def places(mod: Any, b: Any, n: Any) -> list[Place]:
    """Where a `score_mod` reads the arrays that it carries, in the order in which it does."""
    found: list[Place] = []
    leaves = carried_by(mod)

    def read(place: Place) -> Any:
        found.append(place)
        return jnp.zeros((1, 1) if place.has("i") or place.has("j") else (), leaves[place.array].dtype)

    # Arrays of their own, by which entries are known.
    positions = {"b": b, "n": n, "i": jnp.zeros((1, 1), jnp.int32), "j": jnp.zeros((1, 1), jnp.int32)}
    call(mod, positions, read, jnp.zeros((1, 1)))
    return found


def abstract_places(mod: Any) -> list[Place]:
    """`places`, outside of a kernel: integers made of b and n are of no use there."""
    found: list[Place] = []
    jax.eval_shape(lambda b, n: found.extend(places(mod, b, n)), *[jax.ShapeDtypeStruct((), jnp.int32)] * 2)
    return found


def abstract_call(mod: Any, *dtypes: Any) -> Any:
    """The type of what a `mask_mod` returns (of a `score_mod`, given the dtype of scores) for 2 queries and 3 keys."""
    leaves = carried_by(mod)

    def read(place: Place) -> Any:
        shape = (2 if place.has("i") else 1, 3 if place.has("j") else 1)
        return jnp.zeros(shape if shape != (1, 1) else (), leaves[place.array].dtype)

    def run(b: Any, n: Any, i: Any, j: Any, *scores: Any) -> Any:
        return call(mod, {"b": b, "n": n, "i": i, "j": j}, read, *scores)

    of_scores = [((2, 3), dtype) for dtype in dtypes]
    shapes = [((), jnp.int32), ((), jnp.int32), ((2, 1), jnp.int32), ((1, 3), jnp.int32), *of_scores]
    return cast(Any, jax.eval_shape(run, *(jax.ShapeDtypeStruct(*s) for s in shapes)))


# --- inside of a kernel ---------------------------------------------------------------------------------------------


class Scores:
    """The scores of one head of one element of the batch, inside of a kernel.

    A tile of scores is [queries, keys], or with `transposed` [keys, queries]. With `sums_queries` queries past the last
    one attend to nothing, so that sums over queries may be taken.
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
    ) -> None:
        self.config, self.extras, self.b, self.n = config, extras, b, n
        self.queries, self.keys = lengths
        self.wide, self.transposed, self.sums_queries = wide, transposed, transposed or sums_queries
        self.offset: Any = config.offset if extras.q_offset is None else extras.q_offset[b] + config.offset
        self.plain = extras.bias is None and config.softcap is None and extras.score_mod is None
        self.carried = [] if extras.score_mod is None else places(extras.score_mod, b, n)
        self.carried_leaves = carried_by(extras.score_mod)

    # --- positions ---

    def rows(self, x: jax.Array) -> jax.Array:
        """A vector over queries, as it broadcasts against a tile of scores."""
        return x[None, :] if self.transposed else x[:, None]

    def columns(self, x: jax.Array) -> jax.Array:
        """A vector over keys, as it broadcasts against a tile of scores."""
        return x[:, None] if self.transposed else x[None, :]

    def sum_keys(self, x: jax.Array) -> jax.Array:
        """The sums of a tile of scores over its keys."""
        return x.sum(axis=0 if self.transposed else 1)

    def products(self, queries: jax.Array, keys: jax.Array, precision: str | None) -> jax.Array:
        """The dot products of rows of two tiles, as a tile of scores."""
        left, right = (keys, queries) if self.transposed else (queries, keys)
        return tk.dot(left, right.T, precision=precision)

    def load_queries(self, array: Any, i: tk.Tile) -> jax.Array:
        """A tile of query, or of an array like it; zeros for queries past the length."""
        if self.extras.q_lengths is None:
            return array[self.b, i, self.n]
        return array.load((self.b, i, self.n), mask=(i.indices < self.extras.q_lengths[self.b])[:, None])

    def load_keys(self, array: Any, j: tk.Tile, g: Any) -> jax.Array:
        """A tile of key or value; zeros for keys past the length."""
        if self.extras.kv_lengths is None:
            return array[self.b, j, g]
        return array.load((self.b, j, g), mask=(j.indices < self.extras.kv_lengths[self.b])[:, None])

    # --- scores ---

    def terms(self, i: tk.Tile, j: tk.Tile, bias: Any, carried: Sequence[Any]) -> list[Any]:
        """The terms of a tile: of the arrays themselves, or of others like them (None: of zeros)."""
        values: list[Any] = []
        if self.extras.bias is not None:
            values.append(None if bias is None else self._broadcast_to_scores(bias, i, j).astype(self.wide))
        for place in self.carried:
            array = carried[place.array]
            values.append(None if array is None else self._at(array, place, i, j))
        return values

    def own_terms(self, i: tk.Tile, j: tk.Tile) -> list[Any]:
        """The terms of a tile."""
        return self.terms(i, j, self.extras.bias, self.carried_leaves)

    def transform(self, i: tk.Tile, j: tk.Tile) -> Callable[..., jax.Array]:
        """The elementwise function from scaled dot products, and the terms, to scores."""

        def transformed(raw: jax.Array, terms: Sequence[jax.Array]) -> jax.Array:
            rest = iter(terms)
            s = raw if self.extras.bias is None else raw + next(rest)
            if self.config.softcap is not None:
                s = self.config.softcap * jnp.tanh(s / self.config.softcap)
            if self.extras.score_mod is not None:
                s = call(self.extras.score_mod, self._positions(i, j), lambda _: next(rest), s)
            return jnp.broadcast_to(s, raw.shape).astype(raw.dtype)

        return transformed

    def base2(self, i: tk.Tile, j: tk.Tile, products: jax.Array, attends: jax.Array) -> jax.Array:
        """Scores times log2(e), -inf where a query does not attend: 2^x is one instruction where e^x is several."""
        if self.plain:
            s = products * self.wide.type(self.config.scale * LOG2_E)
        else:
            raw = products * self.wide.type(self.config.scale)
            s = self.transform(i, j)(raw, self.own_terms(i, j)) * self.wide.type(LOG2_E)
        return jnp.where(attends, s, -jnp.inf)

    def tangents(
        self, i: tk.Tile, j: tk.Tile, products: jax.Array, moved: jax.Array | None, bias: Any, carried: Sequence[Any]
    ) -> jax.Array | None:
        """The tangents of the scores, from those of the dot products and of the terms; None is zero."""
        scale = self.wide.type(self.config.scale)
        if self.plain:
            return None if moved is None else moved * scale
        others = self.terms(i, j, bias, carried or [None] * len(self.carried_leaves))
        if moved is None and all(t is None for t in others):
            return None
        raw, own = products * scale, self.own_terms(i, j)
        along = jnp.zeros_like(raw) if moved is None else moved * scale
        which = [number for number, t in enumerate(others) if t is not None]

        def function(raw: jax.Array, *some: jax.Array) -> jax.Array:
            return self.transform(i, j)(raw, [some[which.index(m)] if m in which else t for m, t in enumerate(own)])

        _, ds = jax.jvp(function, (raw, *(own[m] for m in which)), (along, *(others[m] for m in which)))
        return ds

    def cotangents(
        self,
        i: tk.Tile,
        j: tk.Tile,
        query_key: tuple[jax.Array, jax.Array],
        cotangent_value: tuple[jax.Array, jax.Array],
        attends: jax.Array,
        base: jax.Array,
        delta: jax.Array,
        term: int | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """The cotangents of the scaled dot products (of a term, given its number), and the weights.

        `base` is the logsumexp in base 2, finite everywhere.
        """
        of_scores, of_values = self.config.precision
        products = self.products(*query_key, of_scores)
        scale = self.wide.type(self.config.scale)
        if self.plain:
            p = jnp.exp2(self.base2(i, j, products, attends) - self.rows(base))
            pull = None
        else:
            own = self.own_terms(i, j)
            if term is None:
                s, pull = jax.vjp(lambda raw: self.transform(i, j)(raw, own), products * scale)
            else:
                # At full size: what masks leave out must not take part in a sum, for it may be NaN.
                at = jnp.broadcast_to(own[term], products.shape)
                s, pull = jax.vjp(
                    lambda t: self.transform(i, j)(products * scale, [*own[:term], t, *own[term + 1 :]]), at
                )
            p = jnp.exp2(jnp.where(attends, s * self.wide.type(LOG2_E), -jnp.inf) - self.rows(base))
        dp = self.kept(i, j, self.products(*cotangent_value, of_values))
        ds = jnp.where(attends, p * (dp - self.rows(delta)), 0)
        if pull is not None:
            (ds,) = pull(ds)
            ds = jnp.where(attends, ds, 0)
        return ds, p

    def attends(self, i: tk.Tile, j: tk.Tile, *, full: bool = False) -> jax.Array:
        """Which queries of a tile attend to which keys; `full`: the mask of the block map is known to be True."""
        config, extras = self.config, self.extras
        found = self.columns(j.valid)
        if self.sums_queries:
            found = found & self.rows(i.valid)
        rows = self.rows(i.indices + self.offset) if config.positional else None
        columns = self.columns(j.indices)
        left, right = config.window
        if config.causal:
            found = found & (rows >= columns)
        if left is not None:
            found = found & (rows - left <= columns)
        if right is not None and not config.causal:
            found = found & (columns <= rows + right)
        if extras.q_lengths is not None:
            found = found & self.rows(i.indices < extras.q_lengths[self.b])
        if extras.kv_lengths is not None:
            found = found & self.columns(j.indices < extras.kv_lengths[self.b])
        if extras.segments is not None:
            of_queries, of_keys = extras.segments
            found = found & (self.rows(of_queries[self.b, i]) == self.columns(of_keys[self.b, j]))
        if extras.mask is not None and not full:
            found = found & self._broadcast_to_scores(extras.mask, i, j)
        if extras.mask_mod is not None and not full:
            leaves = carried_by(extras.mask_mod)

            def read(place: Place) -> Any:
                return self._at(leaves[place.array], place, i, j)

            found = found & call(extras.mask_mod, self._positions(i, j), read)
        return found

    def kept(self, i: tk.Tile, j: tk.Tile, weights: jax.Array) -> jax.Array:
        """Weights with dropout: a share is 0, the others are larger."""
        rate = self.config.dropout_rate
        if not rate:
            return weights
        return dropped(rate, tk.random_bits(self.extras.dropout_key[...], *self._positions(i, j).values()), weights)

    def _positions(self, i: tk.Tile, j: tk.Tile) -> dict[str, Any]:
        return {"b": self.b, "n": self.n, "i": self.rows(i.indices), "j": self.columns(j.indices)}

    def _at(self, array: Any, place: Place, i: tk.Tile, j: tk.Tile) -> jax.Array:
        """A term, so that it broadcasts against a tile of scores."""
        tile = array[place.index({"b": self.b, "n": self.n, "i": i, "j": j})]
        dims = [e for e in place.entries if isinstance(e, str) and e in "ij"]
        if not dims:
            return tile
        if len(dims) == 1:
            return self.rows(tile) if dims == ["i"] else self.columns(tile)
        return tile if (dims == ["i", "j"]) is not self.transposed else tile.T

    def _broadcast_to_scores(self, array: Any, i: tk.Tile, j: tk.Tile) -> jax.Array:
        return self._at(array, place_of(array.shape), i, j)

    # --- loops ---

    def over_keys(self, i: tk.Tile, block: int, step: Callable[..., Any], init: Any) -> Any:
        """Fold `step(j, attends, carry)` over those tiles of keys that some query of a tile may attend to."""
        return self._fold("keys", i, self.keys, block, step, init)

    def over_queries(self, j: tk.Tile, block: int, step: Callable[..., Any], init: Any) -> Any:
        """Fold `step(i, attends, carry)` over those tiles of queries that may attend to some key of a tile."""
        return self._fold("queries", j, self.queries, block, step, init)

    def _fold(self, what: str, fixed: tk.Tile, extent: int, block: int, step: Callable[..., Any], init: Any) -> Any:
        def at(tile: tk.Tile, carry: Any, full: bool) -> Any:
            i, j = (fixed, tile) if what == "keys" else (tile, fixed)
            return step(tile, self.attends(i, j, full=full), carry)

        if self.extras.block_map is None:
            start, stop = self.key_range(fixed) if what == "keys" else self.query_range(fixed)
            axis = tk.serial(extent, block, start=start, stop=stop)
            if what == "keys":  # a loop is named after the first parameter of its body
                return tk.fold(axis, lambda j, carry: at(j, carry, False), init)
            return tk.fold(axis, lambda i, carry: at(i, carry, False), init)
        tiles, fulls, lives = self.extras.block_map.along(what)
        per_b, per_n = (0 if size == 1 else x for size, x in zip(lives.shape[:2], (self.b, self.n), strict=True))
        coarse = self.extras.block_map.block(what)
        other = fixed.start // self.extras.block_map.block("queries" if what == "keys" else "keys")
        parts = coarse // block

        def visit(full: bool) -> Callable[..., Any]:
            def body(t: Any, carry: Any) -> Any:
                index = tiles[per_b, per_n, other, t // parts] * parts + t % parts
                return at(tk.tile(extent, block, index), carry, full)

            return body

        full, live = fulls[per_b, per_n, other], lives[per_b, per_n, other]
        most = tiles.shape[3] * parts
        carry = tk.fold(tk.serial(most, stop=full * parts), visit(True), init)
        return tk.fold(tk.serial(most, start=full * parts, stop=live * parts), visit(False), carry)

    def key_range(self, i: tk.Tile) -> tuple[Any, Any]:
        """The keys, from start to stop, outside of which no query of a tile attends."""
        (left, right), extras = self.config.window, self.extras
        right = 0 if self.config.causal else right
        start: Any = 0 if left is None else i.start + (self.offset - left)
        stop: Any = self.keys if right is None else i.stop + (self.offset + right)
        if extras.kv_lengths is not None:
            stop = _least(stop, extras.kv_lengths[self.b], self.keys)
        if extras.q_lengths is not None:
            stop = jnp.where(i.start < extras.q_lengths[self.b], stop, 0)
        return self._within_segments(i, self.keys, start, stop)

    def query_range(self, j: tk.Tile) -> tuple[Any, Any]:
        """The queries, from start to stop, outside of which none attends to a key of a tile."""
        (left, right), extras = self.config.window, self.extras
        right = 0 if self.config.causal else right
        start: Any = 0 if right is None else j.start - (self.offset + right)
        stop: Any = self.queries if left is None else j.stop + (left - self.offset)
        if extras.q_lengths is not None:
            stop = _least(stop, extras.q_lengths[self.b], self.queries)
        if extras.kv_lengths is not None:
            stop = jnp.where(j.start < extras.kv_lengths[self.b], stop, 0)
        return self._within_segments(j, self.queries, start, stop)

    def _within_segments(self, tile: tk.Tile, extent: int, start: Any, stop: Any) -> tuple[Any, Any]:
        if self.extras.ranges is None:
            return start, stop
        firsts, stops = self.extras.ranges
        first = firsts.load((self.b, tile), fill=extent).min()
        last = stops[self.b, tile].max()
        return jnp.maximum(start, first), jnp.minimum(stop, last)


def _least(stop: Any, length: Any, extent: int) -> Any:
    return length if isinstance(stop, int) and stop == extent else jnp.minimum(stop, length)


def place_of(shape: Sequence[int]) -> Place:
    """Where a score reads an array [B or 1, N or 1, T or 1, S or 1]: a dim of size 1 is broadcast."""
    return Place(0, tuple(0 if size == 1 else name for size, name in zip(shape, "bnij", strict=True)))


# --- what is the same inside and outside of kernels -----------------------------------------------------------------


def finite(logsumexp: jax.Array) -> jax.Array:
    """The logsumexp of rows that attend to something, 0 for the others: their weights are exp(-inf - 0) = 0."""
    return jnp.where(logsumexp == -jnp.inf, 0, logsumexp)


def dropped(rate: float, bits: jax.Array, weights: jax.Array) -> jax.Array:
    """Weights with dropout: a share of `rate` is 0, the others are divided by 1 - rate."""
    if rate == 1:
        return jnp.zeros_like(weights)
    kept = bits >= jnp.uint32(int(rate * 2**32))
    return jnp.where(kept, weights * np.asarray(1 / (1 - rate), weights.dtype), 0)
