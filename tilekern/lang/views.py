"""Views: parts of arrays, possibly transposed or reshaped, without moving an element."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any, cast

import jax
import jax.numpy as jnp

from tilekern.errors import IndexingError
from tilekern.ir.memory import Access, Dim, Position
from tilekern.ir.records import record
from tilekern.lang.tiles import ALL, Live


@record
class Selection:
    """View of an array: an access, the operands of its positions, and the order of its dims.

    Attributes:
      extents: shape of the array for the access; a reshaped view sees another shape of the same array.
      dims: dims of the access.
      operands: traced values to which the positions of `dims` refer.
      live: range of live lanes for each dim; an index has the single lane 0.
      order: dims of the access's tile, in the order of the view.
      forms: for each dim of the access's tile, its shape in the view: one dim, or the dims of index arrays.
    """

    extents: tuple[int, ...]
    dims: tuple[Dim, ...]
    operands: tuple[jax.Array, ...]
    live: tuple[Live, ...]
    order: tuple[int, ...]
    forms: tuple[tuple[int, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the view."""
        return tuple(n for lane in self.order for n in self.forms[lane])

    def access(self, array: tuple[int, ...]) -> Access:
        """Make the access to an array of this shape."""
        return Access(self.dims, None if self.extents == array else self.extents)

    def viewed(self, tile: jax.Array) -> jax.Array:
        """Transpose and reshape a tile of the access to the shape of the view."""
        if self.order != tuple(range(len(self.order))):
            tile = jnp.transpose(tile, self.order)
        return tile if tile.shape == self.shape else tile.reshape(self.shape)

    def accessed(self, tile: jax.Array) -> jax.Array:
        """Transpose and reshape a tile of the view to the shape of the access."""
        if self.order == tuple(range(len(self.order))):
            shape = tuple(prod(form) for form in self.forms)
            return tile if tile.shape == shape else tile.reshape(shape)
        moved = tile.reshape(tuple(prod(self.forms[lane]) for lane in self.order))
        return jnp.transpose(moved, sorted(range(len(self.order)), key=self.order.__getitem__))


def whole(shape: tuple[int, ...]) -> Selection:
    """View of a whole array."""
    dims = tuple(Dim("block", Position(), n) for n in shape)
    return Selection(shape, dims, (), (ALL,) * len(shape), tuple(range(len(shape))), tuple((n,) for n in shape))


# --- transposed ------------------------------------------------------------------------------------------------------


def transposed(view: Selection, axes: Sequence[int], name: str) -> Selection:
    """Permute the dims of a view to the order `axes`."""
    owners = [lane for lane in view.order for _ in view.forms[lane]]
    if len(owners) != len(view.order):
        raise _by_index_arrays(name, "transposed")
    return replace(view, order=tuple(owners[axis] for axis in axes))


def permutation(axes: Sequence[Any], rank: int, name: str) -> tuple[int, ...]:
    """Check the arguments of `transpose`, and return them as a permutation. No arguments reverse the dims."""
    order = _arguments(axes) if axes not in ((), (None,)) else list(range(rank))[::-1]
    numbers = all(isinstance(axis, int) and -rank <= axis < rank for axis in order)
    checked = tuple(axis % rank for axis in order) if numbers else ()
    if sorted(checked) != list(range(rank)):
        raise IndexingError(
            f"{name} cannot be transposed like that",
            expected=f"each of the {rank} dims once",
            got=f"axes = {tuple(order)}",
            fix=f"give a permutation of {tuple(range(rank))}, or nothing for the reverse order",
        )
    return checked


# --- reshaped --------------------------------------------------------------------------------------------------------


def sizes(shape: Sequence[Any], size: int, name: str) -> tuple[int, ...]:
    """Check the arguments of `reshape`, and return a shape of `size` elements. One argument may be -1."""
    extents = _arguments(shape)
    if all(isinstance(n, int) and n >= -1 for n in extents) and extents.count(-1) <= 1:
        known_size = prod(n for n in extents if n >= 0)
        if -1 in extents and known_size and size % known_size == 0:
            extents[extents.index(-1)] = size // known_size
        if -1 not in extents and prod(extents) == size:
            return tuple(extents)
    raise IndexingError(
        f"{name} cannot be reshaped to that",
        expected=f"a shape of {size} elements, with at most one -1",
        got=f"shape = {tuple(_arguments(shape))}",
        fix="merge or split the dims without changing the number of elements",
    )


def _arguments(arguments: Sequence[Any]) -> list[Any]:
    """Arguments of a method that takes numbers, or one tuple of numbers."""
    is_tuple = len(arguments) == 1 and isinstance(arguments[0], (tuple, list))
    return list(cast(Sequence[Any], arguments[0])) if is_tuple else list(arguments)


