"""Loads and stores of a batch of programs.

An access is one slice if the windows of all programs of the batch form one box of the array that is proved to lie
inside it. A box at a known place that reaches past the array is cut, and padded with the fill. All other accesses are
gathers and scatters, which drop lanes out of bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tilekern.ir.analysis.ranges import Interval, digit_interval
from tilekern.ir.core import Value
from tilekern.ir.memory import Dim, Load, MemoryOp, Store
from tilekern.ir.records import record
from tilekern.lower import positions


@record
class Batched:
    """A value in all programs of the batch.

    Attributes:
      array: has one leading dim for each axis of `axes`, then the tile's dims.
      axes: batched grid axes that the value depends on, ascending.
      interval: bounds of an integer value, if known.
      paths: in how many ways it depends on arrays in memory, through ops that XLA may compute in one loop.
    """

    array: Any
    axes: tuple[int, ...] = ()
    interval: Interval | None = None
    paths: int = 1


@record
class GridIndex(Batched):
    """The tile index along a batched axis: the `count` numbers from `base` on."""

    base: Any = 0
    count: int = 1
    base_interval: Interval | None = None


@record
class Window:
    """The elements that the programs of a batch touch along one dim.

    Attributes:
      start: first element.
      length: number of elements.
      radix: the batched axes by falling stride, each with its number of tiles.
      size: elements of one program.
      low, high: the part of the window inside the array, relative to `start`; the whole window unless it is cut.
    """

    start: Any
    length: int
    radix: tuple[tuple[int, int], ...]
    size: int
    low: int
    high: int


Environment = Mapping[Value, Batched]


def load(op: Load, array: jax.Array, env: Environment) -> Batched:
    """The tiles of a load from `array`."""
    array = array.reshape(op.extents)
    fill = as_array(env[op.fill]) if op.fill is not None else jnp.zeros((), array.dtype)
    fill_axes = env[op.fill].axes if op.fill is not None else ()
    boxes = windows(op, array.shape, env)
    if boxes is None or fill_axes:
        tile = _gather(op, array, env)
        inside = _in_bounds(op, array.shape, env)
    else:
        tile, inside = _slice(boxes, op, array, fill), None
    for mask in (inside, env[op.mask] if op.mask is not None else None):
        if mask is not None:
            tile = select(mask, tile, Batched(fill, fill_axes), len(op.access.shape))
    return tile


def store(op: Store, array: jax.Array, env: Environment, sizes: Mapping[int, int]) -> jax.Array:
    """`array` after a store."""
    return _stored(op, array.reshape(op.extents), env, sizes).reshape(array.shape)


def _stored(op: Store, array: jax.Array, env: Environment, sizes: Mapping[int, int]) -> jax.Array:
    value = env[op.value]
    mask = env[op.mask] if op.mask is not None else None
    boxes = windows(op, array.shape, env)
    if boxes is None:
        return _scatter(op, array, env, value, mask, sizes)
    if mask is not None:
        value = select(mask, value, read(boxes, op, array), len(op.access.shape))
    return write(boxes, op, array, value, sizes)


def read(boxes: Sequence[Window], op: MemoryOp, array: jax.Array) -> Batched:
    """The elements of a box; 0 where it reaches past the array."""
    return _slice(boxes, op, array, jnp.zeros((), array.dtype))


def write(
    boxes: Sequence[Window], op: MemoryOp, array: jax.Array, value: Batched, sizes: Mapping[int, int]
) -> jax.Array:
    """`array` with `value` in a box."""
    if any(w.low >= w.high for w in boxes):
        return array
    block = _to_box(boxes, op, value, sizes)
    cut = lax.slice(block, [w.low for w in boxes], [w.high for w in boxes])
    starts = [w.start + w.low if isinstance(w.start, int) else w.start for w in boxes]
    if block.shape == array.shape == cut.shape:
        return cut
    return lax.dynamic_update_slice(array, cut, _as_indices(starts))


# --- boxes ----------------------------------------------------------------------------------------------------------


def windows(op: MemoryOp, shape: Sequence[int], env: Environment) -> list[Window] | None:
    """The box that the batch touches; None if it is no box, or not proved to lie inside the array."""
    dim_windows = [_window(dim, size, op, env) for dim, size in zip(op.access.dims, shape, strict=True)]
    boxes = [w for w in dim_windows if w is not None]
    axes = [axis for w in boxes for axis, _ in w.radix]
    return boxes if len(boxes) == len(dim_windows) and len(axes) == len(set(axes)) else None


def _window(dim: Dim, extent: int, op: MemoryOp, env: Environment) -> Window | None:
    if dim.kind in ("gather", "along"):
        return None
    start: Any = dim.position.const
    low = high = dim.position.const
    bounded, strides = True, list[tuple[int, int, int]]()
    for term in dim.position.terms:
        scalar = env[op.positions[term.operand]]
        interval = digit_interval(term, scalar.interval)
        if isinstance(scalar, GridIndex) and term.plain:
            base, interval = scalar.base, scalar.base_interval
            strides.append((term.stride, scalar.axes[0], scalar.count))
        elif scalar.axes:
            return None
        else:
            base = term.digit(scalar.array)
        start = _sum(start, base, term.stride)
        if interval is None:
            bounded = False
        else:
            ends = (interval.low * term.stride, interval.high * term.stride)
            low, high = low + min(ends), high + max(ends)
    length = dim.size
    for stride, _, count in sorted(strides):
        if stride != length:
            return None
        length *= count
    radix = tuple((axis, count) for _, axis, count in sorted(strides, reverse=True))
    if isinstance(start, int):
        cut = max(0, min(-start, length)), max(0, min(extent - start, length))
        return Window(start, length, radix, dim.size, *cut)
    proved = dim.in_bounds or (bounded and low >= 0 and high + length <= extent)
    return Window(start, length, radix, dim.size, 0, length) if proved else None


def _sum(start: Any, base: Any, stride: int) -> Any:
    """`start + base * stride`: an int, or an int32 that may wrap around before it is a position in the array."""
    if isinstance(start, int) and isinstance(base, int):
        return start + base * stride
    return base * positions.wrapped(stride) + (positions.wrapped(start) if isinstance(start, int) else start)


def _as_indices(starts: Sequence[Any]) -> list[jax.Array]:
    return [jnp.asarray(s, jnp.int32) for s in starts]


def _slice(boxes: Sequence[Window], op: MemoryOp, array: jax.Array, fill: jax.Array) -> Batched:
    """Load a box as one slice, and split it into the programs' tiles."""
    sizes = [max(0, w.high - w.low) for w in boxes]
    if 0 in sizes:
        tile = jnp.full([w.length for w in boxes], fill, array.dtype)
    elif all(isinstance(w.start, int) for w in boxes):
        begin = [w.start + w.low for w in boxes]
        tile = lax.slice(array, begin, [b + n for b, n in zip(begin, sizes, strict=True)])
    else:
        starts = [w.start + w.low if isinstance(w.start, int) else w.start for w in boxes]
        tile = lax.dynamic_slice(array, _as_indices(starts), sizes)
    if 0 not in sizes and any(n < w.length for n, w in zip(sizes, boxes, strict=True)):
        tile = lax.pad(tile, fill, [(w.low, w.length - w.high, 0) for w in boxes])
    return _from_box(boxes, op, tile)


