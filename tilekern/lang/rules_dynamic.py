"""Import rules for computed indices into tiles: dynamic slices, gathers and scatters of one window."""

from __future__ import annotations

from typing import Any, cast

import ml_dtypes
import numpy as np
from jax import lax

from tilekern._jax import JaxprEqn
from tilekern.errors import UnsupportedError
from tilekern.ir.compute import Select
from tilekern.ir.core import Value
from tilekern.ir.dynamic import DynamicSlice, DynamicUpdateSlice, Take
from tilekern.ir.shape import Broadcast, Iota, Reshape, Slice, Transpose
from tilekern.ir.types import BOOL, I32, INDEX, TileType, kind_of
from tilekern.lang.emitter import Emitter, Rule

# A dim of a gather's result: ("tile", a dim of the tile) or ("lane", a dim of the indices).
_Dim = tuple[str, int]


def position(emit: Emitter, value: Value, length: int) -> Value:
    """Convert positions to int32. Wider dtypes are clamped first: positions outside [0, length) to -1 or `length`."""
    tile = value.tile
    if tile.dtype.itemsize > 4 or (kind_of(tile.dtype) == "unsigned" and tile.dtype.itemsize == 4):
        value = emit.elementwise("min", value, emit.splat(length, tile))
        if kind_of(tile.dtype) == "signed":
            value = emit.elementwise("max", value, emit.splat(-1, tile))
    return emit.convert(value, I32)


