"""RMS norm and the quantisation of its rows, in one kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.authoring import describe, hide_frames, takes_python_numbers
from tilekern.errors import ArgumentError
from tilekern.kernels.checks import as_rows, is_float, require
from tilekern.kernels.conventions import renamed
from tilekern.kernels.quantization import rounded, scale_of
from tilekern.kernels.rows import cached_blocks, coarse_blocks, tpu_blocks, whole_rows

hide_frames(__file__)

DTYPES = ("int8", "float8_e4m3fn")


@renamed(dtype="out_dtype")
@takes_python_numbers
def rms_norm_quantized(
    x: jax.Array,
    weight: jax.Array | None = None,
    *,
    out_dtype: Any = "int8",
    eps: float = 1e-6,
    offset: float = 0.0,
    block: int | None = None,
    target: str | None = None,
    block_rows: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """rms_norm(x, weight) as values of 8 bits and a scale for each row: the norm is about values * scales[..., None].

    With `block` each `block` numbers of a row have a scale, as activations of DeepSeek-V3 have with 128.

    The norm, computed in float32, is divided by the scale, rounded to the nearest number, and never in memory. The
    largest element of a row becomes 127 (int8) or 448 (float8_e4m3fn) in size. A row of zeros has the scale 1, a row
    with NaN the scale NaN. Derivatives take both results as constants.

    Args:
      x: [*B, C], float32, bfloat16 or float16. A program holds whole rows.
      weight: [C] of any of these dtypes; None for ones (`offset` is then not used).
      out_dtype: of the values, int8 or float8_e4m3fn.
      eps: added to the mean square.
      offset: added to the weight: 1 for Gemma.
      block: numbers of a row that share a scale, a divisor of C; None for the whole row.
      target: lower for this target's blocks, e.g. "cpu:xla".
      block_rows: rows of a tile, instead of the schedule's.

    Returns:
      values: [*B, C] of `out_dtype`.
      scales: [*B], or [*B, C / block] with a block, float32.

    Raises:
      tilekern.errors.ArgumentError: shapes or dtypes do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.rms_norm import rms_norm_quantized
      >>> values, scales = rms_norm_quantized(jnp.array([[3.0, -1.0]]))
      >>> values
      Array([[127, -42]], dtype=int8)
    """
    fits = is_float(x) and x.ndim > 0 and x.dtype != jnp.float64 and x.shape[-1] > 0
    require(
        fits and (weight is None or (is_float(weight) and weight.shape == x.shape[-1:])),
        "rms_norm_quantized",
        expected="x[*B, C] of float32, bfloat16 or float16 with C > 0, and weight[C] of floats, or None",
        fix="the last axis is normalised: move it there; cast with .astype",
        x=x,
        weight=weight,
    )
    if str(out_dtype) not in DTYPES and getattr(out_dtype, "__name__", "") not in DTYPES:
        raise ArgumentError(
            "rms_norm_quantized has no values of this dtype",
            expected="int8 or float8_e4m3fn",
            got=f"out_dtype = {describe(out_dtype)}",
            fix='leave it out for int8, or give "float8_e4m3fn"',
        )
    if block is not None and (type(block) is not int or block < 1 or x.shape[-1] % block):
        raise ArgumentError(
            "rms_norm_quantized cannot cut rows into such blocks",
            expected=f"a divisor of {x.shape[-1]}, the numbers of a row",
            got=f"block = {block!r}",
            fix="leave it out for one scale of each row, or pad x and the weight",
        )
    rows, batch = as_rows(x), x.shape[:-1]
    batch_of_scales = batch if block is None else (*batch, x.shape[-1] // block)
    if x.size == 0:
        return jnp.zeros(x.shape, out_dtype), jnp.ones(batch_of_scales, jnp.float32)
    x, weight = jax.lax.stop_gradient((rows, weight))
    name = jnp.dtype(out_dtype).name
    values, scales = rms_norm_quantized_forward(
        x, weight, out_dtype=name, eps=eps, offset=offset, block=block, target=target, block_rows=block_rows
    )
    return values.reshape(*batch, values.shape[-1]), scales.reshape(batch_of_scales)


def _types(x: Any, weight: Any, *, out_dtype: str, eps: float, offset: float, block: int | None) -> tuple[Any, Any]:
    of_scales = x.shape[:1] if block is None else (x.shape[0], x.shape[1] // block)
    return jax.ShapeDtypeStruct(x.shape, out_dtype), jax.ShapeDtypeStruct(of_scales, jnp.float32)


@tk.kernel(out_type=_types)
def rms_norm_quantized_forward(
    x: tk.Ref,
    weight: tk.Ref | None,
    values: tk.Ref,
    scales: tk.Ref,
    *,
    out_dtype: str,
    eps: float,
    offset: float,
    block: int | None = None,
    block_rows: tk.Block = 4,
) -> None:
    """x[R, C], weight[C] -> values[R, C] and scales[R], or scales[R, C / block]; a program reads its rows once.

    With a block the rows are read again, block by block, from a cache.
    """
    i = tk.parallel(x.shape[0], block_rows)
    s = x[i].astype(jnp.float32)
    inverse = jax.lax.rsqrt((s * s).sum(axis=1) / x.shape[1] + eps)[:, None]

    def write(j: Any, s: jax.Array, place: Any) -> None:
        s = s * inverse
        s = s if weight is None else s * (weight[j].astype(jnp.float32) + offset)[None, :]
        largest = jnp.abs(s).max(axis=1)
        scale = scale_of(largest, out_dtype)
        values[i, j] = rounded(s / scale[:, None], out_dtype)
        scales[place] = scale

    if block is None:
        write(slice(None), s, i)
        return
    for number in range(x.shape[1] // block):
        j = tk.ds(number * block, block)
        write(j, x[i, j].astype(jnp.float32), (i, number))


def _rows_alone(blocks: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in blocks.items() if name != "block_columns"}


@rms_norm_quantized_forward.schedule("cpu")
def _cpu(x: Any, weight: Any) -> dict[str, int]:
    return _rows_alone(coarse_blocks(x))


@rms_norm_quantized_forward.schedule("cpu:llvm")
def _llvm(x: Any, weight: Any) -> dict[str, int]:
    return _rows_alone(cached_blocks(x))


@rms_norm_quantized_forward.schedule("cuda")
def _cuda(x: Any, weight: Any) -> dict[str, int]:
    return _rows_alone(whole_rows(*x.shape))


@rms_norm_quantized_forward.schedule("tpu")
def _tpu(x: Any, weight: Any) -> dict[str, int]:
    return _rows_alone(tpu_blocks(x))
