"""Matrix products that multiply some blocks while they exchange others with the neighbours on a mesh axis.

Wang et al., Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models
(ASPLOS 2023). Both loops are unrolled, so XLA is free to run the exchange of one step beside the product of another.

`all_gather_matmul` and `matmul_reduce_scatter` are each other's transpose: the transposed exchanges and products of one
are the exchanges and products of the other. With `jax.checkpoint` no gathered blocks are kept for the backward pass,
which exchanges blocks again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from tilekern.authoring import hide_frames, takes_python_numbers
from tilekern.distributed.axes import axis_size
from tilekern.kernels.checks import is_float, require
from tilekern.kernels.matmul import matmul

hide_frames(__file__)


@takes_python_numbers
def all_gather_matmul(
    x: jax.Array, w: jax.Array, *, axis_name: str, bidirectional: bool = False, target: str | None = None
) -> jax.Array:
    """all_gather(x) @ w inside of `jax.shard_map`, where each device of an axis holds some rows of x.

    The devices pass blocks of rows around a ring. A device asks for the next block before it multiplies the present
    one. Derivatives of any order, in both modes, are such loops, too; the backward pass exchanges x again and keeps no
    gathered copy of it. Tangents and cotangents of x travel in float32.

    Args:
      x: [M, K], the rows of this device: float32, bfloat16, float16 or float64.
      w: [K, N] of the same dtype; as a rule the columns of this device.
      axis_name: the mesh axis that divides the rows of x, over n devices.
      bidirectional: send blocks in both directions, which halves the steps where links have two directions.
      target: lower for this target's blocks, e.g. "cpu:xla".

    Returns:
      out[n M, N] in the dtype of x, accumulated as `matmul` does; rows in the order of the devices.

    Raises:
      tilekern.errors.ArgumentError: shapes or dtypes do not fit, or the axis is unknown.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> from tilekern.distributed import all_gather_matmul
      >>> mesh = jax.make_mesh((1,), ("model",), (AxisType.Auto,), devices=jax.devices()[:1])
      >>> local = lambda x, w: all_gather_matmul(x, w, axis_name="model")
      >>> specs = P("model", None), P(None, "model")
      >>> out = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(None, "model"))
      >>> out(jnp.ones((2, 3)), jnp.ones((3, 1)))
      Array([[3.],
             [3.]], dtype=float32)
    """
    devices = axis_size(axis_name, "all_gather_matmul")
    _check("all_gather_matmul", x, w)
    local = partial(cast(Any, _gathered), axis_name, _hops(devices, bidirectional), x.dtype, target, True)
    return _recomputed(local)(x, w)


@takes_python_numbers
def matmul_reduce_scatter(
    x: jax.Array, w: jax.Array, *, axis_name: str, bidirectional: bool = False, target: str | None = None
) -> jax.Array:
    """The rows of psum(x @ w) of this device, inside of `jax.shard_map`: each device of an axis gets the same number.

    Sums of blocks of rows travel around a ring, in float32. A device multiplies its next block while a sum travels.
    Derivatives of any order, in both modes, are such loops, too.

    Args:
      x: [M, K] with an M that the n devices divide; as a rule the columns of this device. float32, bfloat16, float16
        or float64.
      w: [K, N] of the same dtype; as a rule the rows of this device.
      axis_name: the mesh axis over which products are summed and rows divided.
      bidirectional: send sums in both directions, which halves the steps where links have two directions.
      target: lower for this target's blocks, e.g. "cpu:xla".

    Returns:
      out[M / n, N] in the dtype of x; the first device has the first rows.

    Raises:
      tilekern.errors.ArgumentError: shapes or dtypes do not fit, the devices do not divide M, or the axis is unknown.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> from tilekern.distributed import matmul_reduce_scatter
      >>> mesh = jax.make_mesh((1,), ("model",), (AxisType.Auto,), devices=jax.devices()[:1])
      >>> local = lambda x, w: matmul_reduce_scatter(x, w, axis_name="model")
      >>> specs = P(None, "model"), P("model", None)
      >>> out = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("model", None))
      >>> out(jnp.ones((2, 3)), jnp.ones((3, 1)))
      Array([[3.],
             [3.]], dtype=float32)
    """
    devices = axis_size(axis_name, "matmul_reduce_scatter")
    _check("matmul_reduce_scatter", x, w)
    require(
        x.shape[0] % devices == 0,
        "matmul_reduce_scatter",
        expected=f"rows of x, dim 0, that the {devices} devices of mesh axis {axis_name!r} divide",
        fix=f"pad x with jnp.pad to {-(-x.shape[0] // devices) * devices} rows",
        x=x,
    )
    return _recomputed(partial(_scattered, axis_name, _hops(devices, bidirectional), target))(x, w)


def _recomputed(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The function; the backward pass computes it again from its arguments."""
    return cast(Any, jax).checkpoint(function)


