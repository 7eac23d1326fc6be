"""Attention over a sequence that devices hold in parts, for `jax.shard_map`: in a ring, or by exchange of heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from tilekern import _meshes
from tilekern.authoring import hide_frames
from tilekern.distributed.axes import axis_size
from tilekern.errors import ArgumentError
from tilekern.ir.types import accumulator
from tilekern.kernels.flash_attention import flash_attention

hide_frames(__file__)

Layout = Literal["contiguous", "zigzag"]


def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    axis_name: str,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    segment_ids: tuple[jax.Array, jax.Array] | None = None,
    kv_lengths: jax.Array | None = None,
    sinks: jax.Array | None = None,
    layout: Layout = "contiguous",
    target: str | None = None,
) -> jax.Array:
    """Attention of a sequence that a mesh axis divides: keys and values travel around the ring of its devices.

    As `flash_attention` of the whole sequence. Each device has the keys of one other device at a time: memory does not
    grow with the number of devices, in the backward pass neither, in which cotangents of keys and values travel along.
    The exchange of a step does not wait for its attention. Partial results are merged by their logsumexps, in float32.

    With `causal`, devices with early parts of a contiguous sequence have less to do. In the layout "zigzag" device i of
    n has the parts i and 2n - 1 - i of 2n, see `to_zigzag`: then all have as much.

    Reverse mode of first order only, as of `jax.custom_vjp`.

    Source: Ring Attention, Liu et al. 2023, https://arxiv.org/abs/2310.01889.

    Args:
      query: [*B, T, N, H], a device's part.
      key: [*B, S, K, H], a device's part.
      value: [*B, S, K, Hv].
      axis_name: of the mesh axis that divides T and S, over which the `jax.shard_map` around the call is manual.
      causal: see `flash_attention`; positions are those in the whole sequence.
      window: as there.
      scale: as there.
      softcap: as there.
      segment_ids: integers [*B, T] and [*B, S], parts of those of the whole sequence.
      kv_lengths: integers [*B], of the whole sequence.
      sinks: float [N].
      layout: of the parts.
      target: as in each call of a kernel.

    Returns:
      [*B, T, N, Hv], a device's part.

    Raises:
      tilekern.errors.ArgumentError: there is no such axis; or a part cannot be halved for "zigzag".
    """
    config = _Config(axis_name, axis_size(axis_name, "ring_attention"), causal, window, scale, softcap, layout, target)
    if layout == "zigzag":
        _check_halves(query, key)
    ids = (None, None) if segment_ids is None else segment_ids
    arrays: tuple[Any, ...] = (query, key, value, sinks, *ids, kv_lengths)
    # The ring's own rule has no sums over devices that hold the same; the transpose of a cast to what varies has.
    alike = iter(_meshes.alike([*(x for x in arrays if x is not None), lax.axis_index(axis_name)]))
    *given, of_queries, of_keys, lengths = (None if x is None else next(alike) for x in arrays)
    return cast(jax.Array, _ring(config, *given, _Marks(of_queries, of_keys, lengths)))


@dataclass(frozen=True)
class _Config:
    """The static arguments, and the number of devices."""

    axis_name: str
    devices: int
    causal: bool
    window: tuple[int | None, int | None] | None
    scale: float | None
    softcap: float | None
    layout: Layout
    target: str | None

    def starts(self, device: Any, length: int) -> list[Any]:
        """The positions where the runs of a device's part of some length begin."""
        if self.layout == "contiguous":
            return [device * length]
        half = length // 2
        return [device * half, (2 * self.devices - 1 - device) * half]

    def send(self, tree: Any) -> Any:
        """The arrays of the device before this one in the ring."""
        ring = [(n, (n + 1) % self.devices) for n in range(self.devices)]
        return lax.ppermute(tree, self.axis_name, ring)


class _Marks(NamedTuple):
    """What is not differentiated: segments of queries and keys, lengths of keys."""

    of_queries: Any
    of_keys: Any
    lengths: Any


class _Partial(NamedTuple):
    """A result over some of the keys: [*B, T, N, Hv] and logsumexps [*B, T, N], in float32."""

    out: Any
    logsumexp: Any


def _merged(one: _Partial, other: _Partial) -> _Partial:
    total = jnp.logaddexp(one.logsumexp, other.logsumexp)
    first, second = (p.out * _weights(p.logsumexp, total)[..., None] for p in (one, other))
    return _Partial(first + second, total)


def _weights(part: Any, total: Any) -> Any:
    """exp(part - total); 0 where there is no key at all."""
    return jnp.exp(part - jnp.where(total == -jnp.inf, 0, total))


def _halves(config: _Config, x: Any, dim: int) -> list[Any]:
    """The runs of a part that are contiguous in the whole sequence; None has as many."""
    if config.layout == "contiguous":
        return [x]
    return [None, None] if x is None else jnp.split(x, 2, axis=dim)


