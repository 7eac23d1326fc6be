"""Atomic updates of a batch: the programs' values are combined first, then they update the array."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from tilekern.ir.compute import identity
from tilekern.ir.memory import Atomic, AtomicKind
from tilekern.lower.jax_ops import combiner
from tilekern.lower.xla.emit.access import Batched, Environment, aligned, read, select, targets, windows, write


def atomic(op: Atomic, array: jax.Array, env: Environment, sizes: Mapping[int, int]) -> jax.Array:
    """`array` after an update by every program of the batch, in program order."""
    if 0 in array.shape or 0 in op.access.shape:
        return array
    return _updated(op, array.reshape(op.extents), env, sizes).reshape(array.shape)


def _updated(op: Atomic, array: jax.Array, env: Environment, sizes: Mapping[int, int]) -> jax.Array:
    neutral = jnp.asarray(identity(op.kind, op.ref.ref.dtype)).astype(array.dtype)
    rank = len(op.access.shape)
    value = Batched(jnp.asarray(env[op.value].array).astype(array.dtype), env[op.value].axes)
    if op.mask is not None:
        value = select(env[op.mask], value, Batched(neutral), rank)
    # Every program updates the element once, also along axes that neither the value nor the position depends on.
    batched = tuple(sorted(axis for axis, size in sizes.items() if size > 1))
    placed = tuple(sorted({a for v in op.positions for a in env[v].axes}))
    values = aligned(value, batched, sizes)
    reduced_dims = tuple(d for d, axis in enumerate(batched) if axis not in placed)
    tile = Batched(lax.reduce(values, neutral, combiner(op.kind), reduced_dims), placed)
    boxes = windows(op, array.shape, env)
    if boxes is not None:
        old = read(boxes, op, array)
        new = combiner(op.kind)(aligned(old, placed, sizes), tile.array)
        return write(boxes, op, array, Batched(new, placed), sizes)
    places = targets(op, array.shape, env, None, placed, sizes)
    if op.kind in ("add", "max", "min"):
        return getattr(array.at[places], op.kind)(tile.array, mode="drop")
    return _one_by_one(op.kind, array, places, tile.array)


def _one_by_one(kind: AtomicKind, array: jax.Array, places: tuple[jax.Array, ...], value: jax.Array) -> jax.Array:
    """A scatter whose function XLA lacks, lane after lane."""
    flat, values = [p.reshape(-1) for p in places], value.reshape(-1)

    def lane(i: jax.Array, array: jax.Array) -> jax.Array:
        place = tuple(p[i] for p in flat)
        old = array.at[place].get(mode="fill", fill_value=0)
        return array.at[place].set(combiner(kind)(old, values[i]), mode="drop")

    return cast(jax.Array, lax.fori_loop(0, values.shape[0], lane, array))
