"""Quantisation of arrays to 8 and 4 bits: the scale of a block comes from the largest number of the block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from tilekern.authoring import describe, hide_frames
from tilekern.errors import ArgumentError
from tilekern.kernels.checks import is_float, require

hide_frames(__file__)

# The largest number of each dtype that the largest number of a block is mapped to.
LARGEST = {"int8": 127.0, "int4": 7.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "float4_e2m1fn": 6.0}

# The least normal number of float32: smaller scales may be read as 0.
_LEAST = 2.0**-126


def is_quantized(x: Any) -> bool:
    """True if x is an array of a dtype of `LARGEST`."""
    return str(getattr(x, "dtype", None)) in LARGEST


def scale_of(largest: jax.Array, dtype: str) -> jax.Array:
    """The scale, float32, of numbers of size up to `largest`; 1 for numbers so small that they count as zeros."""
    scale = largest / LARGEST[dtype]
    return jnp.where(scale < _LEAST, 1, scale)


def rounded(scaled: jax.Array, dtype: str) -> jax.Array:
    """Numbers in units of their scale, rounded to the dtype: to nearest, ties to even, clamped to `LARGEST`."""
    scaled = jnp.round(scaled) if dtype.startswith("int") else scaled
    return jnp.clip(scaled, -LARGEST[dtype], LARGEST[dtype]).astype(dtype)


def quantize(x: jax.Array, block: Sequence[int | None], *, dtype: Any = "int8") -> tuple[jax.Array, jax.Array]:
    """Values of 8 or 4 bits and a float32 scale for each block, such that x is about `dequantize(values, scales)`.

    The largest number of a block becomes 127 (int8), 7 (int4), 448 (float8_e4m3fn), 57344 (float8_e5m2) or 6
    (float4_e2m1fn) in size; all others are rounded to nearest, ties to even. A block of zeros has the scale 1, a block
    with NaN the scale NaN. Derivatives take both results as constants.

    Args:
      x: float32, bfloat16 or float16.
      block: numbers that share a scale along each of the last dims, None for all of a dim; 1 along the dims before.
        Rows of activations are (1, None), columns of matrices (None, 1); the model of DeepSeek-V3 has (1, 128) for
        activations and (128, 128) for matrices.
      dtype: "int8", "int4", "float8_e4m3fn", "float8_e5m2" or "float4_e2m1fn", or such a dtype.

    Returns:
      values: of the shape of x and the dtype.
      scales: float32; each dim has size dim / block.

    Raises:
      tilekern.errors.ArgumentError: x or the dtype is not in these lists, or blocks do not divide the dims.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.quantization import quantize
      >>> quantize(jnp.array([[3.0, -1.0], [0.0, 0.0]]), (1, None))[0]
      Array([[127, -42],
             [  0,   0]], dtype=int8)
    """
    name = dtype_name("quantize", dtype)
    wide, within = in_blocks("quantize", x, block)
    scales = scale_of(jnp.abs(wide).max(within, keepdims=True, initial=0), name)
    return rounded(wide / scales, name).reshape(x.shape), scales.squeeze(within)


def in_blocks(function: str, x: Any, block: Any) -> tuple[jax.Array, tuple[int, ...]]:
    """x in float32 with each dim as two, [blocks, numbers of a block], and the dims of the numbers of a block.

    `block` is as of `quantize`. Derivatives take the result as a constant.

    Raises:
      ArgumentError: x is not float32, bfloat16 or float16, or blocks do not divide its dims.
    """
    require(
        is_float(x) and x.dtype != jnp.float64,
        function,
        expected="x of float32, bfloat16 or float16",
        fix="cast with .astype",
        x=x,
    )
    sizes = _block_sizes(function, x.shape, block)
    parts = [n for dim, size in zip(x.shape, sizes, strict=True) for n in _cut(dim, size)]
    return jax.lax.stop_gradient(x).astype(jnp.float32).reshape(parts), tuple(range(1, len(parts), 2))


def _cut(dim: int, size: int) -> tuple[int, int]:
    """(blocks, numbers of a block) along a dim. If `size` is a symbol, the dim is one block."""
    return (1, size) if jax.export.is_symbolic_dim(size) else (dim // max(1, size), max(1, size))


def dequantize(values: jax.Array, scales: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """Values times the scales of their blocks, computed in float32 (float64 for scales of float64).

    Args:
      values: numbers of any dtype.
      scales: an array with as many dims; each dim divides the dim of the values.
      dtype: of the result.

    Returns:
      An array of the shape of the values.

    Raises:
      tilekern.errors.ArgumentError: the scales do not divide the values into blocks.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.quantization import dequantize
      >>> dequantize(jnp.array([1, 2, 3, 4]), jnp.array([1.0, 10.0]))
      Array([ 1.,  2., 30., 40.], dtype=float32)
    """
    require(
        divides(scales, values.shape),
        "dequantize",
        expected="scales with as many dims as the values, each of which divides that of the values",
        fix="keep dims of blocks that are whole: rows of values[M, K] have scales[M, 1]",
        values=values,
        scales=scales,
    )
    wide = jnp.promote_types(scales.dtype, jnp.float32)
    return (values.astype(wide) * expanded(scales.astype(wide), values.shape)).astype(dtype)


def divides(scales: Any, shape: Sequence[int]) -> bool:
    """True if the scales are floats that cut an array of this shape into blocks of one size."""
    if not is_float(scales) or scales.ndim != len(shape):
        return False
    return all(n > 0 and dim % n == 0 for n, dim in zip(scales.shape, shape, strict=True))


def expanded(scales: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Scales that broadcast to `shape`: each repeated for the numbers of its block; a dim of size 1 stays."""
    for axis, (count, dim) in enumerate(zip(scales.shape, shape, strict=True)):
        if count not in (1, dim):
            scales = jnp.repeat(scales, dim // count, axis=axis)
    return scales


def dtype_name(function: str, dtype: Any) -> str:
    """The name of a dtype of `LARGEST`.

    Raises:
      ArgumentError: it is another dtype, or none.
    """
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = ""
    if name in LARGEST:
        return name
    raise ArgumentError(
        f"{function} has no values of this dtype",
        expected=f"one of {', '.join(LARGEST)}",
        got=f"dtype = {describe(dtype)}",
        fix='leave it out for int8, or give "float8_e4m3fn"',
    )


def _block_sizes(function: str, shape: Any, block: Any) -> list[int]:
    """The number of neighbours that share a scale, for each dim of `shape`: (4, 8) with the block (2, None) -> [2, 8].

    A block of fewer entries is for the last dims; dims before get 1: (4, 8) with the block 4 -> [1, 4].

    Raises:
      ArgumentError: blocks do not divide the shape.
    """
    last: list[Any] = list(cast(Sequence[Any], block)) if isinstance(block, tuple | list) else [block]
    sizes: list[Any] = [1] * (len(shape) - len(last)) + last
    whole = [dim if size is None else size for dim, size in zip(shape, sizes, strict=False)]
    fits = len(sizes) == len(shape) and all(type(n) is int or n is dim for n, dim in zip(whole, shape, strict=False))
    if fits and all(n == dim or (n > 0 and dim % n == 0) for dim, n in zip(shape, whole, strict=True)):
        return whole
    raise ArgumentError(
        f"the blocks of {function} do not divide the array",
        expected=f"a divisor of each of the last dims of {list(shape)}, or None for all of it",
        got=f"block = {block!r}",
        fix="pad the array with zeros to a multiple of the block",
    )
