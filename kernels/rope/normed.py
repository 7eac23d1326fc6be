"""RMS norm of each head and rotary position embedding of the result, in one kernel."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.authoring import hide_frames, takes_python_numbers
from tilekern.kernels.checks import is_float, require
from tilekern.kernels.derivatives import against, cast_like, derive
from tilekern.kernels.rope.api import angle_inputs, check_rope
from tilekern.kernels.rope.kernel import cpu_blocks, cuda_blocks, llvm_blocks, tpu_blocks
from tilekern.kernels.rope.reference import normed_reference
from tilekern.kernels.rows import like_first

hide_frames(__file__)


@takes_python_numbers
def rms_norm_rope(
    x: jax.Array,
    weight: jax.Array | None = None,
    positions: jax.Array | None = None,
    *,
    theta: float = 10000.0,
    frequencies: jax.Array | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    target: str | None = None,
    block_t: int | None = None,
    block_n: int | None = None,
) -> jax.Array:
    """rope(rms_norm(x, weight), positions): the queries and keys of Qwen3 and Gemma 3, in one pass over memory.

    Norm and rotation are computed in float32 (float64 for float64), without rounding between them. The backward pass
    keeps x, and runs one kernel, too.

    Args:
      x: [*B, T, N, H], H even: float32, bfloat16, float16 or float64.
      weight: [H] of any dtype that x may have; None for ones (`offset` is then not used).
      positions: integers [T] or [*B, T]; None for 0, 1, ..., T - 1.
      theta: the base of the frequencies, as in `rope`.
      frequencies: [H / 2], radians per position, instead of powers of theta. Pair j is the elements j and j + H / 2.
      eps: added to the mean square of a head.
      offset: added to the weight: 1 for Gemma.
      target: lower for this target's blocks, e.g. "cpu:xla".
      block_t: positions of a tile, instead of the schedule's; no block changes the result beyond rounding.
      block_n: heads of a tile.

    Returns:
      An array like x.

    Raises:
      tilekern.errors.ArgumentError: shapes or dtypes do not fit, or theta is no base.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.rope import rms_norm_rope
      >>> x = jnp.array([3.0, -3.0]).reshape(1, 1, 2)
      >>> rms_norm_rope(x).ravel().round(4)  # the angle of position 0 is 0
      Array([ 1., -1.], dtype=float32)
    """
    check_rope(x, positions, frequencies, "rms_norm_rope")
    require(
        weight is None or (is_float(weight) and weight.shape == x.shape[-1:]),
        "rms_norm_rope",
        expected="x[*B, T, N, H] and weight[H] or None, of float dtypes of at least 16 bits",
        fix="heads are normalised, each by itself; cast with .astype",
        x=x,
        weight=weight,
    )
    if x.size == 0:
        return jnp.zeros(x.shape, x.dtype)
    positions, frequencies = angle_inputs(x, positions, frequencies, theta)
    out = rms_norm_rope_forward(
        x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:]),
        weight,
        positions,
        frequencies,
        eps=eps,
        offset=offset,
        target=target,
        block_t=block_t,
        block_n=block_n,
    )
    return out.reshape(x.shape)


@tk.kernel(out_type=like_first)
def rms_norm_rope_forward(
    x: tk.Ref,
    weight: tk.Ref | None,
    positions: tk.Ref | None,
    frequencies: tk.Ref,
    out: tk.Ref,
    *,
    eps: float,
    offset: float,
    block_t: tk.Block = 8,
    block_n: tk.Block = 8,
) -> None:
    """x[B, T, N, H], weight[H], positions[B, T] or None for 0, 1, ..., frequencies[H / 2] -> out[B, T, N, H]."""
    b = tk.parallel(x.shape[0])
    i = tk.parallel(x.shape[1], block_t)
    n = tk.parallel(x.shape[2], block_n)
    half = frequencies.shape[0]
    wide = tk.accumulator(x.dtype)

    place = i.indices if positions is None else positions[b, i]
    angles = place.astype(wide)[:, None] * frequencies[:].astype(wide)[None]
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]

    u, v = x[b, i, n, :half].astype(wide), x[b, i, n, half:].astype(wide)
    squares = ((u * u).sum(axis=2) + (v * v).sum(axis=2)) / (2 * half)
    scale = jax.lax.rsqrt(squares + eps)[:, :, None]
    u, v = u * scale, v * scale
    if weight is not None:
        u, v = (part * (w.astype(wide) + offset) for part, w in ((u, weight[:half]), (v, weight[half:])))
    out[b, i, n, :half] = (u * cos - v * sin).astype(out.dtype)
    out[b, i, n, half:] = (v * cos + u * sin).astype(out.dtype)


def _backward_types(
    x: Any, weight: Any, positions: Any, frequencies: Any, cotangent: Any, *, needs: tuple[bool, bool]
) -> tuple[Any, ...]:
    total = tk.Sum(jax.ShapeDtypeStruct(x.shape[3:], tk.accumulator(x.dtype)))
    return like_first(x) if needs[0] else None, total if needs[1] else None


@tk.kernel(out_type=_backward_types)
def rms_norm_rope_backward_kernel(
    x: tk.Ref,
    weight: tk.Ref | None,
    positions: tk.Ref | None,
    frequencies: tk.Ref,
    cotangent: tk.Ref,
    dx: tk.Ref | None,
    dweight: tk.Ref | None,
    *,
    eps: float,
    offset: float,
    needs: tuple[bool, bool],
    block_t: tk.Block = 8,
    block_n: tk.Block = 4,
) -> None:
    """Like the forward kernel, with cotangent[B, T, N, H] -> dx[B, T, N, H], dweight[H]; None if not in `needs`.

    The cotangent is rotated back to g. With the root mean square σ of a head, h = x / σ and w = weight + offset, dx =
    (g w - h mean(g w h)) / σ, and dweight = Σ g h over heads.
    """
    b = tk.parallel(x.shape[0])
    i = tk.parallel(x.shape[1], block_t)
    n = tk.parallel(x.shape[2], block_n)
    half = frequencies.shape[0]
    wide = tk.accumulator(x.dtype)
    parts = slice(None, half), slice(half, None)

    place = i.indices if positions is None else positions[b, i]
    angles = place.astype(wide)[:, None] * frequencies[:].astype(wide)[None]
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    p, q = (cotangent[b, i, n, part].astype(wide) for part in parts)
    g = p * cos + q * sin, q * cos - p * sin

    h = tuple(x[b, i, n, part].astype(wide) for part in parts)
    squares = ((h[0] * h[0]).sum(axis=2) + (h[1] * h[1]).sum(axis=2)) / (2 * half)
    scale = jax.lax.rsqrt(squares + eps)[:, :, None]
    h = tuple(part * scale for part in h)
    if dweight is not None:
        # Past the last position and the last head h may be NaN, if eps is 0.
        inside = (i.valid[:, None] & n.valid[None, :])[:, :, None]
        for part, of_g, of_h in zip(parts, g, h, strict=True):
            dweight.at[part].add(jnp.where(inside, of_g * of_h, 0).sum(axis=(0, 1)))
    if dx is not None:
        if weight is not None:
            g = tuple(of_g * (weight[part].astype(wide) + offset) for part, of_g in zip(parts, g, strict=True))
        mean = ((g[0] * h[0]).sum(axis=2) + (g[1] * h[1]).sum(axis=2))[:, :, None] / (2 * half)
        for part, of_g, of_h in zip(parts, g, h, strict=True):
            dx[b, i, n, part] = ((of_g - of_h * mean) * scale).astype(dx.dtype)


def _definition(
    x: jax.Array, weight: Any, positions: Any, frequencies: jax.Array, *, eps: float, offset: float
) -> jax.Array:
    return normed_reference(x, weight, positions, frequencies=frequencies, eps=eps, offset=offset)


def _backward(
    x: jax.Array,
    weight: Any,
    positions: Any,
    frequencies: jax.Array,
    cotangent: jax.Array,
    *,
    needs: tuple[bool, bool, bool, bool],
    eps: float,
    offset: float,
) -> tuple[Any, ...]:
    """The cotangents of x and weight by the kernel, of the frequencies by the definition in plain JAX."""
    arrays, settings = (x, weight, positions, frequencies), {"eps": eps, "offset": offset}
    cotangents: tuple[Any, ...] = (None,) * 4
    if needs[3]:
        cotangents = against(partial(_definition, **settings), arrays, cotangent, (False, False, False, True))
    if any(needs[:2]):
        cotangents = *rms_norm_rope_backward_kernel(*arrays, cotangent, needs=needs[:2], **settings), *cotangents[2:]
    return cast_like(cotangents, arrays)


rms_norm_rope_tangent, rms_norm_rope_backward = derive(rms_norm_rope_forward, _definition, _backward)


def _cpu(x: Any, weight: Any, positions: Any, frequencies: Any, *unused: Any) -> Any:
    return cpu_blocks(x, positions, frequencies)


def _llvm(x: Any, weight: Any, positions: Any, frequencies: Any, *unused: Any) -> Any:
    return llvm_blocks(x, positions, frequencies)


def _cuda(x: Any, weight: Any, positions: Any, frequencies: Any) -> Any:
    return cuda_blocks(x, positions, frequencies)


def _cuda_backward(x: Any, weight: Any, positions: Any, frequencies: Any, cotangent: Any) -> Any:
    """The tiles of the forward kernel with twice as many warps: registers hold the cotangent, too."""
    blocks = cuda_blocks(x, positions, frequencies)
    return {**blocks, "num_warps": 2 * blocks["num_warps"]}


def _tpu(x: Any, weight: Any, positions: Any, frequencies: Any, *unused: Any) -> Any:
    return tpu_blocks(x, positions, frequencies)


for _kernel, _blocks in ((rms_norm_rope_forward, _cuda), (rms_norm_rope_backward_kernel, _cuda_backward)):
    _kernel.schedule("cpu")(_cpu)
    _kernel.schedule("cpu:llvm")(_llvm)
    _kernel.schedule("cuda")(_blocks)
    _kernel.schedule("tpu")(_tpu)
