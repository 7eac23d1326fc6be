"""Exchange of rows between the devices of tokens and the devices of experts.

A device sends rows sorted by expert. The device of an expert receives rows sorted by expert, and the rows of one expert
sorted by sending device: the order that `ragged_dot` takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jax import lax

from tilekern._meshes import varying_like

type Method = Literal["ragged", "dense"]

METHODS: tuple[Method, ...] = ("ragged", "dense")


@dataclass(frozen=True)
class Layout:
    """Numbers of rows that devices exchange; n devices with m experts each.

    Attributes:
      axis: the mesh axis.
      counts: int32[n, n, m]: rows from each device to each device and expert there.
      sent: rows of each device, including rows of no expert.
      room: the most rows that one device sends to another.
    """

    axis: str
    counts: jax.Array
    sent: int
    room: int

    @staticmethod
    def gathered(axis: str, counts: jax.Array, *, sent: int, room: int) -> Layout:
        """The layout, gathered from the counts int32[n, m] of each device."""
        return Layout(axis, cast(Any, lax).all_gather(counts, axis), sent, room)

    @property
    def devices(self) -> int:
        """Devices of the axis."""
        return self.counts.shape[0]

    @property
    def outgoing(self) -> jax.Array:
        """int32[n, m]: rows from this device."""
        return self.counts[lax.axis_index(self.axis)]

    @property
    def incoming(self) -> jax.Array:
        """int32[n, m]: rows to this device."""
        return self.counts[:, lax.axis_index(self.axis)]

    @property
    def sizes(self) -> jax.Array:
        """int32[m]: rows to each expert of this device."""
        return _sum(self.incoming, 0)

    @property
    def sources(self) -> jax.Array:
        """int32[n, n, m]: the row of the sending device at which its rows to each device and expert begin."""
        return _before(self.counts.reshape(self.devices, -1), 1).reshape(self.counts.shape)

    @property
    def places(self) -> jax.Array:
        """int32[n, n, m]: the row of the receiving device at which the rows from each device to each expert begin."""
        return _before(_sum(self.counts, 0), 1) + _before(self.counts, 0)


def _before(sizes: jax.Array, axis: int) -> jax.Array:
    """Exclusive sums along the axis: [2, 3, 4] -> [0, 2, 5]."""
    return jnp.cumsum(sizes, axis, dtype=jnp.int32) - sizes


def _sum(sizes: jax.Array, axis: int) -> jax.Array:
    """Sums as int32, also with 64-bit types enabled."""
    return sizes.sum(axis, dtype=jnp.int32)


def send(layout: Layout, rows: jax.Array, method: Method | None) -> jax.Array:
    """rows[sent, H] of this device, sorted by expert -> [n room, H] for the experts of this device, then zeros."""
    return _by_platform(partial(_send_ragged, layout), partial(_send_dense, layout), layout, rows, method)


def receive(layout: Layout, results: jax.Array, method: Method | None) -> jax.Array:
    """The way back: results[n room, H] -> [sent, H]; rows of no expert are zeros."""
    return _by_platform(partial(_receive_ragged, layout), partial(_receive_dense, layout), layout, results, method)


def _by_platform(
    ragged: Callable[[jax.Array], jax.Array],
    dense: Callable[[jax.Array], jax.Array],
    layout: Layout,
    rows: jax.Array,
    method: Method | None,
) -> jax.Array:
    rows = varying_like(rows, [jax.typeof(layout.counts), jax.typeof(lax.axis_index(layout.axis))])
    if method is not None:
        return (ragged if method == "ragged" else dense)(rows)
    return cast(Any, lax).platform_dependent(rows, cpu=dense, default=ragged)


# --- ragged -----------------------------------------------------------------------------------------------------------


def _send_ragged(layout: Layout, rows: jax.Array) -> jax.Array:
    me = lax.axis_index(layout.axis)
    return _ragged(
        layout,
        rows,
        layout.devices * layout.room,
        layout.sources[me],
        layout.outgoing,
        layout.places[me],
        layout.incoming,
    )


def _receive_ragged(layout: Layout, results: jax.Array) -> jax.Array:
    me = lax.axis_index(layout.axis)
    places, sources = layout.places[:, me], layout.sources[:, me]
    return _ragged(layout, results, layout.sent, places, layout.incoming, sources, layout.outgoing)


def _ragged(layout: Layout, rows: jax.Array, size: int, *offsets_and_sizes: jax.Array) -> jax.Array:
    """[size, H] by `ragged_all_to_all`; for each device and expert: place here, size, place there, size received."""
    out = varying_like(jnp.zeros((size, rows.shape[1]), rows.dtype), [jax.typeof(rows)])
    flat = [x.reshape(-1) for x in offsets_and_sizes]
    return cast(Any, lax).ragged_all_to_all(rows, out, *flat, axis_name=layout.axis)


# --- dense ------------------------------------------------------------------------------------------------------------


def _send_dense(layout: Layout, rows: jax.Array) -> jax.Array:
    padded = _take(rows, _padding(layout))
    return _take(_all_to_all(layout, padded), _grouping(layout))


def _receive_dense(layout: Layout, results: jax.Array) -> jax.Array:
    room = layout.devices * layout.room
    padded = _take(results, _inverse(_grouping(layout), room))
    return _take(_all_to_all(layout, padded), _inverse(_padding(layout), layout.sent))


def _all_to_all(layout: Layout, padded: jax.Array) -> jax.Array:
    return lax.all_to_all(padded, layout.axis, 0, 0, tiled=True)


def _padding(layout: Layout) -> jax.Array:
    """int32[n room]: for each place in the blocks to send, a row of this device, or the number of its rows."""
    sizes = _sum(layout.outgoing, 1)
    place = jnp.arange(layout.room, dtype=jnp.int32)
    row = _before(sizes, 0)[:, None] + place
    return jnp.where(place < sizes[:, None], row, layout.sent).reshape(-1)


def _grouping(layout: Layout) -> jax.Array:
    """int32[n room]: for each row of the experts of this device, its place in the received blocks, or n room."""
    total = layout.devices * layout.room
    # Runs of rows of one device for one expert, in the order in which experts take them.
    sizes = layout.incoming.T.reshape(-1)
    block = layout.room * jnp.arange(layout.devices, dtype=jnp.int32)[:, None]
    first = (block + _before(layout.incoming, 1)).T.reshape(-1)
    row = jnp.arange(total, dtype=jnp.int32)
    run = jnp.searchsorted(jnp.cumsum(sizes, dtype=jnp.int32), row, side="right")
    place = (first - _before(sizes, 0)).at[run].get(mode="fill", fill_value=0) + row
    return jnp.where(row < _sum(sizes, 0), place, total)


def _inverse(index: jax.Array, size: int) -> jax.Array:
    """[size]: for each number below `size` its place in index; the length of index if index lacks the number."""
    places = jnp.arange(index.size, dtype=index.dtype)
    start = varying_like(jnp.full((size,), index.size, index.dtype), [jax.typeof(index)])
    return start.at[index].set(places, mode="drop")


def _take(rows: jax.Array, index: jax.Array) -> jax.Array:
    """rows[index], with zeros for indices past the last row."""
    return rows.at[index].get(mode="fill", fill_value=0)
