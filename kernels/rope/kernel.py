"""The rope kernel and its blocks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.blocks import divisor, power_of_two, tiled
from tilekern.kernels.derivatives import along
from tilekern.kernels.rope.reference import reference
from tilekern.kernels.rows import coarse, like_first


@tk.kernel(out_type=like_first, linear=("x",))
def rope_forward(
    x: tk.Ref,
    positions: tk.Ref | None,
    frequencies: tk.Ref,
    out: tk.Ref,
    *,
    interleaved: bool,
    block_t: tk.Block = 8,
    block_n: tk.Block = 8,
) -> None:
    """x[B, T, N, H], positions[B, T] or None for 0, 1, ..., frequencies[H / 2] -> out[B, T, N, H].

    The angles are in float32 (float64 for float64), and so is the rotation.
    """
    b = tk.parallel(x.shape[0])
    i = tk.parallel(x.shape[1], block_t)
    n = tk.parallel(x.shape[2], block_n)
    half = frequencies.shape[0]
    wide = tk.accumulator(x.dtype)

    place = i.indices if positions is None else positions[b, i]
    angles = place.astype(wide)[:, None] * frequencies[:].astype(wide)[None]
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]

    if interleaved:
        pairs = x[b, i, n].astype(wide).reshape(i.size, n.size, half, 2)
        u, v = (jax.lax.index_in_dim(pairs, part, axis=3, keepdims=False) for part in (0, 1))
        rotated = jnp.stack([u * cos - v * sin, v * cos + u * sin], axis=3)
        out[b, i, n] = rotated.reshape(i.size, n.size, 2 * half).astype(out.dtype)
    else:
        u, v = x[b, i, n, :half].astype(wide), x[b, i, n, half:].astype(wide)
        out[b, i, n, :half] = (u * cos - v * sin).astype(out.dtype)
        out[b, i, n, half:] = (v * cos + u * sin).astype(out.dtype)


@rope_forward.deftranspose
def _transpose(
    cotangent: jax.Array, x: Any, positions: Any, frequencies: jax.Array, **keywords: Any
) -> dict[str, jax.Array]:
    """The transpose of a rotation is the rotation by the opposite angle."""
    return {"x": rope_forward(cotangent, positions, -frequencies, **keywords)}


@rope_forward.defjvp
def _jvp(
    primals: tuple[Any, ...], tangents: tuple[Any, ...], *, interleaved: bool, **blocks: int
) -> tuple[jax.Array, jax.Array]:
    """The tangent along the frequencies, by the definition in plain JAX."""

    def rotated(x: jax.Array, positions: jax.Array | None, frequencies: jax.Array) -> jax.Array:
        return reference(x, positions, frequencies=frequencies, interleaved=interleaved)

    return rope_forward(*primals, interleaved=interleaved, **blocks), along(rotated, primals, tangents)


@rope_forward.schedule("cpu")
def cpu_blocks(x: Any, positions: Any, frequencies: Any) -> dict[str, int]:
    """All heads, and as many positions as make a large tile."""
    _, length, heads, width = x.shape
    block_t, _ = coarse(length, heads * width)
    return {"block_t": block_t, "block_n": max(1, heads)}


@rope_forward.schedule("cpu:llvm")
def llvm_blocks(x: Any, positions: Any, frequencies: Any) -> dict[str, int]:
    """A position, and of its heads a divisor of their number, so that no tile is ragged: at most 1536 elements."""
    *_, heads, width = x.shape
    return {"block_t": 1, "block_n": divisor(heads, max(1, 1536 // max(1, width)))}


@rope_forward.schedule("cuda")
def cuda_blocks(x: Any, positions: Any, frequencies: Any) -> dict[str, int]:
    """Many heads of a position in one program, because heads share sines and cosines; 32 pairs for a thread."""
    _, length, heads, width = x.shape
    block_n = power_of_two(heads, 32)
    block_t = power_of_two(length, 32 // block_n)
    num_warps = power_of_two(block_t * block_n * power_of_two(width // 2, width) // (32 * 32), 8)
    return {"block_t": block_t, "block_n": block_n, "num_warps": num_warps}


@rope_forward.schedule("tpu")
def tpu_blocks(x: Any, positions: Any, frequencies: Any) -> dict[str, int]:
    """Up to 64 heads, which share sines and cosines, and as many positions as make a mebibyte of float32."""
    _, length, heads, width = x.shape
    block_n = tiled(heads, 64, 8)
    return {"block_t": tiled(length, max(8, (1 << 18) // (block_n * max(width, 1)) // 8 * 8), 8), "block_n": block_n}
