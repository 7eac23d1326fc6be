"""Checks of arguments of grouped products; ends of groups, and scales as the kernels take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tilekern.authoring import describe, gathered, hide_frames
from tilekern.errors import ArgumentError
from tilekern.kernels.checks import is_float, is_integer, require
from tilekern.kernels.quantization import LARGEST, dequantize, is_quantized
from tilekern.kernels.ragged_dot.scaled_derivatives import LEAST

hide_frames(__file__)

_SHARED = 128
"""Columns with a scale that the kernels expand; scales of fewer columns are expanded in memory."""


def ends_of(sizes: jax.Array, rows: int) -> jax.Array:
    """int32[G], the ends of groups of `sizes`, at most `rows`. Each partial sum is cut at `rows`, so none overflows."""
    last = jnp.asarray(rows, jnp.uint32)

    def add(end: jax.Array, size: jax.Array) -> jax.Array:
        return jnp.minimum(end + size, last)

    inside = jnp.clip(gathered(sizes), 0, rows).astype(jnp.uint32)
    return jax.lax.associative_scan(add, inside).astype(jnp.int32)


# --- checks -----------------------------------------------------------------------------------------------------------


def check_groups(function: str, lhs: Any, rhs: Any, group_sizes: Any, transpose_rhs: bool) -> None:
    """Raise an `ArgumentError` of a `function` unless the arrays fit."""
    fits = _multiply(lhs, rhs) and is_integer(group_sizes) and (lhs.ndim, rhs.ndim, group_sizes.ndim) == (2, 3, 1)
    matrices = "rhs[G, N, K]" if transpose_rhs else "rhs[G, K, N]"
    require(
        fits and lhs.shape[1] == rhs.shape[2 if transpose_rhs else 1] and rhs.shape[0] == group_sizes.shape[0],
        function,
        expected=f"lhs[M, K] and {matrices} of one float dtype of at least 16 bits, or one or both of "
        f"{', '.join(LARGEST)}; "
        "integer group_sizes[G]",
        fix="reshape leading dims into M; cast with .astype",
        lhs=lhs,
        rhs=rhs,
        group_sizes=group_sizes,
    )


def check_contracting(lhs: Any, rhs: Any, group_sizes: Any) -> None:
    """Raise an `ArgumentError` of `ragged_contracting_dot` unless the arrays fit."""
    fits = is_float(lhs) and is_float(rhs) and lhs.dtype == rhs.dtype and is_integer(group_sizes)
    require(
        fits and (lhs.ndim, rhs.ndim, group_sizes.ndim) == (2, 2, 1) and lhs.shape[0] == rhs.shape[0],
        "ragged_contracting_dot",
        expected="lhs[M, K] and rhs[M, N] of one float dtype of at least 16 bits, integer group_sizes[G]",
        fix="reshape leading dims into M; cast with .astype",
        lhs=lhs,
        rhs=rhs,
        group_sizes=group_sizes,
    )


def check_accumulate(function: str, accumulate: Any, out_dtype: Any, shape: tuple[int, ...]) -> None:
    """Raise an `ArgumentError` unless results of this shape can be added to `accumulate`, or `accumulate` is None."""
    if accumulate is None:
        return
    require(
        is_float(accumulate) and accumulate.shape == shape,
        function,
        expected=f"accumulate[{', '.join(map(str, shape))}] of a float dtype of at least 16 bits",
        fix="begin with jnp.zeros of this shape in float32",
        accumulate=accumulate,
    )
    if out_dtype is not None and jnp.dtype(out_dtype) != accumulate.dtype:
        raise ArgumentError(
            f"the result of {function} has the dtype of the array that it is added to",
            expected=f"out_dtype = None or {accumulate.dtype.name}",
            got=f"out_dtype = {describe(out_dtype)}, accumulate = {describe(accumulate)}",
            fix="leave out_dtype out",
        )


def result_dtype(function: str, out_dtype: Any, *operands: Any) -> str:
    """The name of a result's dtype: `out_dtype`, else the dtype of an operand of at least 16 bits, else bfloat16."""
    wide = next((x.dtype for x in operands if is_float(x)), jnp.dtype(jnp.bfloat16))
    try:
        dtype = wide if out_dtype is None else jnp.dtype(out_dtype)
        if is_float(jax.ShapeDtypeStruct((), dtype)):
            return dtype.name
    except TypeError:
        pass  # no dtype at all
    raise ArgumentError(
        f"{function} has no results of this dtype",
        expected="out_dtype = float32, bfloat16, float16 or float64",
        got=f"out_dtype = {describe(out_dtype)}",
        fix="quantise the result with tilekern.kernels.quantization.quantize",
    )


def _multiply(lhs: Any, rhs: Any) -> bool:
    """True if the dtypes can be multiplied: one float dtype of both operands, or 8 or 4 bits in at least one."""
    if is_float(lhs) and is_float(rhs):
        return lhs.dtype == rhs.dtype
    return all(is_float(x) or is_quantized(x) for x in (lhs, rhs))


