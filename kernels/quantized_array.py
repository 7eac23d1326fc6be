"""Arrays of 8 or 4 bits with the scales of their blocks, as one value that JAX's transformations take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

import jax
import jax.numpy as jnp

from tilekern.authoring import describe, hide_frames
from tilekern.errors import ArgumentError
from tilekern.kernels.checks import is_float
from tilekern.kernels.quantization import LARGEST, dtype_name, expanded, in_blocks, is_quantized, rounded, scale_of

hide_frames(__file__)

SCALE_DTYPES = ("float32", "bfloat16", "float16", "float8_e8m0fnu", "float8_e4m3fn")
# The least and the largest positive number of float8_e4m3fn.
_LEAST_E4M3, _LARGEST_E4M3 = 2.0**-9, 448.0
_INTEGERS = {"int8": (-128.0, 127.0), "int4": (-8.0, 7.0)}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedArray:
    """Values of 8 or 4 bits with a scale for each block: x is about (values - zero_points) * scales.

    Each dim of the scales divides the same dim of the values: scales [M, 1] are of rows, [1, N] of columns,
    [M, K / 32] of blocks of 32 numbers of a row, [1, 1] of the whole matrix. It is a pytree: `jax.jit`, `jax.vmap`,
    `jax.lax.scan`, checkpoints and shardings take it as its arrays.

    Attributes:
      values: int8, int4, float8_e4m3fn, float8_e5m2 or float4_e2m1fn.
      scales: floats of any width, with as many dims as the values.
      zero_points: of the shape of the scales, in units of the values; None for zeros.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels import QuantizedArray
      >>> x = QuantizedArray.quantize(jnp.array([[3.0, -1.0], [0.0, 0.5]]), "int8", axis=-1)
      >>> x.values
      Array([[127, -42],
             [  0, 127]], dtype=int8)
      >>> x.block
      (1, 2)
      >>> x.dequantize("bfloat16")
      Array([[3, -0.992188],
             [0, 0.5]], dtype=bfloat16)
    """

    values: jax.Array
    scales: jax.Array
    zero_points: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return self.values.ndim

    @property
    def dtype(self) -> Any:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def block(self) -> tuple[int, ...]:
        """How many neighbours share a scale, for each dim."""
        return tuple(dim // max(1, n) for dim, n in zip(self.shape, self.scales.shape, strict=True))

    @classmethod
    def quantize(
        cls,
        x: jax.Array,
        dtype: Any = "int8",
        *,
        axis: int | Sequence[int] | None = None,
        block: Sequence[int | None] | None = None,
        scale_dtype: Any = "float32",
        zero_point: bool = False,
    ) -> QuantizedArray:
        """The nearest values, ties to even, with the scale of each block from its largest number.

        The largest number of a block becomes 127 (int8), 7 (int4), 448 (float8_e4m3fn), 57344 (float8_e5m2) or 6
        (float4_e2m1fn) in size. Scales of `scale_dtype` are rounded before values are divided by them: float8_e8m0fnu
        up to a power of two, as `jax.nn` does for MX formats, others to nearest; values are clamped. Scales of
        float8_e4m3fn lie between 2⁻⁹ and 448: divide x by a number first that brings its blocks there, and multiply the
        product by it in an epilogue, as NVFP4 does. A block of zeros has the scale 1, a block with NaN the scale NaN.
        Derivatives take the result as a constant.

        Args:
          x: float32, bfloat16 or float16.
          dtype: "int8", "int4", "float8_e4m3fn", "float8_e5m2" or "float4_e2m1fn", or such a dtype.
          axis: dims whose numbers share a scale: -1 for a scale of each row, -2 for one of each column of a matrix;
            None for all dims, unless `block` is given.
          block: numbers that share a scale along each of the last dims, None for all of a dim; 1 along the dims before:
            (1, 32) with scales of float8_e8m0fnu for MX formats, (1, 16) with float8_e4m3fn for NVFP4, (128, 128) for
            matrices of DeepSeek-V3.
          scale_dtype: float32, bfloat16, float16, float8_e8m0fnu or float8_e4m3fn.
          zero_point: map the least and the largest number of a block, and 0 exactly, to the range of int8 or int4.

        Raises:
          tilekern.errors.ArgumentError: x or a dtype is not in these lists, or blocks do not divide the dims.
        """
        name, of_scales = dtype_name("QuantizedArray.quantize", dtype), _scale_dtype(scale_dtype)
        wide, within = in_blocks("QuantizedArray.quantize", x, _block(x, axis, block))
        if zero_point:
            values, scales, zeros = _asymmetric(wide, within, name, of_scales)
            return cls(values.reshape(x.shape), scales.squeeze(within), zeros.squeeze(within))
        scales = _rounded_scale(scale_of(jnp.abs(wide).max(within, keepdims=True, initial=0), name), of_scales)
        values = rounded(wide / scales.astype(jnp.float32), name).reshape(x.shape)
        # XLA may drop a cast to fewer bits and back where it fuses them, for which a barrier stands.
        values, scales = jax.lax.optimization_barrier((values, scales.squeeze(within)))
        return cls(values, scales)

    def dequantize(self, dtype: Any = jnp.float32) -> jax.Array:
        """(values - zero_points) * scales, computed in float32 (float64 for scales of float64).

        Raises:
          tilekern.errors.ArgumentError: the scales do not divide the values into blocks.
        """
        check_quantized("QuantizedArray.dequantize", "the array", self)
        wide = jnp.promote_types(self.scales.dtype, jnp.float32) if is_float(self.scales) else jnp.dtype(jnp.float32)
        values = self.values.astype(wide)
        if self.zero_points is not None:
            values = values - expanded(self.zero_points.astype(wide), self.shape)
        return (values * expanded(self.scales.astype(wide), self.shape)).astype(dtype)

    @classmethod
    def of(cls, array: Any) -> QuantizedArray:
        """A quantised array of another library: a QArray of qwix, or a QTensor of AQT.

        They are read by their attributes: `qvalue`, `scale` and `zero_point` of qwix; `qvalue`, the list `scale` and
        the list `bias` of AQT, which stands for values * scale - bias.

        Raises:
          tilekern.errors.ArgumentError: the array has other attributes, tiles of AQT, or values of another dtype.
        """
        if isinstance(array, QuantizedArray):
            return array
        values, scale, tiling = (getattr(array, name, None) for name in ("qvalue", "scale", "tiling_state"))
        table = getattr(array, "qtype", None) in ("nf4",)  # its values are numbers of a table
        if scale is None or not is_quantized(values) or tiling is not None or table:
            raise ArgumentError(
                "this is no quantised array that tilekern reads",
                expected=f"a QuantizedArray, or qvalue of {', '.join(LARGEST)} with scale (qwix, AQT), without tiles",
                got=f"{type(array).__name__} with qvalue = {describe(values)}, scale = {describe(scale)}, "
                f"qtype = {getattr(array, 'qtype', None)}, tiling_state = {tiling}",
                fix="cast values that are integers in a wider dtype; or quantise again with QuantizedArray.quantize",
            )
        if not isinstance(scale, list | tuple):
            return cls(cast(Any, values), scale, getattr(array, "zero_point", None))
        scales: Any = reduce(jnp.multiply, cast(Sequence[Any], scale), jnp.float32(1))
        scales = scales.reshape((1,) * (cast(Any, values).ndim - scales.ndim) + scales.shape)
        biases = cast(Sequence[Any], getattr(array, "bias", None) or ())
        if not biases:
            return cls(cast(Any, values), scales)
        zeros = reduce(jnp.add, biases) / scales
        return cls(cast(Any, values), jnp.broadcast_to(scales, zeros.shape), zeros)


jax.export.register_pytree_node_serialization(
    QuantizedArray,
    serialized_name="tilekern.QuantizedArray",
    serialize_auxdata=lambda _: b"",
    deserialize_auxdata=lambda _: (),
)


def is_quantized_array(x: Any) -> bool:
    """True for a QuantizedArray, and for an array of another library that `QuantizedArray.of` may read."""
    return isinstance(x, QuantizedArray) or (hasattr(x, "qvalue") and hasattr(x, "scale"))


def check_quantized(function: str, name: str, array: QuantizedArray) -> None:
    """Raise an `ArgumentError` of a `function` unless the scales divide the values, and zero points are like scales."""
    values, scales, zeros = array.values, array.scales, array.zero_points
    fits = hasattr(scales, "dtype") and jnp.issubdtype(scales.dtype, jnp.floating) and scales.ndim == values.ndim
    fits = fits and all(n == dim or (n > 0 and dim % n == 0) for n, dim in zip(scales.shape, values.shape, strict=True))
    if fits and is_quantized(values) and (zeros is None or zeros.shape == scales.shape):
        return
    raise ArgumentError(
        f"the scales of {name} of {function} do not fit its values",
        expected=f"values of {', '.join(LARGEST)}; float scales with as many dims, each of which divides that of the "
        "values; zero_points of the shape of the scales, or None",
        got=f"values = {describe(values)}, scales = {describe(scales)}, zero_points = {describe(zeros)}",
        fix="a scale of all of a dim has size 1 there: rows of values[M, K] have scales[M, 1]",
    )


# --- scales -----------------------------------------------------------------------------------------------------------


def _block(x: Any, axis: Any, block: Any) -> Sequence[int | None]:
    """The block of each dim, with None for all of a dim."""
    if axis is None:
        return [None] * x.ndim if block is None else block
    axes = cast(Sequence[Any], axis if isinstance(axis, tuple | list) else (axis,))
    if block is None and all(type(n) is int and -x.ndim <= n < x.ndim for n in axes):
        shared = {n % x.ndim for n in axes}
        return [None if n in shared else 1 for n in range(x.ndim)]
    raise ArgumentError(
        "QuantizedArray.quantize cannot take this axis",
        expected=f"dims of the {x.ndim} of x whose numbers share a scale, and then no block",
        got=f"axis = {axis!r}, block = {block!r}",
        fix="block=(1, None) are rows of a matrix, as axis=-1",
    )


def _scale_dtype(dtype: Any) -> str:
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = ""
    if name in SCALE_DTYPES:
        return name
    raise ArgumentError(
        "QuantizedArray.quantize has no scales of this dtype",
        expected=f"one of {', '.join(SCALE_DTYPES)}",
        got=f"scale_dtype = {describe(dtype)}",
        fix="leave it out for float32",
    )


def _rounded_scale(scale: jax.Array, dtype: str) -> jax.Array:
    """Positive float32 scales in another dtype; never 0, and powers of two rounded up."""
    if dtype == "float8_e8m0fnu":
        bits = jax.lax.bitcast_convert_type(scale, jnp.uint32)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) > 0)
        exponent = jnp.where(jnp.isnan(scale), 255, jnp.minimum(exponent, 254))
        return jax.lax.bitcast_convert_type(exponent.astype(jnp.uint8), jnp.float8_e8m0fnu)
    if dtype == "float8_e4m3fn":
        scale = jnp.clip(scale, _LEAST_E4M3, _LARGEST_E4M3)
    elif dtype == "float16":
        scale = jnp.clip(scale, 2.0**-24, 65504.0)
    return jax.lax.optimization_barrier(scale.astype(dtype))


def _asymmetric(wide: jax.Array, within: Any, name: str, of_scales: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    if name not in _INTEGERS:
        raise ArgumentError(
            "floats have no zero point",
            expected=f"zero_point=True with {' or '.join(_INTEGERS)}",
            got=f"zero_point = True, dtype = {name}",
            fix="leave zero_point out: floats have a sign",
        )
    low, high = _INTEGERS[name]
    least, largest = wide.min(within, keepdims=True, initial=0), wide.max(within, keepdims=True, initial=0)
    scale = largest / (high - low) - least / (high - low)  # the difference itself may be infinite
    scales = _rounded_scale(jnp.where(scale < 2.0**-126, 1, scale), of_scales)
    scale = scales.astype(jnp.float32)
    zero = jnp.clip(jnp.round(low - least / scale), low, high)
    values = jnp.clip(jnp.round(wide / scale + zero), low, high)
    return values.astype(name), scales, zero.astype(name)