def _dynamic_slice(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    x, *starts = operands
    places = [position(emit, v, n) for v, n in zip(starts, x.tile.shape, strict=True)]
    return emit.op(DynamicSlice, x, *places, sizes=tuple(eqn.params["slice_sizes"]))


def _dynamic_update_slice(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    x, update, *starts = operands
    places = [position(emit, v, n) for v, n in zip(starts, x.tile.shape, strict=True)]
    return emit.op(DynamicUpdateSlice, x, update, *places)


def element(emit: Emitter, x: Value, index: Value) -> Value:
    """Return x[index]. The index is int32 and in bounds."""
    shape = x.tile.shape
    starts = [index, *(emit.splat(0, INDEX) for _ in shape[1:])]
    return _reshape(emit, emit.op(DynamicSlice, x, *starts, sizes=(1, *shape[1:])), shape[1:])


def with_element(emit: Emitter, x: Value, value: Value, index: Value) -> Value:
    """Return a copy of `x` whose element x[index] is `value`. The index is int32 and in bounds."""
    shape = x.tile.shape
    starts = [index, *(emit.splat(0, INDEX) for _ in shape[1:])]
    return emit.op(DynamicUpdateSlice, x, _reshape(emit, value, (1, *shape[1:])), *starts)


def _gather(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
    """Gather by one `Take` along the indexed dims, which are merged into one; window elements become further lanes."""
    x, indices = operands
    numbers: Any = eqn.params["dimension_numbers"]
    taken: tuple[int, ...] = tuple(numbers.start_index_map)
    paired: tuple[int, ...] = tuple(numbers.operand_batching_dims)
    sizes: tuple[int, ...] = tuple(eqn.params["slice_sizes"])
    shape, lanes = x.tile.shape, len(indices.tile.shape) - 1
    whole_dims = [d for d in range(len(shape)) if d not in (*taken, *paired)]
    if not taken or any(shape[d] == 0 for d in taken) or any(sizes[d] != shape[d] for d in whole_dims):
        raise _not_a_take(eqn)

    windows = [d for d in taken if d not in numbers.collapsed_slice_dims]
    flat, inside = _flat_index(emit, indices, [(shape[d], sizes[d] if d in windows else 0) for d in taken])
    at = min(taken)
    outer, inner = [d for d in range(at) if d not in taken], [d for d in range(at, len(shape)) if d not in taken]
    x = _transpose(emit, x, (*outer, *taken, *inner))
    merged = int(np.prod([shape[d] for d in taken]))
    x = _reshape(emit, x, (*(shape[d] for d in outer), merged, *(shape[d] for d in inner)))

    lane_of = dict(zip(paired, numbers.start_indices_batching_dims, strict=True))
    free: list[_Dim] = [("lane", k) for k in range(lanes + len(windows)) if k not in lane_of.values()]
    names: tuple[list[_Dim], list[_Dim]] = ([], [])
    for dims, side in zip((outer, inner), names, strict=True):
        side += [("lane", lane_of[d]) if d in lane_of else ("tile", d) for d in dims]
    take_dims = [*names[0], *free, *names[1]]
    size_of = {("tile", d): shape[d] for d in whole_dims} | {("lane", k): n for k, n in enumerate(flat.tile.shape)}
    if paired:
        flat = _spread(emit, flat, names, free, size_of)
    result = emit.op(Take, x, flat, dim=len(outer), along=bool(paired))
    result = _reshape(emit, result, tuple(size_of[name] for name in take_dims))

    result_dims = _result_dims(
        numbers, [d for d in range(len(shape)) if d in windows or d in whole_dims], windows, lanes
    )
    result = _transpose(emit, result, tuple(take_dims.index(name) for name in result_dims))
    if eqn.params["mode"] is not lax.GatherScatterMode.FILL_OR_DROP:
        return result
    along = tuple(p for p, (kind, k) in enumerate(result_dims) if kind == "lane" and k < lanes)
    return _filled(emit, eqn, result, emit.op(Broadcast, inside, shape=result.tile.shape, dims=along))


def _result_dims(numbers: Any, offsets: list[int], windows: list[int], lanes: int) -> list[_Dim]:
    """Dims of a gather's result: its offset dims are dims of the tile, in order; all others are dims of the indices."""
    of_tile, lane_numbers = dict(zip(numbers.offset_dims, offsets, strict=True)), iter(range(lanes))
    dims: list[_Dim] = []
    for p in range(lanes + len(offsets)):
        d = of_tile.get(p, -1)
        if d < 0:
            dims.append(("lane", next(lane_numbers)))
        else:
            dims.append(("lane", lanes + windows.index(d)) if d in windows else ("tile", d))
    return dims


def _scatter(combine: str) -> Rule:
    """Write one window, or combine it with the old elements: `x.at[i].set(y)`, `x.at[:, :4].add(y)`."""

    def rule(emit: Emitter, eqn: JaxprEqn, operands: list[Value]) -> Value:
        x, indices, update = operands
        numbers: Any = eqn.params["dimension_numbers"]
        if len(indices.tile.shape) != 1 or numbers.operand_batching_dims:
            raise _not_one_window(eqn)
        shape, window = x.tile.shape, iter(update.tile.shape)
        sizes = tuple(1 if d in numbers.inserted_window_dims else next(window) for d in range(len(shape)))
        starts, inside = [emit.splat(0, INDEX) for _ in shape], emit.splat(True, TileType((), BOOL))
        moved: tuple[int, ...] = tuple(numbers.scatter_dims_to_operand_dims)
        for k, d in enumerate(moved):
            part = emit.op(Slice, indices, start=(k,), stop=(k + 1,), stride=(1,))
            starts[d] = position(emit, _reshape(emit, part, ()), shape[d] + 1)
            for test, bound in (("ge", 0), ("le", shape[d] - sizes[d])):
                within = emit.elementwise(test, starts[d], emit.splat(bound, INDEX))
                inside = emit.elementwise("and", inside, within)
        part = _reshape(emit, update, sizes)
        if combine:
            part = emit.elementwise(combine, emit.op(DynamicSlice, x, *starts, sizes=sizes), part)
        result = emit.op(DynamicUpdateSlice, x, part, *starts)
        if eqn.params["mode"] is not lax.GatherScatterMode.FILL_OR_DROP:
            return result
        return emit.op(Select, emit.broadcast_to(inside, shape), result, x)

    return rule


def _flat_index(emit: Emitter, indices: Value, dims: list[tuple[int, int]]) -> tuple[Value, Value]:
    """Flatten index vectors, along the last dim, to clamped row-major indices; also return which vectors are in bounds.

    `dims` holds the length of each indexed dim and the size of its window. A window adds a dim to the result; the size
    0 stands for a single element and adds none.
    """
    shape = indices.tile.shape
    lanes = shape[:-1]
    whole = (*lanes, *(window for _, window in dims if window))
    zero, along = emit.splat(0, TileType(lanes, I32)), len(lanes)
    flat, inside = emit.splat(0, TileType(whole, I32)), emit.splat(True, TileType(lanes, BOOL))
    for k, (length, window) in enumerate(dims):
        bounds = {"start": (*(0,) * len(lanes), k), "stop": (*lanes, k + 1), "stride": (1,) * len(shape)}
        start = position(emit, _reshape(emit, emit.op(Slice, indices, **bounds), lanes), length)
        last = emit.splat(length - max(window, 1), start.tile)
        low, high = emit.elementwise("ge", start, zero), emit.elementwise("le", start, last)
        inside = emit.elementwise("and", inside, emit.elementwise("and", low, high))
        start = emit.elementwise("min", emit.elementwise("max", start, zero), last)
        part = emit.op(Broadcast, start, shape=whole, dims=tuple(range(len(lanes))))
        if window:
            part = emit.elementwise("add", part, emit.op(Iota, shape=whole, dtype=I32, dim=along))
            along += 1
        flat = emit.elementwise("add", emit.elementwise("mul", flat, emit.splat(length, flat.tile)), part)
    return flat, inside


def _spread(
    emit: Emitter, flat: Value, names: tuple[list[_Dim], list[_Dim]], free: list[_Dim], sizes: dict[_Dim, int]
) -> Value:
    """Give the indices one dim for each dim of the tile: batch dims keep their place, all other lanes are merged."""
    outer, inner = ([name for name in side if name[0] == "lane"] for side in names)
    flat = _transpose(emit, flat, tuple(k for _, k in (*outer, *free, *inner)))
    count = int(np.prod([sizes[name] for name in free], dtype=np.int64))
    flat = _reshape(emit, flat, (*(sizes[n] for n in outer), count, *(sizes[n] for n in inner)))
    whole: list[_Dim] = [*names[0], ("lane", -1), *names[1]]
    shape = tuple(count if name == ("lane", -1) else sizes[name] for name in whole)
    dims = tuple(p for p, (kind, _) in enumerate(whole) if kind == "lane")
    return emit.op(Broadcast, flat, shape=shape, dims=dims)


def _filled(emit: Emitter, eqn: JaxprEqn, result: Value, inside: Value) -> Value:
    """JAX's default fill value: NaN, the least signed integer, the greatest unsigned integer, or true."""
    fill, dtype = eqn.params["fill_value"], result.tile.dtype
    if fill is None:
        match kind_of(dtype):
            case "float":
                fill = np.nan
            case "bool":
                fill = True
            case "signed":
                fill = ml_dtypes.iinfo(dtype).min
            case "unsigned":
                fill = ml_dtypes.iinfo(dtype).max
    return emit.op(Select, inside, result, emit.splat(fill, result.tile))


def _not_one_window(eqn: JaxprEqn) -> UnsupportedError:
    tile, indices, update = (cast(Any, v.aval) for v in eqn.invars)
    return UnsupportedError(
        "this way of updating a loaded tile is not part of the language",
        expected="one window: x.at[i].set(y), x.at[:, :4].add(y), lax.dynamic_update_slice",
        got=f"a {eqn.primitive.name} of {update} into {tile} at {indices}",
        fix="select with jnp.where(indices == i, new, old), add a one-hot product, or store to the output ref",
    )


def _not_a_take(eqn: JaxprEqn) -> UnsupportedError:
    tile, indices = (cast(Any, v.aval) for v in eqn.invars)
    return UnsupportedError(
        "this way of indexing a loaded tile is not part of the language",
        expected="x[i], x[idx], x[idx, a:b], jnp.take, jnp.take_along_axis of dims that have elements",
        got=f"a gather of {tuple(eqn.params['slice_sizes'])} from {tile} at {indices}",
        fix="slice the other dims apart, with lax.dynamic_slice, or index the ref instead: ref[tk.ds(start, size)]",
    )


def _reshape(emit: Emitter, x: Value, shape: tuple[int, ...]) -> Value:
    return x if x.tile.shape == shape else emit.op(Reshape, x, shape=shape)


def _transpose(emit: Emitter, x: Value, permutation: tuple[int, ...]) -> Value:
    return x if permutation == tuple(range(len(permutation))) else emit.op(Transpose, x, permutation=permutation)


DYNAMIC: dict[str, Rule] = {
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "scatter": _scatter(""),
    "scatter-add": _scatter("add"),
    "scatter-mul": _scatter("mul"),
    "scatter-max": _scatter("max"),
    "scatter-min": _scatter("min"),
}