# --- scales -----------------------------------------------------------------------------------------------------------


def check_scales(function: str, lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any, transpose_rhs: bool) -> None:
    """Raise an `ArgumentError` unless the scales divide their operands, and the inner dim into blocks that nest."""
    inner = lhs.shape[1]
    for name, scale, x in (("lhs_scale", lhs_scale, lhs), ("rhs_scale", rhs_scale, rhs)):
        if scale is None or _divides(scale, x.shape):
            continue
        some = [max(1, n // 128) for n in x.shape[-2:]]
        shown = "[M or 1, K / block]" if name == "lhs_scale" else "[G, N / block, K / block]" if transpose_rhs else ""
        shown = shown or "[G, K / block, N / block]"
        raise ArgumentError(
            f"{name} does not divide {name[:3]} into blocks",
            expected=f"None, or floats {shown} of blocks that divide the dims {list(x.shape)}",
            got=f"{name} = {describe(scale)}",
            fix=f"a scale of all of a dim has size 1 there; quantize(x, (128, 128)) gives [..., {some[0]}, {some[1]}]",
        )
    if lhs_scale is None or rhs_scale is None:
        return
    counts = sorted((lhs_scale.shape[1], rhs_scale.shape[2 if transpose_rhs else 1]))
    if counts[1] % counts[0]:
        raise ArgumentError(
            f"the blocks of the scales of {function} do not nest along the inner dim",
            expected="blocks of one scale that the blocks of the other divide",
            got=f"blocks of {inner // counts[1]} and of {inner // counts[0]} numbers",
            fix="quantise both operands in blocks of one size",
        )


def _divides(scale: Any, shape: tuple[int, ...]) -> bool:
    fits = hasattr(scale, "dtype") and jnp.issubdtype(scale.dtype, jnp.floating) and scale.ndim == len(shape)
    return fits and all(n > 0 and dim % n == 0 for n, dim in zip(scale.shape, shape, strict=True))


def with_scales(
    lhs: jax.Array, rhs: jax.Array, lhs_scale: Any, rhs_scale: Any, transpose_rhs: bool
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """(lhs, rhs, lhs_scale[M, B], rhs_scale[G, B, C]) as the kernels take them.

    C is the number of blocks of at least 128 columns, or N. Scales of short blocks are applied in memory if one operand
    has at least 16 bits.
    """
    lhs, (rhs,), of_lhs, (of_rhs,) = with_scales_of_several(lhs, (rhs,), lhs_scale, (rhs_scale,), transpose_rhs)
    return lhs, rhs, of_lhs, of_rhs


def with_scales_of_several(
    lhs: jax.Array, rhs: Sequence[jax.Array], lhs_scale: Any, rhs_scales: Sequence[Any], transpose_rhs: bool
) -> tuple[jax.Array, tuple[jax.Array, ...], jax.Array | None, tuple[jax.Array | None, ...]]:
    """`with_scales` for several matrices of one shape; their scales have one shape, or all are None."""
    if is_float(lhs) and rhs_scales[0] is not None and _is_short(rhs_scales[0].shape[2 if transpose_rhs else 1], lhs):
        rhs = [dequantize(w, _wide(scale), lhs.dtype) for w, scale in zip(rhs, rhs_scales, strict=True)]
        rhs_scales = (None,) * len(rhs)
    if is_float(rhs[0]) and lhs_scale is not None and _is_short(lhs_scale.shape[1], lhs):
        lhs, lhs_scale = dequantize(lhs, _wide(lhs_scale), rhs[0].dtype), None
    of_lhs = None if lhs_scale is None else _repeated(_wide(lhs_scale), 0, lhs.shape[0])
    return lhs, tuple(rhs), of_lhs, tuple(_of_columns(rhs[0], scale, transpose_rhs) for scale in rhs_scales)


def _of_columns(rhs: jax.Array, scale: Any, transpose_rhs: bool) -> jax.Array | None:
    if scale is None:
        return None
    scales = _repeated(_wide(scale), 0, rhs.shape[0])
    scales = scales.swapaxes(1, 2) if transpose_rhs else scales
    columns = rhs.shape[1 if transpose_rhs else 2]
    shared = columns // scales.shape[2]
    return scales if shared % _SHARED == 0 or scales.shape[2] == 1 else _repeated(scales, 2, columns)


def _is_short(count: int, lhs: Any) -> bool:
    return count > 1 and lhs.shape[1] // count < LEAST


def _wide(scale: jax.Array) -> jax.Array:
    return jnp.asarray(scale).astype(jnp.promote_types(jnp.asarray(scale).astype(jnp.float32).dtype, jnp.float32))


def _repeated(scale: jax.Array, axis: int, size: int) -> jax.Array:
    count = scale.shape[axis]
    return scale if count == size else jnp.repeat(scale, size // count, axis=axis)
