"""Products of two matrices that may be quantised: zero points, and gradients straight through roundings.

With values l and r, their scales s and zero points z, and blocks b of the inner dim, the product is

    Σ_k (l - z_l) s_l (r - z_r) s_r
        = Σ_k l s_l r s_r - Σ_b (Σ_{k in b} l s_l) z_r s_r - Σ_b z_l s_l Σ_{k in b} (r - z_r) s_r.

The kernel computes the first sum, of numbers of 8 and 4 bits. The others are products of one term for each block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from tilekern.authoring import hide_frames
from tilekern.kernels.checks import is_float
from tilekern.kernels.derivatives import along
from tilekern.kernels.epilogues import Epilogue, applied
from tilekern.kernels.matmul.products import product as matmul_product
from tilekern.kernels.matmul.quantized_arguments import Operand, Rounding
from tilekern.kernels.matmul.quantized_kernel import fused_quantized_matmul_forward, quantized_matmul_forward
from tilekern.kernels.quantization import expanded
from tilekern.kernels.quantized_array import QuantizedArray
from tilekern.kernels.ragged_dot.arguments import with_scales

hide_frames(__file__)


@dataclass(frozen=True)
class Settings:
    """The static arguments of a product.

    Attributes:
      epilogue: of the sums and the operands; None for the sums.
      transpose_rhs: rhs is [N, K].
      out_dtype: of the result.
      roundings: how lhs and rhs are quantised, each None for an operand as it is.
      launch: the target and launch options, as pairs.
    """

    epilogue: Epilogue | None
    transpose_rhs: bool
    out_dtype: str
    roundings: tuple[Rounding | None, Rounding | None]
    launch: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class _Shifted:
    """An epilogue of a product minus its first operand; with `pairs` minus the product of the first two."""

    epilogue: Epilogue | None
    pairs: bool

    def __call__(self, product: Any, *operands: Any) -> Any:
        if self.pairs:
            row, column, *others = operands
            shifted = product - row * column
        else:
            shift, *others = operands
            shifted = product - shift
        return shifted if self.epilogue is None else self.epilogue(shifted, *others)


def multiply(settings: Settings, lhs: Operand, rhs: Operand, operands: Sequence[jax.Array]) -> jax.Array:
    """epilogue(lhs @ rhs, *operands) of matrices; floats with a rounding are quantised first."""
    if settings.roundings == (None, None):
        return _product(settings, lhs, rhs, operands)
    return cast(Any, _straight_through)(settings, lhs, rhs, tuple(operands))


def _product(settings: Settings, lhs: Operand, rhs: Operand, operands: Sequence[jax.Array]) -> jax.Array:
    """The product of operands as they are."""
    epilogue, (left, left_scale), (right, right_scale) = settings.epilogue, _parts(lhs), _parts(rhs)
    shift = _shift(lhs, rhs, settings.transpose_rhs)
    if shift:
        epilogue, operands = _Shifted(epilogue, len(shift) == 2), (*shift, *operands)
    right_scale = None if right_scale is None else right_scale[None]
    left, right, *scales = with_scales(left, right[None], left_scale, right_scale, settings.transpose_rhs)
    static: Any = {"transpose_rhs": settings.transpose_rhs, "out_dtype": settings.out_dtype, **dict(settings.launch)}
    if epilogue is None:
        return quantized_matmul_forward(left, right, *scales, **static)
    padded = tuple(x.reshape((1,) * (2 - x.ndim) + x.shape) for x in operands)
    return fused_quantized_matmul_forward(left, right, *scales, padded, epilogue=epilogue, **static)


def _parts(x: Operand) -> tuple[jax.Array, jax.Array | None]:
    return (x.values, x.scales) if isinstance(x, QuantizedArray) else (x, None)


# --- zero points ------------------------------------------------------------------------------------------------------


def _shift(lhs: Operand, rhs: Operand, transpose_rhs: bool) -> tuple[jax.Array, ...]:
    """What zero points subtract from the product: nothing, an array [M, N], or the factors [M, 1] and [1, N] of it."""
    of_lhs, of_rhs = (x.zero_points if isinstance(x, QuantizedArray) else None for x in (lhs, rhs))
    if of_lhs is None and of_rhs is None:
        return ()
    shifts: list[tuple[jax.Array, jax.Array]] = []
    if of_rhs is not None:
        scales = rhs.scales.mT if transpose_rhs else rhs.scales
        zeros = of_rhs.mT if transpose_rhs else of_rhs
        columns = rhs.shape[0 if transpose_rhs else 1]
        by_columns = expanded(_wide(zeros) * _wide(scales), (zeros.shape[0], columns))
        without = QuantizedArray(lhs.values, lhs.scales) if isinstance(lhs, QuantizedArray) else lhs
        shifts.append((_sums(without, scales.shape[0]), jnp.broadcast_to(by_columns, (zeros.shape[0], columns))))
    if of_lhs is not None:
        by_rows = expanded(_wide(of_lhs) * _wide(lhs.scales), (lhs.shape[0], of_lhs.shape[1]))
        matrix = _turned(rhs) if not transpose_rhs else rhs
        sums = _sums(matrix, of_lhs.shape[1]).T
        shifts.append((jnp.broadcast_to(by_rows, (lhs.shape[0], of_lhs.shape[1])), sums))
    if len(shifts) == 1 and shifts[0][0].shape[1] == 1:
        return shifts[0]
    precision = jax.lax.Precision.HIGHEST
    return (sum((jnp.matmul(left, right, precision=precision) for left, right in shifts), jnp.float32(0)),)


def _turned(x: Operand) -> Operand:
    if not isinstance(x, QuantizedArray):
        return x.mT
    return QuantizedArray(x.values.mT, x.scales.mT, None if x.zero_points is None else x.zero_points.mT)


def _sums(x: Operand, blocks: int) -> jax.Array:
    """float32[R, blocks]: the sums over blocks of a row of the numbers that x[R, K] stands for."""
    whole = x.dequantize() if isinstance(x, QuantizedArray) else x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return whole.reshape(x.shape[0], blocks, -1).sum(2)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32) if is_float(x) else jnp.float32)


# --- gradients straight through roundings -----------------------------------------------------------------------------


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _straight_through(settings: Settings, lhs: Operand, rhs: Operand, operands: tuple[jax.Array, ...]) -> jax.Array:
    left, right = _rounded(settings, lhs, rhs)
    return _product(settings, left, right, operands)


def _rounded(settings: Settings, *operands: Operand) -> list[Operand]:
    return [x if rounding is None else rounding(x) for x, rounding in zip(operands, settings.roundings, strict=True)]


def _jvp(settings: Settings, primals: Any, tangents: Any) -> Any:
    """The rule of `_straight_through`: a tangent of an operand counts as a tangent of the rounded operand."""
    (lhs, rhs, operands), (dlhs, drhs, doperands) = primals, tangents
    left, right = _rounded(settings, lhs, rhs)
    wide = "float64" if settings.out_dtype == "float64" else "float32"
    plain = Settings(None, settings.transpose_rhs, wide, (None, None), settings.launch)
    at = _product(plain, left, right, ())
    like = jax.ShapeDtypeStruct(at.shape, settings.out_dtype)

    def whole(at: jax.Array, *operands: jax.Array) -> jax.Array:
        epilogue = settings.epilogue
        return at.astype(settings.out_dtype) if epilogue is None else applied(epilogue, like, at, *operands)

    moved = _along_lhs(plain, left, right, lhs, dlhs), _along_rhs(plain, left, right, rhs, drhs)
    parts = [x for x in moved if x is not None]
    directions = [functools.reduce(jnp.add, parts) if parts else None, *map(_moved, doperands)]
    return whole(at, *operands), along(whole, [at, *operands], directions)


_straight_through.defjvp(_jvp, symbolic_zeros=True)


def _moved(tangent: Any) -> Any:
    """A tangent, or None for zeros."""
    return None if isinstance(tangent, SymbolicZero) else tangent


def _along_lhs(plain: Settings, left: Operand, right: Operand, lhs: Operand, dlhs: Any) -> jax.Array | None:
    if isinstance(lhs, QuantizedArray):
        return _along_scales(lhs, dlhs, lambda x: _product(plain, x, right, ()))
    return None if _moved(dlhs) is None else _product(plain, dlhs, right, ())


def _along_rhs(plain: Settings, left: Operand, right: Operand, rhs: Operand, drhs: Any) -> jax.Array | None:
    if isinstance(rhs, QuantizedArray):
        return _along_scales(rhs, drhs, lambda x: _product(plain, left, x, ()))
    if _moved(drhs) is None:
        return None
    whole = left.dequantize(rhs.dtype) if isinstance(left, QuantizedArray) else left
    return matmul_product(whole, drhs, transpose_rhs=plain.transpose_rhs).astype(plain.out_dtype)


def _along_scales(
    x: QuantizedArray, dx: QuantizedArray, function: Callable[[QuantizedArray], jax.Array]
) -> jax.Array | None:
    """The tangent of `function` at x, for the tangent of the scales of x; None if the scales do not move."""

    def of_scales(scales: jax.Array) -> jax.Array:
        return function(QuantizedArray(x.values, scales, x.zero_points))

    moved = _moved(dx.scales)
    return None if moved is None else jax.jvp(of_scales, (x.scales,), (moved,))[1]
