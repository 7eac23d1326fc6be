"""`Ref`: an array in memory, indexed by tiles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import jax
import jax.numpy as jnp

from tilekern import _jax, source
from tilekern.errors import IndexingError, OutputError
from tilekern.ir.memory import Access, Dim, Position, Term
from tilekern.ir.types import RefType, dtype_name
from tilekern.lang import state
from tilekern.lang.primitives import load_p, store_p
from tilekern.lang.tiles import DynamicSlice, Tile, as_index, describe


@jax.tree_util.register_pytree_node_class
class Ref:
    """An array in memory inside a kernel: loads and stores by index, nothing else.

    An index has one entry for each dim; missing trailing entries, and `...`, stand for whole dims. Entries:
    a `Tile` or `tk.ds(start, size)` (consecutive elements), an integer (drops the dim), `:` or a static slice without
    step, an int32 vector (one element a lane; several vectors index orthogonally). Traced positions never wrap or
    clamp: lanes outside the array read the fill value and store nothing. Static negative integers and slice bounds
    count from the end, as in NumPy.

    Attributes:
      shape, dtype, ndim: of the array.
      name: of the parameter.
    """

    def __init__(self, token: Any, type: RefType, name: str) -> None:
        self._token, self._type, self.name = token, type, name

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return self._type.shape

    @property
    def dtype(self) -> Any:
        """The array's dtype."""
        return self._type.dtype

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self._type.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        size = 1
        for n in self._type.shape:
            size *= n
        return size

    def tree_flatten(self) -> tuple[tuple[Any], tuple[RefType, str]]:
        """For JAX: a ref travels as its token."""
        return (self._token,), (self._type, self.name)

    @classmethod
    def tree_unflatten(cls, auxiliary: tuple[RefType, str], children: tuple[Any]) -> Ref:
        """For JAX: the inverse of `tree_flatten`."""
        return cls(children[0], *auxiliary)

    def __repr__(self) -> str:
        return f"Ref({self.name}: {self._type})"

    def __getitem__(self, index: Any) -> jax.Array:
        return self.load(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.store(index, value)

    def load(self, index: Any, *, mask: Any = None, fill: Any = None) -> jax.Array:
        """The tile at `index`.

        `mask` (bool, broadcast to the tile) and the array's bounds say which lanes are read; the others are `fill`
        (a scalar; 0).
        """
        state.current(f"a load from {self.name}")
        indexer = _Indexer(self._type, self.name).add(index)
        operands = [*indexer.operands]
        if mask is not None:
            operands.append(self._mask(mask, indexer.access.shape))
        if fill is not None:
            operands.append(self._fill(fill))
        return _jax.bind(
            load_p,
            self._token,
            *operands,
            access=indexer.access,
            masked=mask is not None,
            filled=fill is not None,
            shape=indexer.access.shape,
            dtype=self.dtype,
            loc=source.of_stack(),
        )

    def store(self, index: Any, value: Any, *, mask: Any = None) -> None:
        """Write `value`, broadcast to the tile at `index`, to the lanes that are in bounds and not masked."""
        trace = state.current(f"a store to {self.name}")
        indexer = _Indexer(self._type, self.name).add(index)
        operands = [self._value(value, indexer.access.shape), *indexer.operands]
        if mask is not None:
            operands.append(self._mask(mask, indexer.access.shape))
        loc = source.of_stack()
        trace.stores[loc] = None
        _jax.bind(store_p, self._token, *operands, access=indexer.access, masked=mask is not None, loc=loc)

    def __iter__(self) -> Any:
        raise IndexingError(
            "a ref cannot be iterated over",
            expected="an index, e.g. ref[tile] or ref[...]",
            got=f"a loop over {self.name}",
            fix="loop with tk.fold or tk.foreach over tk.serial(...), or load the whole array with ref[...]",
        )

    def __jax_array__(self) -> Any:
        raise IndexingError(
            "a ref is used where a tile is needed",
            expected="a loaded tile, e.g. ref[tile] or ref[...]",
            got=f"the ref {self.name} itself, {self._type}",
            fix=f"load what you need: {self.name}[...] for all of it",
        )

    def _value(self, value: Any, shape: tuple[int, ...]) -> jax.Array:
        if self._type.role == "in":
            raise OutputError(
                f"{self.name} is an input and cannot be stored to",
                expected="a store to one of the outputs, the last parameters",
                got=f"{self.name}: {self._type}",
                fix="add an output to out_type and a parameter for it",
            )
        array = _as_array(value, self.dtype)
        if array is None:
            raise OutputError(
                f"a value that is no tile is stored to {self.name}",
                expected=f"a tile, or a Python number, for dtype {dtype_name(self.dtype)}",
                got=f"value = {describe(value)}",
                fix="store what was loaded and computed, or a number that the dtype holds",
            )
        if array.dtype != self.dtype:
            raise OutputError(
                f"a {dtype_name(array.dtype)} tile is stored to a {dtype_name(self.dtype)} output",
                expected=f"a tile of dtype {dtype_name(self.dtype)}",
                got=f"value = {describe(array)}",
                fix=f"cast it: value.astype({self.name}.dtype)",
            )
        return self._broadcast(array, shape, "value")

    def _mask(self, mask: Any, shape: tuple[int, ...]) -> jax.Array:
        array = _as_array(mask, jnp.bool_)
        if array is None or array.dtype != jnp.bool_:
            raise IndexingError(
                "a mask must be bool", expected="a bool tile", got=f"mask = {describe(mask)}", fix="compare: mask != 0"
            )
        return self._broadcast(array, shape, "mask")

    def _fill(self, fill: Any) -> jax.Array:
        array = _as_array(fill, self.dtype)
        if array is not None and array.shape == () and array.dtype == self.dtype:
            return array
        raise IndexingError(
            f"the fill of {self.name} must be a scalar of its dtype",
            expected=f"a {dtype_name(self.dtype)} scalar",
            got=f"fill = {describe(fill)}",
            fix="use a Python number, or cast the scalar",
        )

    def _broadcast(self, array: jax.Array, shape: tuple[int, ...], what: str) -> jax.Array:
        fits = array.ndim <= len(shape) and all(
            n in (1, m) for n, m in zip(reversed(array.shape), reversed(shape), strict=False)
        )
        if fits:
            return jnp.broadcast_to(array, shape)
        raise OutputError(
            f"the {what} does not fit the tile of {self.name}",
            expected=f"a shape that broadcasts to {shape}",
            got=f"{what} = {describe(array)}",
            fix="check the index and the shape; transpose or reshape the tile",
        )


def _as_array(value: Any, dtype: Any) -> jax.Array | None:
    """An array as it is, a Python number in `dtype` (in its own where that would round it); None for anything else."""
    if isinstance(value, (bool, int, float)):
        rounds = isinstance(value, float) and not jnp.issubdtype(dtype, jnp.floating)
        try:
            return _jax.as_strong(value if rounds else jnp.asarray(value, dtype))
        except OverflowError:
            return None
    return _jax.as_strong(value) if _jax.is_array(value) else None


@dataclass
class _Indexer:
    """Turns the entries of an index into an `Access` and its operands."""

    type: RefType
    name: str
    operands: list[jax.Array] = field(default_factory=list[jax.Array])
    dims: list[Dim] = field(default_factory=list[Dim])

    @property
    def access(self) -> Access:
        return Access(tuple(self.dims))

    def add(self, index: Any) -> _Indexer:
        entries: list[Any] = list(cast(tuple[Any, ...], index)) if isinstance(index, tuple) else [index]
        rank = len(self.type.shape)
        dots = [i for i, entry in enumerate(entries) if entry is ...]
        if len(dots) > 1 or len(entries) - len(dots) > rank:
            raise IndexingError(
                f"{self.name} has {rank} dims and is indexed with {len(entries)} entries",
                expected=f"at most {rank} entries, with at most one `...`",
                got=f"{self.name}[{', '.join(_name(e) for e in entries)}] of {self.type}",
                fix="give one entry for each dim",
            )
        missing = [slice(None)] * (rank - (len(entries) - len(dots)))
        place = dots[0] if dots else len(entries)
        entries[place : place + len(dots)] = missing
        for number, entry in enumerate(entries):
            self.dims.append(self._dim(number, entry, self.type.shape[number]))
        return self

    def _dim(self, number: int, entry: Any, size: int) -> Dim:
        if isinstance(entry, Tile):
            entry.scope.check()
            return Dim("block", self._position(entry.terms, entry.const), entry.size)
        if isinstance(entry, DynamicSlice):
            return Dim("block", self._scalar(entry.start), entry.size)
        if isinstance(entry, slice):
            return self._slice(number, entry, size)  # pyright: ignore[reportUnknownArgumentType] -- a slice of anything
        if isinstance(entry, bool) or not (_jax.is_array(entry) or hasattr(entry, "__index__")):
            raise self._wrong_entry(number, entry)
        if not _jax.is_array(entry) or entry.shape == ():
            return Dim("index", self._index(number, entry, size))
        if entry.ndim == 1 and jnp.issubdtype(entry.dtype, jnp.integer):
            self.operands.append(jax.lax.convert_element_type(jnp.asarray(entry), jnp.int32))
            return Dim("gather", Position((Term(len(self.operands) - 1, 1),)), entry.shape[0])
        raise self._wrong_entry(number, entry)

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
        if not isinstance(position, int):
            return self._scalar(position)
        if not -size <= position < size:
            raise self._out_of_range(number, str(position), size)
        return Position(const=position % size)

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
                raise self._out_of_range(number, f"{_name(entry.start)}:{_name(entry.stop)}", size)
        start, stop, _ = entry.indices(size)
        return Dim("block", Position(const=start), max(0, stop - start))

    def _out_of_range(self, number: int, got: str, size: int) -> IndexingError:
        return IndexingError(
            f"static index {number} of {self.name} is out of range",
            expected=f"positions in [-{size}, {size}] of a dim of {size} elements",
            got=f"index {number} = {got}",
            fix="static positions must lie in the array; a position that may not is written with tk.ds or a Tile",
        )

    def _wrong_entry(self, number: int, entry: Any) -> IndexingError:
        return IndexingError(
            f"index {number} of {self.name} is of the wrong kind",
            expected="a Tile, an integer, `:`, tk.ds(start, size) or a vector of integers",
            got=f"index {number} = {describe(entry)}",
            fix="give bool masks to ref.load(index, mask=...); make floats integers; flatten indices of rank 2",
        )


def static_bound(bound: Any, number: int, name: str) -> int:
    """A bound of a static slice as an int."""
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
