"""Axes of the grid and tiles: `parallel`, `Tile`, `ds`."""

from __future__ import annotations

import operator
from dataclasses import replace
from math import prod
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from tilekern import _jax, source
from tilekern.errors import ArgumentError, IndexingError, TraceError, checked
from tilekern.ir.core import Axis, cdiv, round_up
from tilekern.ir.records import record
from tilekern.ir.types import FOUR_BITS
from tilekern.lang import state
from tilekern.lang.incomparable import Incomparable
from tilekern.lang.primitives import program_index_p

Scalar = int | jax.Array
"""A Python int, or a traced int32 scalar."""

Live = tuple[jax.Array | None, jax.Array | None]
"""(first lane that counts, lane behind the last lane that counts) of a tile; None: all lanes count on that side."""

ALL: Live = (None, None)

LONGEST = 2**31 - 1
"""The most elements that int32 positions count."""

MOST_PROGRAMS = 2**62
"""The most programs of a grid, which no machine ever ran: a counter of 64 bits holds their number."""


def as_index(value: Any, subject: str) -> Scalar:
    """Convert `value` to a Python int or a traced int32 scalar. For any other value, the error names the `subject`."""
    if isinstance(value, (bool, float)) or not (_jax.is_array(value) or hasattr(value, "__index__")):
        raise _not_an_integer(value, subject)
    if not _jax.is_array(value):
        return operator.index(value)
    if value.shape != () or not jnp.issubdtype(value.dtype, jnp.integer):
        raise _not_an_integer(value, subject)
    if not isinstance(value, _jax.Tracer):
        return int(value)
    return as_positions(cast(jax.Array, value))


def as_positions(integers: Any) -> jax.Array:
    """Convert integers to int32. Integers that do not fit are clamped: they stay outside of every array.

    NumPy's integers are clamped by NumPy: without 64-bit types JAX would cut their upper bits off.
    """
    if is_wide(integers.dtype):
        library: Any = jnp if isinstance(integers, jax.Array) else np
        integers = library.clip(integers, max(-LONGEST, jnp.iinfo(integers.dtype).min), LONGEST)
    return jnp.asarray(integers if integers.dtype == jnp.int32 else integers.astype(jnp.int32))


def is_wide(dtype: Any) -> bool:
    """True if an integer dtype holds numbers that int32 does not hold."""
    return jnp.iinfo(dtype).max > LONGEST


def check_reach(value: Any, length: int, subject: str) -> None:
    """Refuse a traced position of a wide dtype along a dim longer than int32 can index: it would be clamped."""
    if length > LONGEST and _jax.is_array(value) and is_wide(value.dtype):
        raise IndexingError(
            f"{subject} is not an int32, and the dim is longer than those reach",
            expected=f"an int32, or a dim of at most {LONGEST} elements",
            got=f"{subject} = {describe(value)}, along {length} elements",
            fix="use a Tile, cast with .astype(jnp.int32), or reshape the array to two shorter dims",
        )


