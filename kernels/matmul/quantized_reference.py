"""The definition of `quantized_matmul` in plain jnp: a product of dequantised matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tilekern.kernels.quantization import expanded
from tilekern.kernels.quantized_array import QuantizedArray


def quantized_reference(
    lhs: jax.Array | QuantizedArray,
    rhs: jax.Array | QuantizedArray,
    *operands: jax.Array,
    epilogue: Callable[..., Any] | None = None,
    transpose_rhs: bool = False,
    lhs_dtype: Any = None,
    lhs_block: Sequence[int | None] | None = None,
    rhs_dtype: Any = None,
    rhs_block: Sequence[int | None] | None = None,
    dtype: Any = None,
) -> jax.Array:
    """epilogue(lhs @ rhs, *operands) of the numbers for which quantised operands stand, computed in `dtype`.

    None: float32. Operands with `lhs_dtype` or `rhs_dtype` are quantised first.
    """
    wide = jnp.dtype(dtype or jnp.float32)

    def whole(x: Any, of_values: Any, block: Any, default: Any) -> jax.Array:
        if of_values is not None or block is not None:
            x = QuantizedArray.quantize(x, of_values or "int8", block=block or default)
        if not isinstance(x, QuantizedArray):
            return x.astype(wide)
        values = x.values.astype(wide)
        if x.zero_points is not None:
            values = values - expanded(x.zero_points.astype(wide), x.shape)
        return values * expanded(x.scales.astype(wide), x.shape)

    left = whole(lhs, lhs_dtype, lhs_block, (1, None))
    right = whole(rhs, rhs_dtype, rhs_block, (1, None) if transpose_rhs else (None, 1))
    right = right.mT if transpose_rhs else right
    product = jnp.matmul(left, right, precision=jax.lax.Precision.HIGHEST)
    return product if epilogue is None else epilogue(product, *(x.astype(wide) for x in operands))
