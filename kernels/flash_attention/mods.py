"""Functions of the user over positions and scores, `mask_mod` and `score_mod`, and the arrays that they carry.

For each score, a function reads an array at one place, made of b and n, the query i and the key j. So a tile of scores
needs one tile of the array, and the derivative is elementwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern import authoring
from tilekern.authoring import Incomparable, describe, hide_frames, is_array, make_jaxpr
from tilekern.errors import ArgumentError

hide_frames(__file__)


@dataclass(frozen=True)
class Place:
    """The place of an array that a score reads.

    Attributes:
      array: the number of the term's array among the leaves of the function that carries it.
      entries: for each dim of the array "b", "n", "i", "j", or an integer made of b and n, static or traced.
    """

    array: int
    entries: tuple[Any, ...]

    def has(self, dim: str) -> bool:
        """True if a dim of the array is the dim `dim` of the scores."""
        return any(isinstance(entry, str) and entry == dim for entry in self.entries)

    @property
    def is_scattered(self) -> bool:
        """True if an entry is an integer made of b and n, or if b or n indexes two dims."""
        names = [e for e in self.entries if isinstance(e, str)]
        return any(not isinstance(e, (str, int)) for e in self.entries) or len(names) > len(set(names))

    def index(self, positions: dict[str, Any]) -> tuple[Any, ...]:
        """The entries, with positions in place of names."""
        return tuple(positions[e] if isinstance(e, str) else e for e in self.entries)


class CarriedReadError(ArgumentError):
    """A function reads an array that it carries in a way that tiles do not allow."""


class Carried(Incomparable):
    """A stand-in for an array that a function of the user carries: it can only be indexed, by b, n, i and j."""

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
        integer = hasattr(entry, "__index__") or (is_array(entry) and jnp.issubdtype(entry.dtype, jnp.integer))
        if integer and not isinstance(entry, bool) and getattr(entry, "shape", ()) == ():
            return entry
        raise self._wrong(f"the index {describe(entry)}", "i or j themselves, and integers made of b and n")

    def no_value(self, use: str, *unused: Any) -> CarriedReadError:
        return self._wrong(f"the array itself in {use}", "an element of it for each score, such as slopes[n]")

    def __jax_array__(self) -> Any:
        raise self._wrong("the array itself", "an element of it for each score, such as slopes[n]")

    def __iter__(self) -> Any:
        raise self._wrong("a loop over it", "an element of it for each score, such as slopes[n]")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what JAX and NumPy look for
            raise AttributeError(name)
        raise self._wrong(f"its {name}", "an element of it for each score, such as slopes[n]")

    def _wrong(self, got: str, expected: str) -> CarriedReadError:
        return CarriedReadError(
            f"a score_mod or mask_mod uses array {self._number} that it carries in a way that tiles do not allow",
            expected=expected,
            got=f"{got}, for {describe(self)}",
            fix="carry a table of what is needed for each b and n, each i, each j, or each i and j",
        )


def call(mod: Any, positions: dict[str, Any], read: Callable[[Place], Any], *scores: Any) -> Any:
    """The result of the user's `Partial` at `positions`, which holds b, n, i and j; `read` reads its arrays."""
    leaves, tree = _flatten(mod)
    carried = [Carried(x, k, positions, read) if x.shape else read(Place(k, ())) for k, x in enumerate(leaves)]
    args, keywords = jax.tree.unflatten(tree, carried)
    return mod.func(*args, *scores, *positions.values(), **keywords)


def carried_by(mod: Any) -> list[Any]:
    """The arrays, or in a kernel the refs, that a `Partial` carries; [] for None."""
    return [] if mod is None else _flatten(mod)[0]


def with_carried(mod: Any, arrays: Sequence[Any]) -> Any:
    """The `Partial` with `arrays` in place of the arrays that it carries."""
    args, keywords = jax.tree.unflatten(_flatten(mod)[1], arrays)
    return jax.tree_util.Partial(mod.func, *args, **keywords)


def _flatten(mod: Any) -> tuple[list[Any], Any]:
    return cast(Any, jax.tree.flatten((mod.args, mod.keywords), is_leaf=lambda x: isinstance(x, tk.Ref)))


