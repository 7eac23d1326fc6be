"""`tk.points`: index arrays that are paired element by element. Plain vectors index orthogonally."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilekern import _jax
from tilekern.errors import IndexingError, checked
from tilekern.ir.records import record
from tilekern.lang.tiles import Tile, as_positions, check_reach, describe, live_lanes


@record(eq=False)
class Points:
    """Index arrays that are paired element by element, made by `points`.

    Attributes:
      indices: one index array for each dim that is indexed.
      shape: shape to which the index arrays broadcast.
    """

    indices: tuple[Any, ...]
    shape: tuple[int, ...]


@record(eq=False)
class Member:
    """Index array number `number` of `points`, as the entry for one dim."""

    points: Points
    number: int

    @property
    def index(self) -> Any:
        """Index array: a Tile, an integer, or an array of integers."""
        return self.points.indices[self.number]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the points, which the tile has in place of the indexed dims."""
        return self.points.shape

    def vector(self, index: Any, size: int, subject: str) -> jax.Array:
        """Positions of all lanes, int32[n], in a dim of `size` elements. `index` is the index array, normalised."""
        if isinstance(index, Tile):
            positions, live = index.indices, live_lanes(index.live, index.size)
            positions = positions if live is None else jnp.where(live, positions, -1)
        else:
            check_reach(index, size, subject)
            positions = as_positions(index) if _jax.is_array(index) else jnp.int32(index)
        return jnp.broadcast_to(positions, self.shape).reshape(prod(self.shape))


@checked
def points(*indices: Any) -> Points:
    """Index of single points: `x[tk.points(rows, columns)]` is `x[rows[k], columns[k]]` for each k.

    `indices` are Tiles, integers and arrays of integers. They broadcast against each other, as in NumPy, and each
    indexes one dim. The tile has their common shape in place of the indexed dims. A lane is in bounds if all of its
    indices are. Loads, stores, masks, views and atomics take points: `x.at[tk.points(r, c)].add(v)`.

    Raises:
      tilekern.errors.IndexingError: an index is of the wrong kind, or the indices do not broadcast.
    """
    for number, index in enumerate(indices):
        if not (isinstance(index, Tile) or is_integers(index)):
            raise IndexingError(
                f"index {number} of tk.points is of the wrong kind",
                expected="a Tile, an integer or an array of integers",
                got=f"index {number} = {describe(index)}",
                fix="make floats integers; give `:` and tk.ds beside tk.points, each for a dim of its own",
            )
    if not indices:
        raise IndexingError(
            "tk.points is given no index",
            expected="one index for each indexed dim",
            got="tk.points()",
            fix="give at least one Tile, integer or array of integers",
        )
    shapes = [(i.size,) if isinstance(i, Tile) else np.shape(i) for i in indices]
    try:
        return Points(indices, np.broadcast_shapes(*shapes))
    except ValueError:
        raise IndexingError(
            "the indices of tk.points do not go together",
            expected="shapes that broadcast against each other",
            got=f"shapes {', '.join(str(list(shape)) for shape in shapes)}",
            fix="give one index for each point; without tk.points, vectors select their product: x[rows, columns]",
        ) from None


def is_integers(index: Any) -> bool:
    """True for an integer, and for an array of integers."""
    if _jax.is_array(index):
        return jnp.issubdtype(index.dtype, jnp.integer)
    return not isinstance(index, bool) and hasattr(index, "__index__")


def width(entry: Any) -> int:
    """Number of dims that an entry of an index stands for; 0 for `...`."""
    return 0 if entry is ... else len(entry.indices) if isinstance(entry, Points) else 1


def together(name: str, entries: Sequence[Any]) -> list[Any]:
    """Expand points to one entry for each dim. Index arrays of two dims and more become points, by NumPy's rule."""
    ranks = {n: len(e.shape) for n, e in enumerate(entries) if _jax.is_array(e) and e.shape and is_integers(e)}
    expanded = list(entries)
    if max(ranks.values(), default=0) > 1:
        first, last = min(ranks), max(ranks)
        if len(set(ranks.values())) > 1 or last - first + 1 != len(ranks):
            raise IndexingError(
                f"the index arrays of {name} may go together or each for itself",
                expected="arrays of the same number of dims for dims that follow each other, or vectors only",
                got=f"index arrays {', '.join(f'{n}: {describe(entries[n])}' for n in ranks)}",
                fix="write tk.points(rows, columns) for arrays that are paired",
            )
        expanded[first : last + 1] = [points(*entries[first : last + 1])]
    return [e for entry in expanded for e in _members(entry)]


def _members(entry: Any) -> Sequence[Any]:
    return [Member(entry, n) for n in range(len(entry.indices))] if isinstance(entry, Points) else [entry]
