"""`Ref`: array in memory, indexed by tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilekern import _jax, source
from tilekern.errors import IndexingError, OutputError, checked
from tilekern.ir.memory import ATOMICS, Access, AtomicKind
from tilekern.ir.types import RefType, dtype_name, kind_of
from tilekern.lang import state
from tilekern.lang.incomparable import Incomparable
from tilekern.lang.indexing import Indexer
from tilekern.lang.primitives import atomic_p, load_p, store_p
from tilekern.lang.tiles import describe
from tilekern.lang.views import Selection, permutation, reshaped, sizes, transposed, whole

# Attributes of arrays that refs lack, because they compute, or read elements.
_METHODS = frozenset(name for name in dir(np.ndarray) if not name.startswith("_"))
# Methods of `.at[...]` of JAX's arrays that a ref has not, and what a body writes in their place.
_JAX_UPDATES = {
    "get": "{0}[index]",
    "set": "{0}[index] = value",
    **dict.fromkeys(
        ("apply", "divide", "mul", "multiply", "power", "subtract"),
        "{0}[index] = ... of a value that was loaded before",
    ),
}


@jax.tree_util.register_pytree_node_class
class Ref(Incomparable):
    """Array in memory, inside a kernel. It is loaded and stored by index; it has no arithmetic.

    An index has one entry for each dim; missing trailing entries, and `...`, stand for whole dims. Entries:
    a `Tile` or `tk.ds(start, size)` (consecutive elements), an integer (drops the dim), `:` or a static slice without
    step, an int32 vector (one element a lane; several vectors index orthogonally), `tk.points(...)` (index arrays that
    are paired element by element). Traced positions never wrap or clamp: lanes outside the array read the fill value
    and store nothing. Static negative integers and slice bounds count from the end, as in NumPy.

    Attributes:
      shape, dtype, ndim: shape, dtype and number of dims of the array, or of the view.
      name: name of the parameter.
    """

    def __init__(self, token: Any, type: RefType, name: str, base: Selection | None = None) -> None:
        self._token, self._type, self.name = token, type, name
        self._base = whole(type.shape) if base is None else base

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array, or of the view."""
        return self._base.shape

    @property
    def dtype(self) -> Any:
        """Dtype of the array."""
        return self._type.dtype

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        size = 1
        for n in self.shape:
            size *= n
        return size

    @property
    def at(self) -> At:
        """Views by index: `ref.at[index]` is a ref to this part of the array."""
        return At(self)

    @property
    def T(self) -> Ref:
        """View with the dims in reverse order."""
        return self.transpose()

    @property
    def mT(self) -> Ref:
        """View with the last two dims exchanged."""
        if self.ndim < 2:
            raise IndexingError(
                f"{self.name} has no two dims to exchange",
                expected="a ref of at least two dims",
                got=f"{self.name}.mT, of shape {list(self.shape)}",
                fix=f"leave it out: {self.name} is its own transpose",
            )
        return self.transpose(*range(self.ndim - 2), -1, -2)

    @checked
    def transpose(self, *axes: Any) -> Ref:
        """View whose dim `n` is dim `axes[n]`; without axes, the dims in reverse order. No element is moved."""
        return self._view(transposed(self._base, permutation(axes, self.ndim, self.name), self.name))

    @checked
    def reshape(self, *shape: Any) -> Ref:
        """View with the dims merged and split, in row-major order. One entry of `shape` may be -1. No element is moved.

        Raises:
          tilekern.errors.IndexingError: elements would have to be moved, or `shape` has another number of elements.
        """
        return self._view(reshaped(self._base, sizes(shape, self.size, self.name), self.name))

    def _view(self, selection: Selection) -> Ref:
        return Ref(self._token, self._type, self.name, selection)

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[RefType, str, Selection]]:
        """Flatten for JAX: the leaves are the ref's token, and the positions and live lanes of its view."""
        static = replace(self._base, operands=(), live=())
        return (self._token, self._base.operands, self._base.live), (self._type, self.name, static)

    @classmethod
    def tree_unflatten(cls, auxiliary: tuple[RefType, str, Selection], children: tuple[Any, ...]) -> Ref:
        """Unflatten for JAX: the inverse of `tree_flatten`."""
        type, name, static = auxiliary
        token, operands, live = children
        return cls(token, type, name, replace(static, operands=operands, live=live))

    def __repr__(self) -> str:
        return f"Ref({self.name}: {self._type})"

    @checked
    def __getitem__(self, index: Any) -> jax.Array:
        return self.load(index)

    @checked
    def __setitem__(self, index: Any, value: Any) -> None:
        self.store(index, value)

    @checked
    def load(self, index: Any, *, mask: Any = None, fill: Any = None) -> jax.Array:
        """Load the tile at `index`.

        Lanes are read if they are in bounds and `mask` (bool, broadcast to the tile) holds. All other lanes are `fill`,
        a scalar, 0 by default.
        """
        state.current(f"a load from {self.name}")
        if self._type.role == "sum":
            raise OutputError(
                f"{self.name} is a tk.Sum and cannot be loaded",
                expected=f"{self.name}.at[...].add(value) only",
                got=f"a load of {self.name}: {self._type}",
                fix="keep what the program needs in a tile or a carry; the sum exists when all programs have ended",
            )
        indexer, part, access = self._index(index)
        lanes, operands = self._lanes(indexer, part, mask), list[jax.Array]()
        if fill is not None:
            operands.append(self._fill(fill))
        tile = _jax.bind(
            load_p,
            self._token,
            *part.operands,
            *lanes,
            *operands,
            access=access,
            masked=bool(lanes),
            filled=fill is not None,
            shape=access.shape,
            dtype=self.dtype,
            loc=source.of_stack(),
        )
        return part.viewed(tile)

    @checked
    def store(self, index: Any, value: Any, *, mask: Any = None) -> None:
        """Write `value`, broadcast to the tile at `index`, to the lanes in bounds where `mask` holds."""
        if self._type.role == "sum":
            raise OutputError(
                f"{self.name} is a tk.Sum and cannot be stored to",
                expected=f"{self.name}.at[...].add(value)",
                got=f"a store to {self.name}: {self._type}",
                fix="add to it, or declare the output without tk.Sum",
            )
        self._write(store_p, index, value, mask)

    def _write(self, primitive: Any, index: Any, value: Any, mask: Any, **attributes: Any) -> None:
        trace = state.current(f"a store to {self.name}")
        indexer, part, access = self._index(index)
        tile = part.accessed(self._value(value, part.shape))
        lanes = self._lanes(indexer, part, mask)
        loc = source.of_stack()
        trace.effects[loc] = "store"
        operands = (tile, *part.operands, *lanes)
        _jax.bind(primitive, self._token, *operands, access=access, masked=bool(lanes), loc=loc, **attributes)

    def _index(self, index: Any) -> tuple[Indexer, Selection, Access]:
        indexer = Indexer(self.name, self._base)
        part = indexer.select(index)
        return indexer, part, part.access(self._type.shape)

    def _lanes(self, indexer: Indexer, part: Selection, mask: Any) -> list[jax.Array]:
        """List with the mask of an access, or an empty list if the access has no mask."""
        inside = indexer.mask()
        if mask is None:
            return [] if inside is None else [inside]
        user_mask = part.accessed(self._mask(mask, part.shape))
        return [user_mask if inside is None else user_mask & inside]

    # --- atomics ---

    @checked
    def add(self, value: Any, *, mask: Any = None, ordered: bool = True) -> None:
        """Add `value` to this view atomically: `ref.at[index].add(value)`.

        The ref must be a `tk.Sum` output, a `tk.Zeros` output or a donated input. A `tk.Sum` is deterministic. In the
        other kinds, floats need `ordered=False`: the order in which programs add is not fixed, nor is the rounding.
        """
        self._check_atomic("add")
        if ordered and self._type.role != "sum" and kind_of(self.dtype) == "float":
            raise OutputError(
                "a float atomic rounds differently from run to run",
                expected="ordered=False, if that is acceptable, or a tk.Sum output, which is deterministic",
                got=f"{self.name}: {self._type} with ordered=True",
                fix="declare the output as tk.Sum, or say ordered=False",
            )
        self._write(atomic_p, ..., value, mask, kind="add")

    @checked
    def max(self, value: Any, *, mask: Any = None) -> None:
        """Replace each element of this view by the larger of itself and `value`, atomically. NaN wins."""
        self._atomic("max", value, mask)

    @checked
    def min(self, value: Any, *, mask: Any = None) -> None:
        """Replace each element of this view by the smaller of itself and `value`, atomically. NaN wins."""
        self._atomic("min", value, mask)

    @checked
    def and_(self, value: Any, *, mask: Any = None) -> None:
        """Replace each element of this view by its bitwise (for bool: logical) AND with `value`, atomically."""
        self._atomic("and", value, mask)

    @checked
    def or_(self, value: Any, *, mask: Any = None) -> None:
        """Replace each element of this view by its bitwise (for bool: logical) OR with `value`, atomically."""
        self._atomic("or", value, mask)

    @checked
    def xor(self, value: Any, *, mask: Any = None) -> None:
        """Replace each element of this view by its bitwise (for bool: logical) XOR with `value`, atomically."""
        self._atomic("xor", value, mask)

    def _atomic(self, kind: AtomicKind, value: Any, mask: Any) -> None:
        self._check_atomic(kind)
        self._write(atomic_p, ..., value, mask, kind=kind)

    def _check_atomic(self, kind: AtomicKind) -> None:
        role, numbers = self._type.role, kind_of(self.dtype)
        if role in ("in", "out") or (role == "sum" and kind != "add"):
            raise OutputError(
                f"{self.name} does not take an atomic {kind}",
                expected="a tk.Zeros output or a donated input for any atomic, a tk.Sum output for add",
                got=f"{self.name}: {self._type}",
                fix="declare the output in out_type as tk.Zeros(...) or tk.Sum(...)",
            )
        if kind not in ATOMICS[numbers]:
            raise OutputError(
                f"an atomic {kind} of {dtype_name(self.dtype)} elements does not exist",
                expected=f"one of {', '.join(ATOMICS[numbers])}",
                got=f"{self.name}: {self._type}",
                fix="use bit operations on integers or bools, and sums of numbers",
            )

    def __getattr__(self, name: str) -> Any:
        if name in _JAX_UPDATES:
            raise IndexingError(
                f"a ref has no .at[...].{name}(...)",
                expected="a load or a store by index, or an atomic: add, max, min, and_, or_, xor",
                got=f"{self.name}.at[...].{name}",
                fix=f"write {_JAX_UPDATES[name].format(self.name)}",
            )
        if name not in _METHODS:
            raise AttributeError(f"a Ref has no attribute {name!r}", name=name, obj=self)
        raise self.no_value(f".{name}")

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

    def no_value(self, use: str, *others: Any) -> IndexingError:
        """Make the error for a ref in arithmetic, in a comparison, as a truth value, or as an array."""
        used = f"{self.name}{use}" if use[0] == "." else f"{use}({self.name})"
        used = " ".join([self.name, use, *map(describe, others)]) if others else used
        fix = f"use what you load, {self.name}[...]; ask for an argument with `{self.name} is not None`"
        return IndexingError(
            "a ref is used where a tile is needed",
            expected="a loaded tile, e.g. ref[tile] or ref[...]; `is` for an argument that may be None",
            got=f"{used}, where {self.name}: {self._type}",
            fix=f"use {self.name}.shape[0]" if use == "len" else fix,
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
            number = isinstance(value, (bool, int, float))
            subject = "number that the dtype does not hold" if number else "value that is no tile"
            raise OutputError(
                f"a {subject} is stored to {self.name}",
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
        array = None if isinstance(mask, (int, float)) and not isinstance(mask, bool) else _as_array(mask, jnp.bool_)
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

    def _broadcast(self, array: jax.Array, shape: tuple[int, ...], role: str) -> jax.Array:
        fits = array.ndim <= len(shape) and all(
            n in (1, m) for n, m in zip(reversed(array.shape), reversed(shape), strict=False)
        )
        if fits:
            return jnp.broadcast_to(array, shape)
        raise OutputError(
            f"the {role} does not fit the tile of {self.name}",
            expected=f"a shape that broadcasts to {shape}",
            got=f"{role} = {describe(array)}",
            fix="check the index and the shape; transpose or reshape the tile",
        )


def _as_array(value: Any, dtype: Any) -> jax.Array | None:
    """Convert a Python number to an array of `dtype`, or of its own dtype if `dtype` would round it.

    Arrays stay as they are; None for any other value.
    """
    if isinstance(value, (bool, int, float)):
        rounds = isinstance(value, float) and not jnp.issubdtype(dtype, jnp.floating)
        try:
            return _jax.as_strong(value if rounds else jnp.asarray(value, dtype))
        except OverflowError:
            return None
    return _jax.as_strong(value) if _jax.is_array(value) else None


class At:
    """Value of `ref.at`; indexing it gives a view of the ref."""

    def __init__(self, ref: Ref) -> None:
        self._ref = ref

    @checked
    def __getitem__(self, index: Any) -> Ref:
        ref = self._ref
        indexer = Indexer(ref.name, ref._base)  # pyright: ignore[reportPrivateUsage] -- a part of Ref
        selection = indexer.select(index)
        if indexer.inside:
            raise IndexingError(
                f"a view of a view of {ref.name} may reach past the first one",
                expected="static indices inside the view, or `:`",
                got="a Tile, tk.ds or a traced index into a dim that is a part of the array already",
                fix=f"index {ref.name} itself at the final place",
            )
        return ref._view(selection)  # pyright: ignore[reportPrivateUsage]
