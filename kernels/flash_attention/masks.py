"""Masks of attention as values: `causal & window & segments` attends where each of the three masks does.

A mask answers two questions:
- Which pairs of query and key attend? Kernels ask about a tile of each, the definition about whole arrays.
- Which range of keys may a tile of queries attend to, and which range of queries to a tile of keys? Loops visit nothing
  outside.

`a & b` answers both from the answers of a and b. A new mask is one subclass of `Mask` and one line of `mask_of`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.flash_attention.arguments import Config, Extras


class Element(Protocol):
    """An element of the batch, inside of a kernel.

    Attributes:
      b: its number.
      offset: the position of its first query among its keys.
    """

    b: Any
    offset: Any


class Pairs(Protocol):
    """All pairs of some queries and some keys."""

    @property
    def i(self) -> Any:
        """int32, the numbers of the queries."""
        ...

    @property
    def j(self) -> Any:
        """int32, the numbers of the keys."""
        ...

    @property
    def positions(self) -> Any:
        """int32, for each of `i` its position among the keys: i + offset."""
        ...

    def of_element(self, array: Any) -> Any:
        """The entry of array[B] for the element of the batch."""
        ...

    def rows(self, x: Any) -> Any:
        """x, with an entry for each of `i`, in a shape that broadcasts along keys."""
        ...

    def columns(self, x: Any) -> Any:
        """x, with an entry for each of `j`, in a shape that broadcasts along queries."""
        ...

    def of_queries(self, array: Any) -> Any:
        """The entries of array[B, T] at `i`."""
        ...

    def of_keys(self, array: Any) -> Any:
        """The entries of array[B, S] at `j`."""
        ...

    def of_scores(self, array: Any) -> Any:
        """The entries of array[B or 1, N or 1, T or 1, S or 1] at the pairs, in a shape that broadcasts."""
        ...

    def call(self, function: Any) -> Any:
        """function(b, n, i, j) at the pairs, for a `Partial`, in a shape that broadcasts."""
        ...


class Span(NamedTuple):
    """A range of keys, or of queries, for a loop: from `start` up to, not including, `stop`.

    Attributes:
      start: int, or traced int32.
      stop: int, or traced int32.
      extent: int, the number of all keys, or of all queries.
    """

    start: Any
    stop: Any
    extent: int

    def since(self, first: Any) -> Span:
        """The span without what stands before `first`, int32; a loop clamps `first` to the extent."""
        is_whole = isinstance(self.start, int) and self.start == 0
        return self._replace(start=first if is_whole else jnp.maximum(self.start, first))

    def until(self, stop: Any) -> Span:
        """The span without `stop`, int32, and what stands behind; a loop clamps `stop` to the extent."""
        is_whole = isinstance(self.stop, int) and self.stop == self.extent
        return self._replace(stop=stop if is_whole else jnp.minimum(self.stop, stop))

    def only_if(self, condition: jax.Array) -> Span:
        """The span if `condition` holds, else an empty span."""
        return self._replace(stop=jnp.where(condition, self.stop, 0))


class Mask:
    """The base of masks: `a & b` is True for the pairs for which both a and b are True.

    A subclass overrides `attends`, and `keys_of` and `queries_of` if they can exclude anything.

    Attributes:
      is_alike_for_heads: True if the mask is the same for all heads.
      is_in_block_map: True if the mask is all True in the full tiles of a call's `BlockMap`.
    """

    is_alike_for_heads: ClassVar[bool] = True
    is_in_block_map: ClassVar[bool] = False

    def __and__(self, mask: Mask) -> AllOf:
        return AllOf((self,)) & mask

    def attends(self, pairs: Pairs) -> Any:
        """bool that broadcasts to the pairs: True for a query that attends to the key."""
        raise NotImplementedError

    def keys_of(self, i: tk.Tile, keys: Span, element: Element) -> Span:
        """The part of `keys` outside of which no query of tile i attends to a key."""
        return keys

    def queries_of(self, j: tk.Tile, queries: Span, element: Element) -> Span:
        """The part of `queries` outside of which no query attends to a key of tile j."""
        return queries


@dataclass(frozen=True)
class AllOf(Mask):
    """True for the pairs for which all of `masks` are True; AllOf() is True for all pairs."""

    masks: tuple[Mask, ...] = ()

    def __and__(self, mask: Mask) -> AllOf:
        return AllOf(self.masks + (mask.masks if isinstance(mask, AllOf) else (mask,)))

    def all_alike_for_heads(self) -> bool:
        """True if each of the masks is the same for all heads."""
        return all(mask.is_alike_for_heads for mask in self.masks)

    def outside_of_block_map(self) -> AllOf:
        """The masks that may be False for some pairs in full tiles of the block map."""
        return AllOf(tuple(mask for mask in self.masks if not mask.is_in_block_map))

    def among(self, attends: Any, pairs: Pairs) -> Any:
        """bool of the pairs: `attends` & each of the masks, in their order."""
        for mask in self.masks:
            attends = attends & mask.attends(pairs)
        return attends

    def attends(self, pairs: Pairs) -> Any:
        return self.among(jnp.ones((), bool), pairs)

    def keys_of(self, i: tk.Tile, keys: Span, element: Element) -> Span:
        return reduce(lambda span, mask: mask.keys_of(i, span, element), self.masks, keys)

    def queries_of(self, j: tk.Tile, queries: Span, element: Element) -> Span:
        return reduce(lambda span, mask: mask.queries_of(j, span, element), self.masks, queries)


# --- the masks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FirstKey(Mask):
    """Query i attends to the keys from i + offset - left on."""

    left: int

    def attends(self, pairs: Pairs) -> Any:
        rows = pairs.rows(pairs.positions)
        columns = pairs.columns(pairs.j)
        return rows - self.left <= columns

    def keys_of(self, i: tk.Tile, keys: Span, element: Element) -> Span:
        return keys.since(i.start + (element.offset - self.left))

    def queries_of(self, j: tk.Tile, queries: Span, element: Element) -> Span:
        return queries.until(j.stop + (self.left - element.offset))


@dataclass(frozen=True)
class LastKey(Mask):
    """Query i attends to the keys up to i + offset + right, included; LastKey(0) is the causal mask."""

    right: int = 0

    def attends(self, pairs: Pairs) -> Any:
        rows = pairs.rows(pairs.positions)
        columns = pairs.columns(pairs.j)
        return columns <= rows + self.right if self.right else rows >= columns

    def keys_of(self, i: tk.Tile, keys: Span, element: Element) -> Span:
        return keys.until(i.stop + (element.offset + self.right))

    def queries_of(self, j: tk.Tile, queries: Span, element: Element) -> Span:
        return queries.since(j.start - (element.offset + self.right))


@dataclass(frozen=True)
class QueryLengths(Mask):
    """Of element b of the batch, the queries from lengths[b] on attend to nothing.

    Attributes:
      lengths: int32[B], at most T.
    """

    lengths: Any

    def attends(self, pairs: Pairs) -> Any:
        return pairs.rows(pairs.i < pairs.of_element(self.lengths))

    def keys_of(self, i: tk.Tile, keys: Span, element: Element) -> Span:
        return keys.only_if(i.start < self.lengths[element.b])

    def queries_of(self, j: tk.Tile, queries: Span, element: Element) -> Span:
        return queries.until(self.lengths[element.b])


@dataclass(frozen=True)
class KeyLengths(Mask):
    """Of element b of the batch, nothing attends to the keys from lengths[b] on.

    Attributes:
      lengths: int32[B], at most S.
    """

    lengths: Any

    def attends(self, pairs: Pairs) -> Any:
        return pairs.columns(pairs.j < pairs.of_element(self.lengths))

    def keys_of(self, i: tk.Tile, keys: Span, element: Element) -> Span:
        return keys.until(self.lengths[element.b])

    def queries_of(self, j: tk.Tile, queries: Span, element: Element) -> Span:
        return queries.only_if(j.start < self.lengths[element.b])


@dataclass(frozen=True)
class Segments(Mask):
    """A query attends to the keys of equal id.

    Attributes:
      ids: (int32[B, T], int32[B, S]), the ids of queries and of keys.
      ranges: (first, stop), int32[B, T] twice: for each query the first key of its id, and the last plus 1. In a kernel
        that loops over queries int32[B, S] twice: the same of queries for each key. None: loops visit all.
    """

    ids: tuple[Any, Any]
    ranges: tuple[Any, Any] | None = None

    def attends(self, pairs: Pairs) -> Any:
        of_queries, of_keys = self.ids
        return pairs.rows(pairs.of_queries(of_queries)) == pairs.columns(pairs.of_keys(of_keys))

    def keys_of(self, i: tk.Tile, keys: Span, element: Element) -> Span:
        return self._within_ranges(i, keys, element)

    def queries_of(self, j: tk.Tile, queries: Span, element: Element) -> Span:
        return self._within_ranges(j, queries, element)

    def _within_ranges(self, tile: tk.Tile, span: Span, element: Element) -> Span:
        if self.ranges is None:
            return span
        firsts, stops = self.ranges
        first = firsts.load((element.b, tile), fill=span.extent).min()
        last = stops[element.b, tile].max()
        return span.since(first).until(last)


@dataclass(frozen=True)
class ArrayMask(Mask):
    """A query attends to a key where the array is True.

    Attributes:
      array: bool[B or 1, N or 1, T or 1, S or 1].
    """

    is_alike_for_heads = False
    is_in_block_map = True

    array: Any

    def attends(self, pairs: Pairs) -> Any:
        return pairs.of_scores(self.array)


@dataclass(frozen=True)
class FunctionMask(Mask):
    """Query i attends to key j where function(b, n, i, j) is True.

    Attributes:
      function: a `jax.tree_util.Partial` of arrays, elementwise, of a bool result.
    """

    is_alike_for_heads = False
    is_in_block_map = True

    function: Any

    def attends(self, pairs: Pairs) -> Any:
        return pairs.call(self.function)


def mask_of(config: Config, extras: Extras) -> AllOf:
    """The mask of a call: all of its arguments that mask something, combined."""
    left, right = config.window
    right = 0 if config.causal else right
    masks = (
        None if left is None else FirstKey(left),
        None if right is None else LastKey(right),
        None if extras.q_lengths is None else QueryLengths(extras.q_lengths),
        None if extras.kv_lengths is None else KeyLengths(extras.kv_lengths),
        None if extras.segments is None else Segments(extras.segments, extras.ranges),
        None if extras.mask is None else ArrayMask(extras.mask),
        None if extras.mask_mod is None else FunctionMask(extras.mask_mod),
    )
    return AllOf(tuple(mask for mask in masks if mask is not None))