def places(mod: Any, b: Any, n: Any) -> list[Place]:
    """The places at which a `score_mod` reads the arrays that it carries, in the order of the reads."""
    places_read: list[Place] = []
    leaves = carried_by(mod)

    def read(place: Place) -> Any:
        places_read.append(place)
        return jnp.zeros((1, 1) if place.has("i") or place.has("j") else (), leaves[place.array].dtype)

    # Each position is an array of its own: entries are recognised by identity.
    positions = {"b": b, "n": n, "i": jnp.zeros((1, 1), jnp.int32), "j": jnp.zeros((1, 1), jnp.int32)}
    call(mod, positions, read, jnp.zeros((1, 1)))
    return places_read


def abstract_places(mod: Any) -> list[Place]:
    """`places` outside of a kernel: entries made of b and n are tracers without values."""
    places_read: list[Place] = []

    def run(b: jax.Array, n: jax.Array) -> None:
        places_read.extend(places(mod, b, n))

    jax.eval_shape(run, *[jax.ShapeDtypeStruct((), jnp.int32)] * 2)
    return places_read


def abstract_call(mod: Any, extents: dict[str, int], *dtypes: Any) -> Any:
    """The result type of a `mask_mod` (of a `score_mod`, given the dtype of scores) for 2 queries and 3 keys.

    Raises:
      CarriedReadError: the function reads an array at i or j twice, or a dim shorter than the extent of its position.
      ArgumentError: the function is not elementwise.
    """
    jaxpr = _jaxpr(mod, extents, dtypes, 2, 3)
    name = "score_mod" if dtypes else "mask_mod"
    of_two_sizes = [jaxpr, _jaxpr(mod, extents, dtypes, 5, 7)]
    authoring.check_elementwise(f"{name} of flash_attention", of_two_sizes, "the score, b, n, i and j")
    return jaxpr.out_avals[0]


def ends_in_product(mod: Any) -> bool:
    """True if the result of a `score_mod` may be a product: see `authoring.ends_in_product`."""
    return authoring.ends_in_product(_jaxpr(mod, {}, [jnp.float32], 2, 3))


def _jaxpr(mod: Any, extents: dict[str, int], dtypes: Sequence[Any], queries: int, keys: int) -> Any:
    """The jaxpr of a function on a tile [queries, keys], with inputs as `authoring.check_elementwise` takes them."""
    leaves = carried_by(mod)
    reads: list[jax.ShapeDtypeStruct] = []

    def record(place: Place) -> jax.Array:
        _check_read(place, leaves[place.array], extents)
        shape = (queries if place.has("i") else 1, keys if place.has("j") else 1)
        shape = shape if place.has("i") or place.has("j") else ()
        reads.append(jax.ShapeDtypeStruct(shape, leaves[place.array].dtype))
        return jnp.zeros(shape, reads[-1].dtype)

    def run(read: Callable[[Place], Any], b: Any, n: Any, i: Any, j: Any, *scores: Any) -> Any:
        return call(mod, {"b": b, "n": n, "i": i, "j": j}, read, *scores)

    def with_reads(*inputs: Any) -> Any:
        values = iter(inputs[4 + len(dtypes) :])
        return run(lambda _: next(values), *inputs[: 4 + len(dtypes)])

    of_scores = [((queries, keys), dtype) for dtype in dtypes]
    shapes = [((), jnp.int32), ((), jnp.int32), ((queries, 1), jnp.int32), ((1, keys), jnp.int32), *of_scores]
    inputs = [jax.ShapeDtypeStruct(*s) for s in shapes]
    jax.eval_shape(partial(run, record), *inputs)
    return make_jaxpr(with_reads, *inputs, *reads)


def _check_read(place: Place, array: Any, extents: dict[str, int]) -> None:
    names = [e for e in place.entries if isinstance(e, str)]
    short = any(isinstance(e, str) and n < extents.get(e, 0) for e, n in zip(place.entries, array.shape, strict=True))
    if short or any(names.count(e) > 1 for e in "ij"):
        sizes = [f"{extents.get(e, 0)} ({e})" if isinstance(e, str) else "any" for e in place.entries]
        raise CarriedReadError(
            f"array {place.array} that a score_mod or mask_mod carries does not fit where it is read",
            expected=f"at least [{', '.join(sizes)}] elements, and i and j once each",
            got=describe(array),
            fix="an array may have more elements than there are positions, never fewer",
        )


def place_of(shape: Sequence[int]) -> Place:
    """The place at which a score reads an array [B or 1, N or 1, T or 1, S or 1]; a dim of size 1 is broadcast."""
    return Place(0, tuple(0 if size == 1 else name for size, name in zip(shape, "bnij", strict=True)))