def _of_part(config: _Config, source: Any, marks: _Marks, query: Any, key: Any, value: Any) -> _Partial:
    """The attention of this device's queries to the keys of another device."""
    here = config.starts(lax.axis_index(config.axis_name), query.shape[-3])
    there = config.starts(source, key.shape[-3])
    keys = [
        *zip(
            there,
            _halves(config, key, -3),
            _halves(config, value, -3),
            _halves(config, marks.of_keys, -1),
            strict=True,
        )
    ]
    of_queries = _halves(config, marks.of_queries, -1)
    rows: list[_Partial] = []
    for start, q, of_q in zip(here, _halves(config, query, -3), of_queries, strict=True):
        found: _Partial | None = None
        for first, k, v, of_k in keys:
            at = marks._replace(of_queries=of_q, of_keys=of_k)
            part = _of_run(config, start - first, first, at, q, k, v)
            found = part if found is None else _merged(found, part)
        assert found is not None
        rows.append(found)
    if len(rows) == 1:
        return rows[0]
    sums = [row.logsumexp for row in rows]
    return _Partial(jnp.concatenate([row.out for row in rows], axis=-3), jnp.concatenate(sums, axis=-2))


def _of_run(config: _Config, offset: Any, first: Any, marks: _Marks, query: Any, key: Any, value: Any) -> _Partial:
    """The attention of queries to keys, which begin at `first`, and `offset` before the queries."""
    placed = config.causal or config.window is not None
    out, logsumexp = flash_attention(
        query,
        key,
        value,
        causal=config.causal,
        window=config.window,
        q_offset=offset if placed else 0,
        scale=config.scale,
        softcap=config.softcap,
        segment_ids=None if marks.of_queries is None else (marks.of_queries, marks.of_keys),
        kv_lengths=None if marks.lengths is None else jnp.clip(marks.lengths - first, 0, key.shape[-3]),
        return_logsumexp=True,
        target=config.target,
    )
    wide = accumulator(out.dtype)
    return _Partial(out.astype(wide), logsumexp.astype(wide))


# --- the ring ---------------------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(config: _Config, query: Any, key: Any, value: Any, sinks: Any, marks: _Marks) -> Any:
    return _forward(config, query, key, value, sinks, marks)[0]


def _forward(config: _Config, query: Any, key: Any, value: Any, sinks: Any, marks: _Marks) -> tuple[Any, Any]:
    device, total = lax.axis_index(config.axis_name), None
    moving: Any = (key, value, marks.of_keys)
    for step in range(config.devices):
        following: Any = config.send(moving) if step + 1 < config.devices else None
        key_here, value_here, of_keys = moving
        at = marks._replace(of_keys=of_keys)
        part = _of_part(config, (device - step) % config.devices, at, query, key_here, value_here)
        total = part if total is None else _merged(total, part)
        moving = following
    assert total is not None
    if sinks is not None:
        wide = sinks.astype(total.logsumexp.dtype)
        with_sinks = jnp.logaddexp(total.logsumexp, wide)
        total = _Partial(total.out * _weights(total.logsumexp, with_sinks)[..., None], with_sinks)
    out = total.out.astype(query.dtype)
    return out, (query, key, value, sinks, marks, out, total.logsumexp)


def _backward(config: _Config, kept: Any, cotangent: Any) -> tuple[Any, ...]:
    """Once more around the ring; the results of a step are computed again, and its share of the sum pulled back."""
    query, key, value, sinks, marks, out, total = kept
    device, wide = lax.axis_index(config.axis_name), total.dtype
    cotangent = cotangent.astype(wide)
    delta = (cotangent * out.astype(wide)).sum(axis=-1)
    of_query = jnp.zeros_like(query, wide)
    moving: Any = (key, value, marks.of_keys)
    returned = (jnp.zeros_like(key, wide), jnp.zeros_like(value, wide))
    for step in range(config.devices):
        following: Any = config.send(moving) if step + 1 < config.devices else None
        key_here, value_here, of_keys = moving
        at = marks._replace(of_keys=of_keys)
        run = partial(_of_part, config, (device - step) % config.devices, at)
        part, pull = cast(tuple[_Partial, Any], jax.vjp(run, query, key_here, value_here))
        weights = _weights(part.logsumexp, total)
        of_sums = weights * ((cotangent * part.out).sum(axis=-1) - delta)
        found = [f.astype(wide) for f in pull(_Partial(weights[..., None] * cotangent, of_sums))]
        of_query += found[0]
        returned = config.send((returned[0] + found[1], returned[1] + found[2]))
        moving = following
    of_sinks = None
    if sinks is not None:
        rows = tuple(range(delta.ndim - 1))
        of_sinks = -(_weights(sinks.astype(wide), total) * delta).sum(axis=rows).astype(sinks.dtype)
    found = of_query.astype(query.dtype), returned[0].astype(key.dtype), returned[1].astype(value.dtype)
    return *found, of_sinks, _Marks(None, None, None)


_ring.defvjp(_forward, _backward)


# --- layouts ----------------------------------------------------------------------------------------------------------