def reshaped(view: Selection, shape: tuple[int, ...], name: str) -> Selection:
    """Merge and split dims of a view. All other dims may select from the array in any way.

    Dims that are merged or split must be adjacent in the array, and whole in the view. Only the first, outermost dim
    may be a part of the array's dim; the part must start at a multiple of the dims that it is split into.
    """
    if shape == view.shape:
        return view
    if any(len(form) != 1 for form in view.forms):
        raise _by_index_arrays(name, "reshaped")
    if 0 in shape:
        if view.dims != whole(view.extents).dims:
            raise _not_apart(view, shape, name)
        return whole(shape)
    places = [d for d, dim in enumerate(view.dims) if dim.kind in ("block", "gather")]
    owners = [places[lane] for lane in view.order]
    return _assembled(view, shape, list(_groups(view, shape, owners)), name)


def _groups(view: Selection, shape: tuple[int, ...], owners: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Find the smallest groups of old dims and new dims with the same number of elements; unit dims are left out."""
    old = [d for d in owners if view.dims[d].size != 1]
    new = [n for n, size in enumerate(shape) if size != 1]
    while old:
        before, after = [old.pop(0)], [new.pop(0)]
        while (old_count := prod(view.dims[d].size for d in before)) != (new_count := prod(shape[n] for n in after)):
            if old_count < new_count:
                before.append(old.pop(0))
            else:
                after.append(new.pop(0))
        yield before, after


def _assembled(
    view: Selection, shape: tuple[int, ...], groups: Sequence[tuple[list[int], list[int]]], name: str
) -> Selection:
    """Make the view from its groups of dims. New unit dims are put in front of the array's dims."""
    units = [n for n, size in enumerate(shape) if size == 1]
    dims, live = [Dim("block", Position(), 1) for _ in units], [ALL for _ in units]
    extents, owners = [1 for _ in units], list(units)
    first = {before[0]: (before, after) for before, after in groups}
    merged = {d for before, _ in groups for d in before[1:]}
    for d, dim in enumerate(view.dims):
        if d in merged:
            continue
        if d not in first:  # an index, an index array behind the first one of points, or a unit dim
            dropped = dim if dim.kind in ("index", "along") else replace(dim, kind="index")
            if dim.kind == "gather":
                raise _not_apart(view, shape, name)
            new_dims = [(dropped, view.extents[d])]
        else:
            new_dims = list(_split(view, *first[d], shape, name))
            owners += first[d][1]
        live += [view.live[d], *(ALL for _ in new_dims[1:])]
        dims += [dim for dim, _ in new_dims]
        extents += [extent for _, extent in new_dims]
    order = tuple(owners.index(n) for n in range(len(shape)))
    lanes = [dim.size for dim in dims if dim.kind in ("block", "gather")]
    return Selection(tuple(extents), tuple(dims), view.operands, tuple(live), order, tuple((n,) for n in lanes))


def _split(
    view: Selection, before: Sequence[int], after: Sequence[int], shape: tuple[int, ...], name: str
) -> Iterator[tuple[Dim, int]]:
    """Split or merge the dims of one group; yields each new dim with its extent in the array."""
    dim, extent = view.dims[before[0]], view.extents[before[0]]
    if len(before) == len(after) == 1:
        yield dim, extent
        return
    inner = prod(view.extents[d] for d in before[1:])
    new = prod(shape[n] for n in after[1:])
    follow = list(before) == list(range(before[0], before[0] + len(before)))
    whole = all(view.dims[d] == Dim("block", Position(), view.extents[d]) for d in before[1:])
    steps = (extent, dim.position.const, *(term.stride for term in dim.position.terms))
    lines_up = view.live[before[0]] == ALL and all(step * inner % new == 0 for step in steps)
    if dim.kind != "block" or not (follow and whole and lines_up):
        raise _not_apart(view, shape, name)
    terms = tuple(replace(term, stride=term.stride * inner // new) for term in dim.position.terms)
    position = Position(terms, dim.position.const * inner // new)
    yield Dim("block", position, shape[after[0]]), extent * inner // new
    for n in after[1:]:
        yield Dim("block", Position(), shape[n]), shape[n]


def _by_index_arrays(name: str, how: str) -> IndexingError:
    return IndexingError(
        f"a view of {name} by index arrays of several dims cannot be {how}",
        expected="a view by tiles, slices, integers and vectors",
        got="dims that are those of index arrays",
        fix="load the view, and move the tile's dims",
    )


def _not_apart(view: Selection, shape: tuple[int, ...], name: str) -> IndexingError:
    return IndexingError(
        f"the view of {name} cannot be reshaped without moving elements",
        expected="dims to merge or split that follow each other in the array, and are whole; of the first one a part, "
        "if it starts at a multiple of what it is split into",
        got=f"{name}: {list(view.shape)} to {list(shape)}",
        fix="reshape the whole array before it is transposed or selected from, or load the view and reshape the tile",
    )
