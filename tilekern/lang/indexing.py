"""Indices of refs: conversion of the user's index, through views, to an `Access`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import jax.numpy as jnp

from tilekern import _jax
from tilekern.errors import IndexingError
from tilekern.ir.memory import Access, Dim, Position, Term
from tilekern.lang.points import Member, Points, is_integers, together, width
from tilekern.lang.tiles import ALL, DynamicSlice, Live, Tile, as_index, as_positions, check_reach, describe, live_lanes
from tilekern.lang.views import Selection


@dataclass
class Indexer:
    """Conversion of an index of a view to a new view, and to the mask of its lanes inside of the old view.

    Attributes:
      name: name of the ref.
      base: view that is indexed.
      operands: traced values to which the positions of `dims` refer.
      dims: dims of the access so far.
      live: live lanes of each dim in `dims`.
      inside: bounds checks of indices that may leave a view smaller than its array: a dim, and a bool for each lane.
      leads: maps each dim of the access that is the first index array of points to the points.
    """

    name: str
    base: Selection
    operands: list[jax.Array] = field(default_factory=list[jax.Array])
    dims: list[Dim] = field(default_factory=list[Dim])
    live: list[Live] = field(default_factory=list[Live])
    inside: list[tuple[int, jax.Array]] = field(default_factory=list[tuple[int, jax.Array]])
    leads: dict[int, Points] = field(default_factory=dict[int, Points])

    def mask(self) -> jax.Array | None:
        """bool mask, of the access's shape, of the lanes that are live and inside the view; None if all lanes are."""
        shape = Access(tuple(self.dims)).shape
        mask: jax.Array | None = None
        for lane, inside in (*self.inside, *self._live_lanes()):
            spread = [1] * len(shape)
            if inside.ndim:
                spread[lane] = inside.shape[0]
            wide = jnp.broadcast_to(inside.reshape(spread), shape)
            mask = wide if mask is None else mask & wide
        return mask

    def _live_lanes(self) -> Iterator[tuple[int, jax.Array]]:
        for number, (dim, live) in enumerate(zip(self.dims, self.live, strict=True)):
            lanes = live_lanes(live, dim.size)
            if lanes is not None:
                lane = len(Access(tuple(self.dims[:number])).shape)
                yield lane, lanes[0] if dim.kind == "index" else lanes

    def select(self, index: Any) -> Selection:
        """Return the view that an index selects."""
        entries = self._entries(index)
        self.operands += self.base.operands
        pairs = zip(self.base.dims, self.base.live, self.base.extents, strict=True)
        lanes = iter(range(len(self.base.order)))
        places: dict[int, int] = {}  # the dim of the access's tile, for each dim of the base's tile
        for outer, live, extent in pairs:
            if outer.kind in ("index", "along"):
                if outer.kind == "along" and self.base.dims[self._last_gather()].kind != "gather":
                    raise self._torn_apart()
                self.dims.append(outer)
                self.live.append(live)
                continue
            number, entry = entries[lane := next(lanes)]
            inner = self._dim(number, entry, outer.size)
            untouched = outer == Dim("block", Position(), extent)
            if inner.kind in ("block", "gather"):
                places[lane] = len(Access(tuple(self.dims)).shape)
            live_now = self._still_live(live, inner, entry.live if isinstance(entry, Tile) else ALL)
            dim = inner if untouched else self._compose(number, outer, inner)
            self.live.append(live_now)
            self.dims.append(dim)
        return self._selection(entries, places)

    def _selection(self, entries: Sequence[tuple[int, Any]], places: Mapping[int, int]) -> Selection:
        """Make the view from the dims so far."""
        order = [places[lane] for lane in self.base.order if lane in places]
        sizes = Access(tuple(self.dims)).shape
        forms: list[tuple[int, ...]] = [(n,) for n in sizes]
        for lane, place in places.items():
            entry = entries[lane][1]
            forms[place] = entry.shape if isinstance(entry, Member) else forms[place]
            if isinstance(entry, slice) and len(self.base.forms[lane]) != 1:
                forms[place] = self.base.forms[lane]
        parts = tuple(self.dims), tuple(self.operands), tuple(self.live), tuple(order), tuple(forms)
        return Selection(self.base.extents, *parts)

    def _entries(self, index: Any) -> list[tuple[int, Any]]:
        """Assign entries to dims: for each dim of the base's tile, an entry and its number in the index."""
        entries: list[Any] = list(cast(tuple[Any, ...], index)) if isinstance(index, tuple) else [index]
        shape = self.base.shape
        rank, taken = len(shape), sum(width(entry) for entry in entries)
        dots = [i for i, entry in enumerate(entries) if entry is ...]
        if len(dots) > 1 or taken > rank:
            raise IndexingError(
                f"{self.name} has {rank} dims and is indexed with {taken + len(dots)} entries",
                expected=f"at most {rank} entries, with at most one `...`",
                got=f"{self.name}[{', '.join(_name(e) for e in entries)}] of shape {list(shape)}",
                fix="give one entry for each dim",
            )
        place = dots[0] if dots else len(entries)
        entries[place : place + len(dots)] = [slice(None)] * (rank - taken)
        lane_entries: list[tuple[int, Any]] = [(0, None)] * len(self.base.order)
        numbered_entries = iter(enumerate(together(self.name, entries)))
        for lane in self.base.order:
            form = [next(numbered_entries) for _ in self.base.forms[lane]]
            if len(form) == 1:
                lane_entries[lane] = form[0]
                continue
            for number, entry in form:
                if not (isinstance(entry, slice) and entry == slice(None)):
                    raise self._selected_before(number)
            lane_entries[lane] = (0, slice(None))
        return lane_entries

    def _still_live(self, outer: Live, inner: Dim, own: Live) -> Live:
        """Live lanes of `inner`, an index of a view's dim: the lanes that are live in the index and in the view."""
        if outer[0] is None and outer[1] is None:
            return own
        place = self._start(inner)
        low, high = (None if bound is None else jnp.asarray(bound - place) for bound in outer)
        if inner.kind in ("gather", "along"):
            lanes = [b <= 0 if n == 0 else b > 0 for n, b in enumerate((low, high)) if b is not None]
            self.inside += [(self._lane(inner), inside) for inside in lanes]
            return ALL
        return _narrower(jnp.maximum, low, own[0]), _narrower(jnp.minimum, high, own[1])

    def _compose(self, number: int, outer: Dim, inner: Dim) -> Dim:
        """Compose `inner`, an index of a view's dim, with `outer`, the view's dim as an index of the array."""
        if inner == Dim("block", Position(), outer.size):
            return outer
        if outer.kind == "gather":
            raise self._selected_before(number)
        position = inner.position
        is_inside = not position.terms and position.const >= 0 and position.const + inner.size <= outer.size
        if not is_inside:
            self.inside.append((self._lane(inner), self._inside(inner, outer.size)))
        terms = (*outer.position.terms, *position.terms)
        return Dim(inner.kind, Position(terms, outer.position.const + position.const), inner.size)

    def _lane(self, inner: Dim) -> int:
        """Dim of the access's tile for `inner`, the next dim of the access."""
        lane = Access((*self.dims, inner)).lanes[-1]
        return len(Access(tuple(self.dims)).shape) if lane is None else lane

    def _inside(self, inner: Dim, size: int) -> jax.Array:
        place = jnp.asarray(self._start(inner))
        if inner.kind == "block":
            place = jnp.arange(inner.size, dtype=jnp.int32) + place
        return (place >= 0) & (place < size)

    def _start(self, inner: Dim) -> Any:
        """Position of lane 0 in the view; for a gather, the position of each lane."""
        place: Any = 0
        for term in inner.position.terms:
            place = place + self.operands[term.operand] * term.stride
        return place + inner.position.const

    def _dim(self, number: int, entry: Any, size: int) -> Dim:
        if isinstance(entry, Member):
            return self._member(number, entry, size)
        if isinstance(entry, Tile):
            entry.scope.check()
            return Dim("block", self._position(entry.terms, entry.const), entry.size)
        if isinstance(entry, DynamicSlice):
            check_reach(entry.start, size, "the start of tk.ds")
            return Dim("block", self._scalar(as_index(entry.start, "the start of tk.ds")), entry.size)
        if isinstance(entry, slice):
            return self._slice(number, entry, size)  # pyright: ignore[reportUnknownArgumentType] -- a slice of anything
        if isinstance(entry, bool) or not (_jax.is_array(entry) or hasattr(entry, "__index__")):
            raise self._wrong_entry(number, entry)
        if not _jax.is_array(entry) or entry.shape == ():
            return Dim("index", self._index(number, entry, size))
        if is_integers(entry):
            check_reach(entry, size, f"index {number} of {self.name}")
            self.operands.append(as_positions(entry))
            return Dim("gather", Position((Term(len(self.operands) - 1, 1),)), entry.shape[0])
        raise self._wrong_entry(number, entry)

    def _member(self, number: int, entry: Member, size: int) -> Dim:
        """Convert one index array of points. The first makes a gather; all others go along with the gather."""
        subject, index = f"index {number} of {self.name}", entry.index
        if not isinstance(index, Tile) and (not _jax.is_array(index) or index.shape == ()):
            static = as_index(index, subject)
            index = self._static(number, static, size) if isinstance(static, int) else static
        elif isinstance(index, Tile):
            index.scope.check()
        vector = entry.vector(index, size, subject)
        self.operands.append(vector)
        position = Position((Term(len(self.operands) - 1, 1),))
        if not any(leads is entry.points for leads in self.leads.values()):
            self.leads[len(self.dims)] = entry.points
            return Dim("gather", position, vector.shape[0])
        if self.leads.get(self._last_gather()) is not entry.points:
            raise self._torn_apart()
        return Dim("along", position, vector.shape[0])

    def _last_gather(self) -> int:
        return max((n for n, dim in enumerate(self.dims) if dim.kind == "gather"), default=-1)

    def _position(self, terms: tuple[tuple[jax.Array, int], ...], const: int) -> Position:
        first = len(self.operands)
        self.operands += [scalar for scalar, _ in terms]
        return Position(tuple(Term(first + i, stride) for i, (_, stride) in enumerate(terms)), const)

    def _scalar(self, position: Any) -> Position:
        return Position(const=position) if isinstance(position, int) else self._position(((position, 1),), 0)

    def _index(self, number: int, entry: Any, size: int) -> Position:
        if _jax.is_array(entry) and not jnp.issubdtype(entry.dtype, jnp.integer):
            raise self._wrong_entry(number, entry)
        position = as_index(entry, f"index {number} of {self.name}")
        if isinstance(position, int):
            return Position(const=self._static(number, position, size))
        check_reach(entry, size, f"index {number} of {self.name}")
        return self._scalar(position)

    def _static(self, number: int, position: int, size: int) -> int:
        """Count a static index from the start."""
        if not -size <= position < size:
            raise self._out_of_range(number, str(position), f"indices in [-{size}, {size})", size)
        return position % size

    def _slice(self, number: int, entry: slice, size: int) -> Dim:
        if any(isinstance(bound, (Tile, _jax.Tracer)) for bound in (entry.start, entry.stop)):
            raise IndexingError(
                f"index {number} of {self.name} is a slice with a traced bound",
                expected="a slice with static bounds",
                got=f"slice({_name(entry.start)}, {_name(entry.stop)})",
                fix="use tk.ds(start, size): the start may be traced, the size is static",
            )
        if entry.step not in (None, 1):
            raise IndexingError(
                f"index {number} of {self.name} is a slice with a step",
                expected="a slice without a step",
                got=f"step = {entry.step}",
                fix="use an index vector: start + step * jnp.arange(n)",
            )
        for bound in (entry.start, entry.stop):
            if bound is not None and not -size <= static_bound(bound, number, self.name) <= size:
                shown = f"{_name(entry.start)}:{_name(entry.stop)}"
                raise self._out_of_range(number, shown, f"slice bounds in [-{size}, {size}]", size)
        start, stop, _ = entry.indices(size)
        return Dim("block", Position(const=start), max(0, stop - start))

    def _out_of_range(self, number: int, got: str, range: str, size: int) -> IndexingError:
        return IndexingError(
            f"static index {number} of {self.name} is out of range",
            expected=f"{range} of a dim of {size} elements",
            got=f"index {number} = {got}",
            fix="static positions must lie in the array; a position that may not is written with tk.ds or a Tile",
        )

    def _selected_before(self, number: int) -> IndexingError:
        return IndexingError(
            f"index {number} of {self.name} selects from a view by an index vector",
            expected="`:` for a dim that an index vector has selected",
            got="an index into such a dim",
            fix="load the view, or put the two indices together first",
        )

    def _torn_apart(self) -> IndexingError:
        return IndexingError(
            f"index arrays of {self.name} go together across a dim that has an index vector of its own",
            expected="no other index vector for a dim of the array between theirs",
            got="an index vector between two that go together",
            fix="load the view and index the tile, or give all index arrays to one tk.points, broadcast",
        )

    def _wrong_entry(self, number: int, entry: Any) -> IndexingError:
        return IndexingError(
            f"index {number} of {self.name} is of the wrong kind",
            expected="a Tile, an integer, `:`, tk.ds(start, size), a vector of integers or tk.points(...)",
            got=f"index {number} = {describe(entry)}",
            fix="give bool masks to ref.load(index, mask=...); make floats integers",
        )


def _narrower(function: Any, x: jax.Array | None, y: jax.Array | None) -> jax.Array | None:
    return y if x is None else x if y is None else function(x, y)


def static_bound(bound: Any, number: int, name: str) -> int:
    """Return a bound of a static slice as an int."""
    position = as_index(bound, f"a slice bound of index {number} of {name}")
    assert isinstance(position, int)  # traced bounds were refused before
    return position


def _name(entry: Any) -> str:
    if isinstance(entry, slice):
        return ":"
    return (
        "a traced scalar"
        if isinstance(entry, _jax.Tracer)
        else type(entry).__name__
        if isinstance(entry, Tile)
        else str(entry)
    )