def to_zigzag(x: jax.Array, devices: int, axis: int) -> jax.Array:
    """A whole sequence in the order in which devices have it in the layout "zigzag": parts 0, 2n - 1, 1, 2n - 2, ...

    Args:
      x: any array.
      devices: n; 2n divides the sequence.
      axis: of the sequence.

    Raises:
      tilekern.errors.ArgumentError: 2n does not divide it.
    """
    return _in_order(x, devices, axis, [part for n in range(devices) for part in (n, 2 * devices - 1 - n)])


def from_zigzag(x: jax.Array, devices: int, axis: int) -> jax.Array:
    """The inverse of `to_zigzag`."""
    order = [part for n in range(devices) for part in (n, 2 * devices - 1 - n)]
    return _in_order(x, devices, axis, [order.index(part) for part in range(2 * devices)])


def _in_order(x: jax.Array, devices: int, axis: int, order: Sequence[int]) -> jax.Array:
    length = x.shape[axis]
    if length % (2 * devices):
        raise ArgumentError(
            "a sequence cannot be laid out in a zigzag",
            expected=f"a length that {2 * devices}, two parts for each device, divides",
            got=f"x.shape[{axis}] = {length}, devices = {devices}",
            fix="pad the sequence, and give kv_lengths; or use the layout 'contiguous'",
        )
    parts = jnp.split(x, 2 * devices, axis=axis)
    return jnp.concatenate([parts[n] for n in order], axis=axis)


def _check_halves(query: jax.Array, key: jax.Array) -> None:
    for name, x in (("query", query), ("key", key)):
        if x.shape[-3] % 2:
            raise ArgumentError(
                "ring_attention cannot halve a part for the layout 'zigzag'",
                expected="an even number of positions on each device",
                got=f"{name} of {x.shape[-3]} positions",
                fix="pad the sequence, and give kv_lengths; or use the layout 'contiguous'",
            )


# --- exchange of heads ------------------------------------------------------------------------------------------------


def ulysses_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, axis_name: str, **options: Any
) -> jax.Array:
    """Attention of a sequence that a mesh axis divides: devices exchange it for a part of the heads, and back.

    Each device then has the whole sequence for N / n of the heads, for n devices. If n does not divide the K heads of
    the keys, but K divides n, each is sent to n / K devices. All derivatives are those of `flash_attention`.

    Source: DeepSpeed Ulysses, Jacobs et al. 2023, https://arxiv.org/abs/2309.14509.

    Args:
      query: [B, T, N, H], a device's part.
      key: [B, S, K, H], a device's part.
      value: [B, S, K, Hv].
      axis_name: of the mesh axis that divides T and S, over which the `jax.shard_map` around the call is manual.
      options: those of `flash_attention`, for whole sequences; none of one array a head.

    Returns:
      [B, T, N, Hv], a device's part.

    Raises:
      tilekern.errors.ArgumentError: there is no such axis, or the devices do not divide the heads.
    """
    devices = axis_size(axis_name, "ulysses_attention")
    heads, of_keys = query.shape[2], key.shape[2]
    if heads % devices or (of_keys % devices and devices % of_keys):
        raise ArgumentError(
            "ulysses_attention cannot divide the heads among the devices",
            expected=f"a multiple of {devices} heads of the query, and a multiple or a divisor of it of the keys",
            got=f"{heads} and {of_keys} heads, {devices} devices of axis {axis_name!r}",
            fix="use ring_attention, or an axis of fewer devices",
        )
    if of_keys % devices:
        key, value = (jnp.repeat(x, devices // of_keys, axis=2) for x in (key, value))

    def exchanged(x: jax.Array, given: int, taken: int) -> jax.Array:
        return cast(Any, lax).all_to_all(x, axis_name, given, taken, tiled=True)

    whole = (exchanged(x, 2, 1) for x in (query, key, value))
    return exchanged(flash_attention(*whole, **options), 1, 2)


class BytesSent(NamedTuple):
    """The bytes that each device sends in a forward pass, for two ways to divide a sequence."""

    ring: float
    ulysses: float


def attention_bytes(
    length: int, heads: int, kv_heads: int, head_dim: int, devices: int, itemsize: int = 2
) -> BytesSent:
    """The bytes that each device sends in the forward pass of `ring_attention` and of `ulysses_attention`.

    With n devices and T / n positions on each: a ring sends keys and values n - 1 times, 2 (n - 1) T / n K H elements.
    An exchange of heads sends (n - 1) / n of query and result, and of keys and values, at least one head of them to
    each device: 2 (n - 1) / n² T (N + max(K, n)) H. Sends of a ring run beside its attention, those of an exchange do
    not; a ring with `causal` should be in zigzag, so that all devices have as much to do.

    Args:
      length: T, of the whole sequence.
      heads: N.
      kv_heads: K.
      head_dim: H.
      devices: n.
      itemsize: bytes of an element.
    """
    part, others = length / devices, devices - 1
    ring = 2 * others * part * kv_heads * head_dim * itemsize
    ulysses = 2 * others / devices * part * (heads + max(kv_heads, devices)) * head_dim * itemsize
    return BytesSent(ring, ulysses)