def _check(function: str, x: Any, w: Any) -> None:
    fits = is_float(x) and is_float(w) and x.dtype == w.dtype and (x.ndim, w.ndim) == (2, 2)
    require(
        fits and x.shape[1] == w.shape[0],
        function,
        expected="x[M, K] and w[K, N] of one float dtype of at least 16 bits",
        fix="reshape leading dims into M; cast with .astype",
        x=x,
        w=w,
    )


# --- rings ------------------------------------------------------------------------------------------------------------

type Hops = tuple[int, int]


def _hops(devices: int, bidirectional: bool) -> Hops:
    """Steps to the previous device and to the next one; together they reach all other devices."""
    return (devices // 2, (devices - 1) // 2) if bidirectional else (devices - 1, 0)


def _send(x: jax.Array, axis: str, devices: int, by: int) -> jax.Array:
    return lax.ppermute(x, axis, [(i, (i + by) % devices) for i in range(devices)])


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2, 3, 4))
def _gathered(
    axis: str, hops: Hops, dtype: Any, target: str | None, held: bool, x: jax.Array, w: jax.Array
) -> jax.Array:
    """[n M, N], the rows of all devices times w. Blocks travel in the dtype of x; products and result have `dtype`.

    XLA does not know the cost of a kernel, and may put all exchanges before the first product. With `held` an exchange
    waits for the product that precedes its own step.
    """
    devices, rows = sum(hops) + 1, x.shape[0]

    def product(block: jax.Array) -> jax.Array:
        return matmul(block.astype(dtype), w.astype(dtype), target=target)

    received = {0: x}
    products: dict[int, jax.Array] = {}
    for step in range(max(hops) + 1):
        if step and held:
            arrived = {offset: received[offset] for offset in (step, -step) if offset in received}
            tied, products[step - 1] = lax.optimization_barrier((arrived, products[step - 1]))
            received.update(tied)
        # Blocks are requested before the products of this step, which do not wait for the exchange.
        if step < hops[0]:
            received[step + 1] = _send(received[step], axis, devices, -1)
        if step < hops[1]:
            received[-step - 1] = _send(received[-step], axis, devices, 1)
        for offset in {step, -step} & received.keys():
            products[offset] = product(received[offset])
    ordered = jnp.concatenate([products[offset] for offset in range(-hops[1], hops[0] + 1)])
    return jnp.roll(ordered, (lax.axis_index(axis) - hops[1]) * rows, axis=0)


@partial(_gathered.defjvp, symbolic_zeros=True)
def _gathered_jvp(
    axis: str, hops: Hops, dtype: Any, target: str | None, held: bool, primals: Any, tangents: Any
) -> Any:
    """The tangent. Tangents travel and add up in float32, and so do cotangents, by transposition."""
    (x, w), (dx, dw) = primals, tangents
    call: Callable[..., jax.Array] = partial(cast(Any, _gathered), axis, hops, dtype, target)
    # A barrier would make all its results depend linearly on all its arguments: JAX could not transpose the products.
    # An instantiated zero would be multiplied, too.
    terms = [call(False, _wide(dx), w)] if not isinstance(dx, SymbolicZero) else []
    terms += [call(False, x, _wide(dw))] if not isinstance(dw, SymbolicZero) else []
    return call(held, x, w), sum(terms[1:], terms[0])


def _scattered(axis: str, hops: Hops, target: str | None, x: jax.Array, w: jax.Array) -> jax.Array:
    """[M / n, N], the rows of this device of the sum over devices of x @ w."""
    devices = sum(hops) + 1
    rows = x.shape[0] // devices
    # Block i is for the device at offset i - hops[0].
    turned = jnp.roll(x, (hops[0] - lax.axis_index(axis)) * rows, axis=0)
    blocks = lax.split(turned, [rows] * devices)
    wide = _wide(w)

    def product(offset: int) -> jax.Array:
        return _wide(matmul(blocks[offset + hops[0]], wide.astype(w.dtype), target=target))

    total = product(0)
    for direction, steps in zip((-1, 1), hops, strict=True):
        total += _chain(product, axis, devices, direction, steps) if steps else 0
    return total.astype(x.dtype)


def _chain(product: Any, axis: str, devices: int, direction: int, steps: int) -> jax.Array:
    """The sum for this device of the products of `steps` devices; each device adds its product and sends the sum on."""
    total = product(direction * steps)
    for left in range(steps - 1, 0, -1):
        total = _send(total, axis, devices, direction) + product(direction * left)
    return _send(total, axis, devices, direction)
