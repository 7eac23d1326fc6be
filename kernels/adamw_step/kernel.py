"""The step of AdamW: weights and moments in place, rounded stochastically where they are narrower than float32.

Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101, algorithm 2. A step of a bfloat16 weight is often smaller
than half of the distance to the next bfloat16. Rounding to nearest would lose it; stochastic rounding keeps it on
average.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.blocks import even, power_of_two, tiled
from tilekern.kernels.rows import coarse


def _no_results(*arrays: Any, **statics: Any) -> tuple[()]:
    return ()


@tk.kernel(out_type=_no_results, donate=("param", "first", "second"))
def adamw_step(
    param: tk.Ref,
    gradient: tk.Ref,
    first: tk.Ref,
    second: tk.Ref,
    factors: tk.Ref,
    keys: tk.Ref | None,
    coordinates: tuple[tk.Ref, ...],
    *,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    block_rows: tk.Block = 8,
    block_columns: tk.Block = 512,
) -> None:
    """One step: param, gradient, first and second [*B, R, C] -> param, first and second, of the same dtypes.

    Computed in float32, in float64 for a float64 param. `factors`[4] multiply the gradient, the step, the first and the
    second moment. With `keys`, uint32[3, 2, 2], results of bfloat16 and float16 are rounded stochastically. Each result
    has two keys; its bits are a function of the keys and of the `coordinates`, an array 0, 1, ... of uint32 for each
    dim. Coordinates are arrays, not positions of tiles: devices that divide the weights divide the coordinates, too,
    and round as one device would.
    """
    *batch, rows, columns = param.shape
    i, j = tk.parallel(rows, block_rows), tk.parallel(columns, block_columns)
    place = (*(tk.parallel(size) for size in batch), i, j)
    wide = tk.accumulator(param.dtype)
    p, m, v = (ref[place].astype(wide) for ref in (param, first, second))
    scale, rate, of_first, of_second = (factors[n] for n in range(4))
    g = gradient[place].astype(wide) * scale
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g * g
    p = p - rate * (of_first * m / (jnp.sqrt(of_second * v) + eps) + weight_decay * p)

    def store(ref: tk.Ref, x: jax.Array, result: int) -> None:
        if keys is None or ref.dtype.itemsize > 2:
            ref[place] = x.astype(ref.dtype)
            return
        *outer, row, column = (ref[at] for ref, at in zip(coordinates, place, strict=True))
        of_row = tk.random_bits(keys[result, 0], *outer, row)
        of_column = tk.random_bits(keys[result, 1], column)
        ref[place] = tk.stochastic_round(x, _mixed(of_row[:, None] ^ of_column[None, :]), ref.dtype)

    for result, (ref, x) in enumerate(((param, p), (first, m), (second, v))):
        store(ref, x, result)


def _mixed(bits: jax.Array) -> jax.Array:
    """Bits that each depend on all bits of the argument: the last step of MurmurHash3 (Appleby 2016, `fmix32`).

    Threefry makes the bits of a row and of a column. Threefry for each element would take twice the time of the step.
    """
    bits = (bits ^ bits >> 16) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ bits >> 13) * jnp.uint32(0xC2B2AE35)
    return bits ^ bits >> 16


@adamw_step.schedule("cpu")
def _cpu(param: Any, *unused: Any) -> dict[str, int]:
    block_rows, block_columns = coarse(*param.shape[-2:])
    return {"block_rows": block_rows, "block_columns": block_columns}


@adamw_step.schedule("cpu:llvm")
def _llvm(param: Any, *unused: Any) -> dict[str, int]:
    """Tiles of eight rows: weights of 4096 × 4096 in bfloat16 take 1.4 times as long in tiles of one row."""
    *_, rows, columns = param.shape
    return {"block_rows": even(rows, 8), "block_columns": max(1, min(columns, 4096))}


@adamw_step.schedule("cuda")
def _cuda(param: Any, *unused: Any) -> dict[str, int]:
    """Tiles so narrow that few lanes are ragged; a load of 16 bytes from each float32 array for a thread."""
    *_, rows, columns = param.shape
    block_columns = power_of_two(columns, 1024)
    block_rows = power_of_two(rows, max(1, 1024 // block_columns))
    return {"block_rows": block_rows, "block_columns": block_columns, "num_warps": 4}


@adamw_step.schedule("tpu")
def _tpu(param: Any, *unused: Any) -> dict[str, int]:
    """A quarter of a mebibyte of each float32 array: VMEM holds two buffers of seven arrays."""
    *_, rows, columns = param.shape
    block_columns = tiled(columns, 2048, 128)
    return {"block_rows": tiled(rows, max(8, (1 << 16) // block_columns // 8 * 8), 8), "block_columns": block_columns}