def describe(value: Any) -> str:
    """Describe a value in an error message: an array by its type, any other value by its repr."""
    if _jax.is_array(value):
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    digits = isinstance(value, int) and value.bit_length() > 1000  # Python refuses to print much longer integers
    text = f"an integer of {cast(int, value).bit_length()} bits" if digits else repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def way_out(dtype: Any) -> str:
    """Remedy, in an error, for an array of an unsupported dtype."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return "pass jax.random.key_data(key), an array; tk.random_bits draws from it"
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return "pass complex numbers as two real arrays"
    if dtype in FOUR_BITS:
        return "pass it as an argument of the kernel, or cast it outside with .astype"
    if jnp.issubdtype(dtype, jnp.integer):
        return "cast with .astype(jnp.int8), or pack the integers into bytes and unpack them with tk.unpack"
    if jnp.issubdtype(dtype, jnp.floating):
        return "cast with .astype(jnp.bfloat16), or pass the raw bits as integers"
    return "cast with .astype to a float, integer or bool dtype"


def _not_an_integer(value: Any, subject: str) -> ArgumentError:
    return ArgumentError(
        f"{subject} must be an integer",
        expected="a Python int or a traced integer scalar",
        got=f"{subject} = {describe(value)}",
        fix="use an integer; floats are not rounded silently",
    )


def static_int(value: Any, subject: str, minimum: int) -> int:
    """Convert `value` to a Python int of at least `minimum`, below 2⁶²."""
    is_static = hasattr(value, "__index__") and not isinstance(value, (bool, _jax.Tracer))
    number = operator.index(cast(int, value)) if is_static else -1
    if minimum <= number < 1 << 62:
        return number
    raise ArgumentError(
        f"{subject} must be a static integer of at least {minimum}",
        expected=f"a Python int >= {minimum}, below 2⁶²",
        got=f"{subject} = {number if is_static and number < 1 << 62 else describe(value)}",
        fix="pass an int that is known when the kernel is traced, e.g. from x.shape or a keyword-only argument",
    )


@record(eq=False, repr=False)
class Tile(Incomparable):
    """`size` consecutive positions along an axis of `extent` elements; indexes refs.

    Attributes:
      terms: traced scalars and their strides. The tile starts at Σ scalar * stride + `const`, in elements.
      const: static part of the start.
      size: the block, also where the tile reaches past the extent.
      extent: number of elements of the axis.
      index: number of the tile along its axis.
      scope: loop or kernel in which the tile may be used.
      live: range of lanes inside the range of the loop; all other lanes read fill values and store nothing.

    `tile + n` moves the tile by n elements, an int or a traced scalar. `tile * c` scales it to an axis with c elements
    for each element of this axis, `tile // c` to an axis with one element for each c. The live lanes move and scale,
    too.
    """

    terms: tuple[tuple[jax.Array, int], ...]
    const: int
    size: int
    extent: int
    index: Scalar
    scope: state.Scope
    live: Live = ALL

    @property
    def start(self) -> Scalar:
        """First position."""
        self.scope.check()
        self._check_length()
        total: Any = self.const
        for scalar, stride in self.terms:
            total = scalar * stride + total
        return total

    @property
    def stop(self) -> Scalar:
        """Last position plus one; it may exceed the extent."""
        return self.start + self.size

    @property
    def indices(self) -> jax.Array:
        """Positions, int32[size]."""
        return jnp.arange(self.size, dtype=jnp.int32) + self.start

    @property
    def valid(self) -> jax.Array:
        """Mask, bool[size], of the positions in the axis, 0 <= indices < extent, and in the range of the loop."""
        indices = self.indices
        in_axis = (indices >= 0) & (indices < self.extent)
        lanes = live_lanes(self.live, self.size)
        return in_axis if lanes is None else in_axis & lanes

    def __repr__(self) -> str:
        place = f"number {self.index}" if isinstance(self.index, int) else "number traced"
        return f"Tile({place}: {self.size} positions, of an axis of {self.extent})"

    def _check_length(self) -> None:
        """Refuse positions as numbers if the axis, in whole tiles, is longer than int32 can index."""
        end = round_up(self.extent, max(self.size, 1))
        if end > LONGEST:
            raise IndexingError(
                "the positions of a tile are int32, and its axis is longer than that",
                expected=f"an axis whose last tile ends at {LONGEST} at most; a longer one may index arrays as it is",
                got=f"an axis of {self.extent} elements in tiles of {self.size}",
                fix="use two axes: reshape the array to two shorter dims",
            )

    def _moved(self, offset: Any, sign: int) -> Tile:
        self.scope.check()
        if _is_wider(offset):
            raise self.no_value("+" if sign > 0 else "-", offset)
        check_reach(offset, self.extent, "the offset of a tile")
        shift = as_index(offset, "the offset of a tile")
        if isinstance(shift, int):
            return replace(self, const=self.const + sign * shift)
        return replace(self, terms=(*self.terms, (shift, sign)))

    def __add__(self, offset: Any) -> Tile:
        return self._moved(offset, 1)

    __radd__ = __add__

    def __sub__(self, offset: Any) -> Tile:
        return self._moved(offset, -1)

    def __mul__(self, factor: int) -> Tile:
        self.scope.check()
        if _is_wider(factor):
            raise self.no_value("*", factor)
        c = static_int(factor, "the factor of a tile", 1)
        scaled = tuple((scalar, stride * c) for scalar, stride in self.terms)
        low, high = self.live
        live = None if low is None else low * c, None if high is None else high * c
        return replace(self, terms=scaled, const=self.const * c, size=self.size * c, extent=self.extent * c, live=live)

    __rmul__ = __mul__

    def __floordiv__(self, divisor: int) -> Tile:
        self.scope.check()
        if _is_wider(divisor):
            raise self.no_value("//", divisor)
        c = static_int(divisor, "the divisor of a tile", 1)
        strides = [stride for _, stride in self.terms]
        if all(n % c == 0 for n in (*strides, self.const, self.size)):
            divided = tuple((scalar, stride // c) for scalar, stride in self.terms)
            low, high = self.live  # a lane is live if one of its c lanes is
            live = None if low is None else low // c, None if high is None else -(-high // c)
            size, extent = self.size // c, cdiv(self.extent, c)
            return replace(self, terms=divided, const=self.const // c, size=size, extent=extent, live=live)
        # The tile starts at a multiple of its size, which divides c: it lies in one element of the coarser axis.
        if c % self.size or any(n % self.size for n in (*strides, self.const)):
            raise TraceError(
                "a tile is divided by a number that does not line up with its block",
                expected=f"a divisor or a multiple of the block, {self.size}, and offsets that line up with both",
                got=f"tile // {c}",
                fix="choose the block as a multiple (or a divisor) of the number",
            )
        position = self.start // c
        terms = () if isinstance(position, int) else ((position, 1),)
        const = position if isinstance(position, int) else 0
        # Every tile of a loop has a live lane, so the only lane of the result is live.
        return replace(self, terms=terms, const=const, size=1, extent=cdiv(self.extent, c), live=ALL)

    def __index__(self) -> int:
        raise self.no_value("")

    def __iter__(self) -> Any:
        raise self.no_value("iter")

    def no_value(self, use: str, *others: Any) -> TraceError:
        """Make the error for a tile that is used as a number: in arithmetic, a comparison, or as a truth value."""
        compared = " ".join(["tile", use, *map(describe, others)]) if others else f"{use}(tile)" if use else ""
        return TraceError(
            "a Tile is used where a number is needed",
            expected="tile.start, tile.index or tile.indices",
            got=compared or "the Tile itself",
            fix="use tile.index for the number of the tile, tile.start for its first element, tile.indices for all",
        )


def _is_wider(value: Any) -> bool:
    """True for an array with at least one dim."""
    return _jax.is_array(value) and value.shape != ()


@record(eq=False)
class DynamicSlice(Incomparable):
    """Index of `size` elements from `start` on, made by `ds`."""

    start: Any
    size: int

    def __repr__(self) -> str:
        return f"tk.ds({describe(self.start)}, {self.size})"

    def no_value(self, use: str, *others: Any) -> TraceError:
        """Make the error for a `tk.ds` in arithmetic, in a comparison, or as a truth value."""
        return TraceError(
            "a tk.ds is used where a number is needed",
            expected="tk.ds(start, size) as an index of a ref",
            got=" ".join([repr(self), use, *map(describe, others)]) if others else f"{use}({self!r})",
            fix="compute with the start, then make the index: x[tk.ds(start + 1, size)]",
        )


@checked
def ds(start: Any, size: int) -> DynamicSlice:
    """Index of `size` consecutive elements from `start` on. `size` is static; `start` is an int or a traced scalar."""
    as_index(start, "the start of tk.ds")
    return DynamicSlice(start, static_int(size, "the size of tk.ds", 0))


def live_lanes(live: Live, size: int) -> jax.Array | None:
    """Mask of the live lanes, bool[size]; None if all are live."""
    low, high = live
    if low is None and high is None:
        return None
    lanes = jnp.arange(size, dtype=jnp.int32)
    not_before = None if low is None else lanes >= low
    not_behind = None if high is None else lanes < high
    return not_behind if not_before is None else not_before if not_behind is None else not_before & not_behind


def tile_at(axis: Axis, index: Scalar, scope: state.Scope) -> Tile:
    """Make tile number `index` of an axis."""
    terms = () if isinstance(index, int) else ((index, axis.block),)
    const = index * axis.block if isinstance(index, int) else 0
    return Tile(terms, const, axis.block, axis.extent, index, scope)


@checked
def parallel(extent: int, block: int | None = None, *, order: str | None = None) -> Any:
    """Declare a grid axis of `extent` elements: one program runs for each tile of `block` elements of it.

    Returns the program's `Tile`; without `block`, the program's index, a traced int32 scalar. The last tile may reach
    past the extent: its lanes there read fill values and store nothing. `order="descending"` starts the programs of
    the last tiles first, for axes whose last tiles have the most work. It does not change results.
    """
    if order not in (None, "ascending", "descending"):
        raise ArgumentError(
            "tk.parallel does not know this order",
            expected="'ascending' or 'descending'",
            got=f"order = {order!r}",
            fix="leave it out, or use tk.grid(..., order=tk.grouped(n)) for two axes",
        )
    return _declare(extent, block, order == "descending", 0)


def _declare(extent: int, block: int | None, descending: bool, group: int) -> Any:
    trace = state.current("tk.parallel")
    if _jax.current_trace() is not trace.top:
        raise TraceError(
            "tk.parallel is called inside a loop, a branch or a transformed function",
            expected="grid axes declared at the top of the kernel's body",
            got=f"tk.parallel({extent}, {block}) in a body that JAX traces by itself",
            fix="declare the axis at the top and pass the tile on; use tk.serial for a loop axis",
        )
    name = source.assigned_name(source.current()) or f"axis{len(trace.axes)}"
    axis = replace(make_axis(name, extent, block), descending=descending, group=group)
    grid = [a.tiles for a in (*trace.axes, axis)]
    if prod(grid) > MOST_PROGRAMS:
        raise ArgumentError(
            "the grid has too many programs to count",
            expected="at most 2⁶² programs; 2³¹ - 1 on GPUs and TPUs",
            got=f"{' × '.join(map(str, grid))} programs",
            fix="take larger blocks, or loop with tk.serial",
        )
    index: Any = _jax.bind(program_index_p, axis=len(trace.axes))
    trace.axes.append(axis)
    return index if block is None else tile_at(axis, index, trace.scope)


@record
class Grouped:
    """Order of programs, made by `grouped`."""

    size: int


@checked
def grouped(size: int) -> Grouped:
    """Order of programs for `grid`: walk the first axis in groups of `size` tiles, and the second axis for each group.

    In a matmul, programs that run at the same time then share tiles of both operands in the cache.
    """
    return Grouped(static_int(size, "the size of tk.grouped", 1))


@checked
def grid(*axes: Any, order: Grouped | None = None) -> tuple[Any, ...]:
    """Declare several grid axes: `i, j = tk.grid((M, block_m), (N, block_n), order=tk.grouped(8))`.

    Args:
      *axes: for each axis, its extent or (extent, block).
      order: order in which programs start. It does not change results.

    Returns:
      A tuple with the value of `parallel` for each axis.
    """
    if order is not None and (not isinstance(order, Grouped) or len(axes) < 2):  # pyright: ignore[reportUnnecessaryIsInstance] -- users pass anything
        raise ArgumentError(
            "tk.grid does not know this order",
            expected="tk.grouped(n), and at least two axes",
            got=f"order = {describe(order)}, {len(axes)} axes",
            fix="leave order out",
        )
    tiles: list[Any] = []
    for number, axis in enumerate(axes):
        extent, block = cast(tuple[Any, Any], axis) if isinstance(axis, tuple) else (axis, None)
        tiles.append(_declare(extent, block, False, order.size if order is not None and number == 0 else 0))
    return tuple(tiles)


@checked
def tile(extent: int, block: int, index: Any) -> Tile:
    """Tile number `index` of an axis of `extent` elements in tiles of `block`. `index` is an int or a traced scalar."""
    trace = state.current("tk.tile")
    axis = make_axis("", extent, static_int(block, "block", 1))
    return tile_at(axis, as_index(index, "the index of tk.tile"), trace.scope)


def make_axis(name: str, extent: int, block: int | None) -> Axis:
    """Make an axis, and check its extent and block."""
    size = 1 if block is None else static_int(block, "block", 1)
    axis = Axis(name, static_int(extent, "extent", 0), size)
    if axis.tiles > LONGEST:
        raise ArgumentError(
            "an axis has too many tiles: their numbers are int32",
            expected=f"at most {LONGEST} tiles",
            got=f"{axis.tiles} tiles, {extent} elements in tiles of {size}",
            fix="take a larger block, or two axes",
        )
    return axis