def _digits(boxes: Sequence[Window]) -> tuple[list[int], list[int | None]]:
    """The shape of a box with each batched axis as a dim of its own; and the axis of each dim, None for lanes."""
    shape, owner = list[int](), list[int | None]()
    for w in boxes:
        shape += [count for _, count in w.radix]
        owner += [axis for axis, _ in w.radix]
        shape.append(w.size)
        owner.append(None)
    return shape, owner


def _order(owner: Sequence[int | None]) -> tuple[list[int], tuple[int, ...]]:
    """The permutation that brings the batched axes to the front, ascending; and these axes."""
    batched = sorted((axis, d) for d, axis in enumerate(owner) if axis is not None)
    lanes = [d for d, axis in enumerate(owner) if axis is None]
    return [*(d for _, d in batched), *lanes], tuple(axis for axis, _ in batched)


def _from_box(boxes: Sequence[Window], op: MemoryOp, box: jax.Array) -> Batched:
    shape, owner = _digits(boxes)
    order, axes = _order(owner)
    tile = box.reshape(shape).transpose(order)
    return Batched(tile.reshape(*tile.shape[: len(axes)], *op.access.shape), axes)


def _to_box(boxes: Sequence[Window], op: MemoryOp, value: Batched, sizes: Mapping[int, int]) -> jax.Array:
    shape, owner = _digits(boxes)
    order, axes = _order(owner)
    tile = aligned(value, axes, sizes)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return tile.reshape([shape[d] for d in order]).transpose(inverse).reshape([w.length for w in boxes])


# --- lane by lane ---------------------------------------------------------------------------------------------------


def _indices(op: MemoryOp, env: Environment) -> tuple[list[jax.Array], tuple[int, ...]]:
    """The index of every lane in each dim, in shapes that broadcast together; and the axes of their leading dims."""
    access = op.access
    used = {op.positions[t.operand] for d in access.dims for t in d.position.terms}
    axes = tuple(sorted({a for v in used for a in env[v].axes}))
    rank, indices = len(access.shape), list[jax.Array]()
    intervals = [env[v].interval for v in op.positions]
    for dim, lane, length in zip(access.dims, access.lanes, op.extents, strict=True):
        shape = [1] * (len(axes) + rank)
        if lane is not None and dim.kind == "block":
            shape[len(axes) + lane] = dim.size
        needed = {term.operand for term in dim.position.terms}
        numbers = [_spread(v, env, axes, lane, rank) if n in needed else None for n, v in enumerate(op.positions)]
        lanes = jnp.arange(dim.size if dim.kind == "block" else 1, dtype=jnp.int32).reshape(shape)
        indices.append(lanes + positions.index(dim.position, numbers, intervals, length, lanes.size))
    return indices, axes


