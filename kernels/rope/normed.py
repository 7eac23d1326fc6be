"""RMS norm of each head and rotary position embedding of the result, in one kernel."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.authoring import hide_frames, takes_python_numbers
from tilekern.kernels.api import as_rows, is_float, require
from tilekern.kernels.derivatives import along
from tilekern.kernels.rms_norm.kernel import rms_norm_tangent
from tilekern.kernels.rope.api import angle_inputs, check_rope
from tilekern.kernels.rope.kernel import cpu_blocks, cuda_blocks, llvm_blocks, rope_forward, tpu_blocks
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

    Both are computed in float32 (float64 for float64), without rounding between them. The backward pass keeps x, and
    runs the kernels of `rope` and of `rms_norm`.

    Args:
      x: [*B, T, N, H], H even: float32, bfloat16, float16 or float64.
      weight: [H] of any of these dtypes; None for ones (`offset` is then not used).
      positions: integers [T] or [*B, T]; None for 0, 1, ..., T - 1.
      theta: the base of the frequencies, as in `rope`.
      frequencies: [H / 2], radians per position, instead of those of theta. Pair j is the elements j and j + H / 2.
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


@rms_norm_rope_forward.defjvp
def _jvp(primals: Any, tangents: Any, *, eps: float, offset: float, **blocks: int) -> tuple[jax.Array, jax.Array]:
    """The rotated tangent of the norm; along the frequencies, by the definition in plain JAX."""
    (x, weight, positions, frequencies), (dx, dweight, _, dfrequencies) = primals, tangents
    out = rms_norm_rope_forward(*primals, eps=eps, offset=offset, **blocks)
    if dfrequencies is not None:

        def defined(x: Any, weight: Any, positions: Any, frequencies: Any) -> jax.Array:
            return normed_reference(x, weight, positions, frequencies=frequencies, eps=eps, offset=offset)

        return out, along(defined, primals, tangents)
    moved = (None if dx is None else as_rows(dx)), dweight
    settings = (("eps", eps), ("offset", offset))
    tangent = rms_norm_tangent((as_rows(x), weight), moved, settings=settings).reshape(x.shape)
    return out, rope_forward(tangent, positions, frequencies, interleaved=False)


@rms_norm_rope_forward.schedule("cpu")
def _cpu(x: Any, weight: Any, positions: Any, frequencies: Any) -> Any:
    return cpu_blocks(x, positions, frequencies)


@rms_norm_rope_forward.schedule("cpu:llvm")
def _llvm(x: Any, weight: Any, positions: Any, frequencies: Any) -> Any:
    return llvm_blocks(x, positions, frequencies)


@rms_norm_rope_forward.schedule("cuda")
def _cuda(x: Any, weight: Any, positions: Any, frequencies: Any) -> Any:
    return cuda_blocks(x, positions, frequencies)


@rms_norm_rope_forward.schedule("tpu")
def _tpu(x: Any, weight: Any, positions: Any, frequencies: Any) -> Any:
    return tpu_blocks(x, positions, frequencies)
