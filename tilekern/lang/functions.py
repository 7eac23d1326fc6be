"""Functions of the language that are not JAX's: `dot`, `zeros`, `full`, `cdiv`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tilekern import _jax
from tilekern.errors import ArgumentError, checked
from tilekern.ir.compute import PRECISIONS, Precision
from tilekern.ir.core import cdiv as _cdiv
from tilekern.ir.types import DTYPES, FOUR_BITS, DType, dtype_name, is_dtype
from tilekern.ir.types import accumulator as _accumulator
from tilekern.lang.tiles import Tile, describe, static_int

_PRESETS: dict[Precision, Any] = {
    "ieee": None,
    "tf32": lax.DotAlgorithmPreset.TF32_TF32_F32,
    "bf16": lax.DotAlgorithmPreset.BF16_BF16_F32,
    "bf16x3": lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
    "bf16x6": lax.DotAlgorithmPreset.BF16_BF16_F32_X6,
}


def precision_of(preset: Any) -> Precision:
    """Translate JAX's dot precision to the language's name. Precisions below float32 in JAX are exact float32 here."""
    names: dict[Any, Precision] = {algorithm: name for name, algorithm in _PRESETS.items() if algorithm is not None}
    return names.get(preset, "ieee") if isinstance(preset, lax.DotAlgorithmPreset) else "ieee"


@checked
def dot(a: Any, b: Any, acc: Any = None, *, precision: str | None = None) -> jax.Array:
    """Matrix product of a [..., M, K] and b [..., K, N], plus `acc` [..., M, N].

    The result, the accumulation and `acc` are float32; float64 for float64 operands, int32 for integers.
    `precision` is for float32 operands only: None and "ieee" multiply in float32; "tf32", "bf16", "bf16x3" and
    "bf16x6" allow a backend to use the cheaper product of that name.
    """
    left, right = (_operand(x, name) for x, name in ((a, "a"), (b, "b")))
    if left.dtype != right.dtype:
        raise _misfit("operands of one dtype", left, right, "cast one of them with .astype")
    fits = left.ndim == right.ndim >= 2 and left.shape[:-2] == right.shape[:-2] and left.shape[-1] == right.shape[-2]
    if not fits:
        raise _misfit("a[..., M, K] and b[..., K, N] with equal leading dims", left, right, "transpose with .T or mT")
    if precision is not None and precision not in PRECISIONS:
        raise ArgumentError(
            "tk.dot does not know this precision",
            expected=f"one of {', '.join(map(repr, PRECISIONS))}, or None",
            got=f"precision = {precision!r}",
            fix="leave it out for exact float32 products",
        )
    batch = tuple(range(left.ndim - 2))
    dims = (((left.ndim - 1,), (left.ndim - 2,)), (batch, batch))
    wide = accumulator(left.dtype)
    preset = _PRESETS[precision] if precision and left.dtype == jnp.float32 else None
    product = lax.dot_general(left, right, dims, precision=preset, preferred_element_type=wide)
    if acc is None:
        return product
    total = _operand(acc, "acc")
    if (total.shape, total.dtype) != (product.shape, product.dtype):
        raise ArgumentError(
            "the accumulator of tk.dot does not fit the product",
            expected=f"acc = {describe(product)}",
            got=f"acc = {describe(total)}",
            fix="start from tk.zeros(shape), which is float32",
        )
    return total + product


def _operand(x: Any, name: str) -> jax.Array:
    if not _jax.is_array(x):
        raise ArgumentError(
            "tk.dot takes tiles", expected="a tile", got=f"{name} = {describe(x)}", fix="load it from a ref first"
        )
    return jnp.asarray(x)


def _misfit(expected: str, left: jax.Array, right: jax.Array, fix: str) -> ArgumentError:
    got = f"a = {describe(left)}, b = {describe(right)}"
    return ArgumentError("the operands of tk.dot do not fit", expected=expected, got=got, fix=fix)


@checked
def full(shape: Any, value: Any, dtype: Any = jnp.float32) -> jax.Array:
    """Tile filled with `value`, float32 by default. Entries of `shape` are ints or Tiles; a Tile counts as its size.

    `value` is a number that the dtype holds, or a traced scalar, which is cast.
    """
    entries = cast(Sequence[Any], shape) if isinstance(shape, (tuple, list)) else (shape,)
    sizes = [e.size if isinstance(e, Tile) else static_int(e, "a size of the tile", 0) for e in entries]
    tile_dtype = _dtype(dtype)
    if not _holds(tile_dtype, value):
        raise ArgumentError(
            "a tile is filled with one scalar",
            expected=f"a scalar of dtype {dtype_name(tile_dtype)}",
            got=f"value = {describe(value)}",
            fix="use jnp.broadcast_to for a tile, and another dtype for a number that this one does not hold",
        )
    return jnp.full(sizes, value, tile_dtype)


def _holds(dtype: DType, value: Any) -> bool:
    """True for a scalar array, and for a number that the dtype holds; a float dtype may round the number."""
    number: Any = cast(Any, value).item() if isinstance(value, np.generic) else value
    if _jax.is_array(number):
        return number.shape == ()
    if isinstance(number, complex) or not isinstance(number, (int, float)) or jnp.issubdtype(dtype, jnp.floating):
        return not isinstance(number, complex)
    low, high = (0, 1) if dtype == jnp.bool_ else (int(limit) for limit in (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max))
    return low <= number <= high and number == int(number)


def _dtype(dtype: Any) -> DType:
    converted = None if dtype is None or _jax.is_array(dtype) else jnp.dtype(dtype)
    if converted is not None and (is_dtype(converted) or converted in FOUR_BITS):
        return converted
    raise ArgumentError(
        "tiles have no such dtype",
        expected=f"one of {', '.join(DTYPES)}, as jnp.float32",
        got=f"dtype = {describe(dtype)}",
        fix="name a dtype of jax.numpy",
    )


@checked
def zeros(shape: Any, dtype: Any = jnp.float32) -> jax.Array:
    """Tile of zeros, float32 by default; `shape` is as in `full`."""
    return full(shape, 0, dtype)


@checked
def accumulator(dtype: Any) -> DType:
    """Dtype in which `dot` accumulates operands of `dtype`: float32, float64 for float64, int32 for integers."""
    return _accumulator(_dtype(dtype))


@checked
def cdiv(a: Any, b: Any) -> Any:
    """Quotient a / b rounded up, for a >= 0 and b > 0. Both are ints or traced integers."""
    if isinstance(a, int) and isinstance(b, int):
        return _cdiv(a, b)
    arguments: dict[str, Any] = {"a": a, "b": b}
    for name, number in arguments.items():
        if isinstance(number, float) or (_jax.is_array(number) and not jnp.issubdtype(number.dtype, jnp.integer)):
            raise ArgumentError(
                "tk.cdiv divides integers",
                expected="Python ints or traced integers",
                got=f"{name} = {describe(number)}",
                fix="cast floats to integers first",
            )
    return (a + (b - 1)) // b
