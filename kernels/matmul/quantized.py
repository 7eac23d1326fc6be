"""The public function `quantized_matmul`: it checks arguments, and makes matrices of operands with leading dims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Unpack, cast

import jax
import jax.numpy as jnp

from tilekern.authoring import hide_frames, takes_python_numbers
from tilekern.errors import ArgumentError
from tilekern.kernels.conventions import Launch, check_launch
from tilekern.kernels.epilogues import Epilogue, check_epilogue
from tilekern.kernels.matmul.batches import over_batches
from tilekern.kernels.matmul.quantized_arguments import (
    check_blocks,
    check_product,
    operand_of,
    with_rows,
    with_whole_batch,
)
from tilekern.kernels.matmul.quantized_products import Settings, multiply
from tilekern.kernels.quantization import dtype_name
from tilekern.kernels.quantized_array import QuantizedArray
from tilekern.kernels.ragged_dot.arguments import result_dtype
from tilekern.kernels.ragged_dot.products import widened

hide_frames(__file__)


@takes_python_numbers
def quantized_matmul(
    lhs: jax.Array | QuantizedArray,
    rhs: jax.Array | QuantizedArray,
    *operands: jax.Array,
    epilogue: Epilogue | None = None,
    transpose_rhs: bool = False,
    lhs_dtype: Any = None,
    lhs_block: Sequence[int | None] | None = None,
    rhs_dtype: Any = None,
    rhs_block: Sequence[int | None] | None = None,
    out_dtype: Any = None,
    target: str | None = None,
    **launch: Unpack[Launch],
) -> jax.Array:
    """epilogue(lhs @ rhs, *operands) where one operand, or both, have 8 or 4 bits and scales.

    Weights of a model that serves are a `QuantizedArray`, and activations are floats: weight-only quantisation. With
    `lhs_dtype` activations are quantised as they come, a scale for each row, and integers are multiplied by integers.
    Numbers are multiplied exactly. Products are summed in int32 (two operands of integers) or float32 over a block of
    the inner dim with one scale of each operand; the sums are scaled and added in float32. The epilogue gets the sums.

    Operands of floats have derivatives of any order, in both modes, and so have scales. If floats are quantised here,
    derivatives go straight through the rounding, as if the rounded numbers were the numbers themselves. The gradient
    by lhs is a product of the cotangent, in the dtype of lhs, with rhs transposed, which is read in place.

    Args:
      lhs: [*B, M, K], float32, bfloat16 or float16, or a `QuantizedArray`, or an array of qwix or AQT.
      rhs: [*B, K, N], the same; with `transpose_rhs` [*B, N, K]. Leading dims broadcast as in `jnp.matmul`. If rhs has
        no leading dims, the leading dims of lhs are rows.
      operands: arrays of floats that broadcast to [*B, M, N], such as a bias [N], or a residual.
      epilogue: a function of one number of the product and one of each operand, of jnp functions. It is called on
        tracers without dims, so that it cannot mix elements. Define it once: calls with another function object
        compile again. None, without operands: the product.
      transpose_rhs: True if rhs is [*B, N, K].
      lhs_dtype: quantise lhs to this dtype of `QuantizedArray.quantize`.
      lhs_block: the block of a scale of lhs, as of `QuantizedArray.quantize`; None for rows.
      rhs_dtype: quantise rhs, as training for quantised serving does.
      rhs_block: the block of a scale of rhs; None for columns of the product.
      out_dtype: of the result. None: the dtype of an operand of floats, or bfloat16.
      target: lower for this target's blocks, e.g. "cpu:xla".
      launch: instead of the schedule's, `block_m` rows and `block_n` columns of a tile, `block_k` terms that are summed
        at a time, and a GPU's `num_warps`, `num_stages` and `num_ctas`. They change no result beyond rounding.

    Returns:
      [*B, M, N] in `out_dtype`.

    Raises:
      tilekern.errors.ArgumentError: shapes, dtypes or blocks do not fit, no operand is quantised, or the epilogue does
        not return one number.
      tilekern.errors.NotDifferentiableError: the derivative by values of 8 or 4 bits is asked for.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels import QuantizedArray, quantized_matmul
      >>> w = QuantizedArray.quantize(jnp.array([[1.0, 20.0], [-1.0, 10.0]]), "int8", axis=0)
      >>> quantized_matmul(jnp.array([[3.0, 1.0]]), w).round(2)
      Array([[ 2.  , 70.08]], dtype=float32)
    """
    check_launch("quantized_matmul", launch)
    columns = (1, None) if transpose_rhs else (None, 1)
    lhs, of_lhs = operand_of("lhs", lhs, lhs_dtype, lhs_block, (1, None))
    rhs, of_rhs = operand_of("rhs", rhs, rhs_dtype, rhs_block, columns)
    shape = check_product(lhs, rhs, operands, transpose_rhs)
    check_blocks(lhs, rhs, transpose_rhs)
    _check_quantized(lhs, rhs, of_lhs, of_rhs)
    numbers = [x.values if isinstance(x, QuantizedArray) else x for x in (lhs, rhs)]
    dtype = result_dtype("quantized_matmul", out_dtype, *numbers)
    if epilogue is not None or operands:
        dtypes = [x.dtype if how is None else jnp.int8 for x, how in zip(numbers, (of_lhs, of_rhs), strict=True)]
        check_epilogue("quantized_matmul", epilogue, widened(*dtypes), 1 + len(operands))
    if 0 in (*shape, lhs.shape[-1]):
        return _empty(shape, operands, epilogue, dtype)
    keywords = (("target", target), *launch.items())
    settings = Settings(epilogue, transpose_rhs, dtype, (of_lhs, of_rhs), keywords)
    return _over_leading_dims(settings, lhs, rhs, operands, shape)


def _check_quantized(lhs: Any, rhs: Any, of_lhs: Any, of_rhs: Any) -> None:
    if isinstance(lhs, QuantizedArray) or isinstance(rhs, QuantizedArray) or of_lhs or of_rhs:
        for how in (of_lhs, of_rhs):
            dtype_name("quantized_matmul", "int8" if how is None else how.dtype)
        return
    raise ArgumentError(
        "no operand of quantized_matmul is quantised",
        expected="a QuantizedArray, or lhs_dtype or rhs_dtype",
        got=f"lhs = {lhs.dtype}{list(lhs.shape)}, rhs = {rhs.dtype}{list(rhs.shape)}",
        fix="QuantizedArray.quantize(rhs, axis=-2) has a scale for each column; matmul multiplies floats",
    )


def _empty(shape: tuple[int, ...], operands: Sequence[Any], epilogue: Epilogue | None, dtype: str) -> jax.Array:
    """The result where the sums have no terms."""
    zeros = jnp.zeros(shape, jnp.float32)
    if epilogue is None or math.prod(shape) == 0:
        return zeros.astype(dtype)
    whole: Any = cast(Any, jnp).vectorize(epilogue)(zeros, *(x.astype(jnp.float32) for x in operands))
    return whole.astype(dtype)


def _over_leading_dims(
    settings: Settings, lhs: Any, rhs: Any, operands: Sequence[Any], shape: tuple[int, ...]
) -> jax.Array:
    if math.prod(rhs.shape[:-2]) == 1:
        leaves, tree = cast(Any, jax.tree.flatten(with_whole_batch(rhs)))
        matrix = jax.tree.unflatten(tree, [a.reshape(a.shape[-2:]) for a in leaves])
        rows = with_rows(lhs)
        flat = [_as_matrix(x, shape, rows.shape[0]) for x in operands]
        return multiply(settings, rows, matrix, flat).reshape(shape)
    padded = [x.reshape((1,) * (2 - x.ndim) + x.shape) for x in operands]
    leaves, tree = cast(Any, jax.tree.flatten((with_whole_batch(lhs), with_whole_batch(rhs), padded)))

    def of_matrices(*leaves: jax.Array) -> jax.Array:
        return multiply(settings, *jax.tree.unflatten(tree, leaves))

    return over_batches(of_matrices, shape[:-2], *leaves)


def _as_matrix(operand: Any, shape: tuple[int, ...], rows: int) -> jax.Array:
    """An operand as [M or 1, N or 1], with the leading dims in M."""
    padded = (1,) * (len(shape) - operand.ndim) + operand.shape
    if math.prod(padded[:-1]) == 1:
        return operand.reshape(1, padded[-1])
    return jnp.broadcast_to(operand, (*shape[:-1], padded[-1])).reshape(rows, padded[-1])