def _spread(value: Value, env: Environment, axes: tuple[int, ...], lane: int | None, rank: int) -> jax.Array:
    """int32[*axes, *1 for each dim of the access]: a scalar position, or the vector of a gather along dim `lane`."""
    batched = env[value]
    array = jnp.asarray(batched.array, jnp.int32)
    leading = [array.shape[batched.axes.index(a)] if a in batched.axes else 1 for a in axes]
    lanes = [1] * rank
    if lane is not None and value.tile.shape:
        lanes[lane] = value.tile.shape[0]
    return array.reshape(*leading, *lanes)


def _in_bounds(op: MemoryOp, shape: Sequence[int], env: Environment) -> Batched:
    indices, axes = _indices(op, env)
    inside = jnp.asarray(True)
    for index, size in zip(indices, shape, strict=True):
        inside = inside & (index >= 0) & (index < size)
    batch = inside.shape[: len(axes)] if axes else ()
    return Batched(jnp.broadcast_to(inside, (*batch, *op.access.shape)), axes)


def _gather(op: Load, array: jax.Array, env: Environment) -> Batched:
    indices, axes = _indices(op, env)
    shape = jnp.broadcast_shapes(*(i.shape for i in indices)) if indices else ()
    shape = (*shape[: len(axes)], *op.access.shape)
    if 0 in array.shape:
        return Batched(jnp.zeros(shape, array.dtype), axes)
    # Lanes out of bounds read some element here; the caller replaces it by the fill.
    clamped = [jnp.clip(i, 0, n - 1) for i, n in zip(indices, array.shape, strict=True)]
    tile = array.at[tuple(clamped)].get(mode="promise_in_bounds") if clamped else array
    return Batched(jnp.broadcast_to(tile, shape), axes)


def _scatter(
    op: Store, array: jax.Array, env: Environment, value: Batched, mask: Batched | None, sizes: Mapping[int, int]
) -> jax.Array:
    if 0 in array.shape:
        return array
    axes = tuple(sorted({a for v in op.positions for a in env[v].axes} | {*value.axes, *(mask.axes if mask else ())}))
    places = targets(op, array.shape, env, mask, axes, sizes)
    return array.at[places].set(aligned(value, axes, sizes), mode="drop")


def targets(
    op: MemoryOp,
    extents: Sequence[int],
    env: Environment,
    mask: Batched | None,
    axes: tuple[int, ...],
    sizes: Mapping[int, int],
) -> tuple[jax.Array, ...]:
    """The index of all lanes in each dim, for all programs of `axes`; behind the end where nothing may be written."""
    indices, index_axes = _indices(op, env)
    shape = (*(sizes[a] for a in axes), *op.access.shape)
    spread = [
        i.reshape(*(i.shape[index_axes.index(a)] if a in index_axes else 1 for a in axes), *i.shape[len(index_axes) :])
        for i in indices
    ]
    keep = jnp.asarray(True) if mask is None else aligned(mask, axes, sizes)
    return tuple(
        jnp.broadcast_to(jnp.where(keep & (i >= 0), i, n), shape) for i, n in zip(spread, extents, strict=True)
    )


# --- batches --------------------------------------------------------------------------------------------------------


def as_array(value: Batched) -> jax.Array:
    """The array of a value. A Python int is a known position; it becomes an int32 even if 64-bit types are on."""
    return jnp.asarray(value.array, jnp.int32 if isinstance(value.array, int) else None)


def aligned(value: Batched, axes: tuple[int, ...], sizes: Mapping[int, int]) -> jax.Array:
    """The array with a leading dim for each of `axes` (a superset of the value's)."""
    array = as_array(value)
    if value.axes == axes:
        return array
    tile = array.shape[len(value.axes) :]
    leading = tuple(sizes[a] if a in value.axes else 1 for a in axes)
    return jnp.broadcast_to(array.reshape(*leading, *tile), (*(sizes[a] for a in axes), *tile))


def select(mask: Batched, value: Batched, otherwise: Batched, rank: int) -> Batched:
    """jnp.where over programs and lanes; `otherwise` may be a scalar."""
    axes = tuple(sorted({*mask.axes, *value.axes, *otherwise.axes}))

    def spread(batched: Batched) -> jax.Array:
        array = as_array(batched)
        tile = array.shape[len(batched.axes) :] or (1,) * rank
        leading = [array.shape[batched.axes.index(a)] if a in batched.axes else 1 for a in axes]
        return array.reshape(*leading, *tile)

    return Batched(jnp.where(spread(mask), spread(value), spread(otherwise)), axes)
