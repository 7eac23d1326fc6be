"""Attention over a sequence that devices hold in parts, for `jax.shard_map`: in a ring, or by exchange of heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from tilekern import _meshes
from tilekern.authoring import hide_frames, takes_python_numbers
from tilekern.distributed.axes import axis_size
from tilekern.distributed.ring import Layout, Marks, Ring, attend
from tilekern.errors import ArgumentError
from tilekern.kernels.checks import scale_of_scores, sinks_of_heads, softcap_of_scores
from tilekern.kernels.flash_attention import checks, flash_attention
from tilekern.kernels.flash_attention.arguments import Config

hide_frames(__file__)


@takes_python_numbers
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

    The result of `flash_attention` of the whole sequence. A device has the keys of one other device at a time: memory
    does not grow with the number of devices, nor in the backward pass, where cotangents of keys and values travel, too.
    The exchange of a step does not wait for its attention. Partial results are merged by their logsumexps, in float32.

    With `causal`, devices with early parts of a contiguous sequence have less to do. In the layout "zigzag" device i of
    n has the parts i and 2n - 1 - i of 2n, see `to_zigzag`: all devices have the same to do.

    Both modes of differentiation go around the ring once more, and compute nothing of the forward pass again. `out` and
    logsumexp have the names of `flash_attention` for policies of `jax.checkpoint`. Derivatives of second and higher
    order differentiate the steps, and keep the keys of all devices.

    Source: Ring Attention, Liu et al. 2023, https://arxiv.org/abs/2310.01889.

    Args:
      query: [*B, T, N, H], a device's part.
      key: [*B, S, K, H], a device's part.
      value: [*B, S, K, Hv].
      axis_name: of the mesh axis that divides T and S, over which the `jax.shard_map` around the call is manual.
      causal: see `flash_attention`; positions count in the whole sequence.
      window: as there.
      scale: as there.
      softcap: as there.
      segment_ids: integers [*B, T] and [*B, S], a device's parts. Equal ids attend to each other, at any distance and
        on all devices.
      kv_lengths: integers [*B], of the whole sequence.
      sinks: float [N].
      layout: of the parts.
      target: as in each call of a kernel.

    Returns:
      [*B, T, N, Hv], a device's part.

    Raises:
      tilekern.errors.ArgumentError: the axis is unknown, or a part cannot be halved for "zigzag".
    """
    devices = axis_size(axis_name, "ring_attention")
    batch = checks.arrays(query, key, value)
    if layout == "zigzag":
        _check_halves(query, key)
    sizes = checks.Sizes(batch, query.shape[-3], key.shape[-3], query.shape[-2])
    whole = replace(sizes, keys=devices * sizes.keys)
    checks.positions(0, window, causal, sizes)
    checks.segments(segment_ids, sizes)
    config = Config(
        scale=scale_of_scores("ring_attention", scale, query.shape[-1]),
        causal=checks.causal(causal),
        window=(None, None) if window is None else window,
        softcap=softcap_of_scores("ring_attention", softcap),
    )
    flat = (x.reshape(sizes.flat, *x.shape[-3:]) for x in (query, key, value))
    ids = (
        (None, None) if segment_ids is None else (jnp.asarray(x).reshape(sizes.flat, x.shape[-1]) for x in segment_ids)
    )
    lengths = checks.lengths("kv_lengths", kv_lengths, whole)
    arrays: tuple[Any, ...] = (*flat, sinks_of_heads("ring_attention", sinks, sizes.heads), *ids, lengths)
    # The ring's own rule has no sums over devices that hold the same array; the transpose of a cast to varying has.
    alike = iter(_meshes.alike([*(x for x in arrays if x is not None), lax.axis_index(axis_name)]))
    q, k, v, held, *marks = (None if x is None else next(alike) for x in arrays)
    ring = Ring(config, axis_name, devices, layout, target)
    out, _ = attend(ring, q, k, v, held, Marks(*marks))
    return out.reshape(*query.shape[:-1], value.shape[-1])


# --- layouts ----------------------------------------------------------------------------------------------------------


@takes_python_numbers
def to_zigzag(x: jax.Array, devices: int, axis: int) -> jax.Array:
    """A whole sequence in the order in which devices have it in the layout "zigzag": parts 0, 2n - 1, 1, 2n - 2, ...

    Args:
      x: any array.
      devices: n; 2n divides the sequence.
      axis: of the sequence.

    Raises:
      tilekern.errors.ArgumentError: 2n does not divide the sequence.
    """
    return _in_order(x, devices, axis, [part for n in range(devices) for part in (n, 2 * devices - 1 - n)])


@takes_python_numbers
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
    """Attention of a sequence that a mesh axis divides: devices exchange parts of the sequence for parts of the heads.

    Each device then has the whole sequence for N / n of the heads, for n devices. If n does not divide the K heads of
    the keys, but K divides n, each head is sent to n / K devices. Derivatives are as of `flash_attention`.

    Source: DeepSpeed Ulysses, Jacobs et al. 2023, https://arxiv.org/abs/2309.14509.

    Args:
      query: [B, T, N, H], a device's part.
      key: [B, S, K, H], a device's part.
      value: [B, S, K, Hv].
      axis_name: of the mesh axis that divides T and S, over which the `jax.shard_map` around the call is manual.
      options: as of `flash_attention`, for whole sequences; no arrays with a dim of heads.

    Returns:
      [B, T, N, Hv], a device's part.

    Raises:
      tilekern.errors.ArgumentError: the axis is unknown, or the devices do not divide the heads.
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

    def exchanged(x: jax.Array, split: int, joined: int) -> jax.Array:
        return cast(Any, lax).all_to_all(x, axis_name, split, joined, tiled=True)

    whole = (exchanged(x, 2, 1) for x in (query, key, value))
    return exchanged(flash_attention(*whole, **options), 1, 2)


class BytesSent(NamedTuple):
    """The bytes that each device sends in a forward pass, for two ways to divide a sequence."""

    ring: float
    ulysses: float


@takes_python_numbers
def attention_bytes(
    length: int, heads: int, kv_heads: int, head_dim: int, devices: int, itemsize: int = 2
) -> BytesSent:
    """The bytes that each device sends in the forward pass of `ring_attention` and of `ulysses_attention`.

    With n devices and T / n positions on each: a ring sends keys and values n - 1 times, 2 (n - 1) T / n K H elements.
    An exchange of heads sends (n - 1) / n of query, result, keys and values, and at least one head of the keys to each
    device: 2 (n - 1) / n² T (N + max(K, n)) H. Sends of a ring run beside its attention, sends of an exchange do not. A
    ring with `causal` should be in zigzag, so that all devices have the same to do.

    Args:
      length: T, of the whole sequence.
      heads: N.
      kv_heads: K.
      head_dim: H.
      devices: n.
      itemsize: bytes of an element.
    """
    part, hops = length / devices, devices - 1
    ring = 2 * hops * part * kv_heads * head_dim * itemsize
    ulysses = 2 * hops / devices * part * (heads + max(kv_heads, devices)) * head_dim * itemsize
    return BytesSent(ring, ulysses)
