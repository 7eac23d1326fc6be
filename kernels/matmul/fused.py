"""Products with an epilogue: a function of the user is applied to the sums before they are stored."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Unpack, cast

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.authoring import describe, hide_frames, takes_python_numbers
from tilekern.errors import ArgumentError
from tilekern.kernels.checks import as_rows, is_float
from tilekern.kernels.conventions import Launch, check_launch, renamed
from tilekern.kernels.derivatives import along
from tilekern.kernels.epilogues import Epilogue, applied, check_epilogue, mapped, reads_first
from tilekern.kernels.matmul import kernel as plain
from tilekern.kernels.matmul.batches import broadcast, misfit, over_batches
from tilekern.kernels.matmul.derivatives import matmul_tangent
from tilekern.kernels.matmul.products import checked_split, splits
from tilekern.kernels.matmul.split import split_matmul
from tilekern.kernels.symbolic_rows import over_rows

hide_frames(__file__)


@renamed(x="lhs", w="rhs", transpose_x="transpose_lhs", transpose_w="transpose_rhs")
@takes_python_numbers
def fused_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    *operands: jax.Array,
    epilogue: Epilogue,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    split_k: int | None = None,
    target: str | None = None,
    **launch: Unpack[Launch],
) -> jax.Array:
    """epilogue(lhs @ rhs, *operands), elementwise: bias, activation, residual, scale or gate.

    The product is accumulated in float32 (float64 for float64), and is not in memory. The epilogue gets it, and the
    operands, in that dtype. The backward pass saves the product, in the dtype of lhs, only if the epilogue's derivative
    depends on it: not for a bias or a residual.

    Args:
      lhs: [*B, M, K], float32, bfloat16, float16 or float64; with `transpose_lhs` [*B, K, M].
      rhs: [*B, K, N] of the dtype of lhs; with `transpose_rhs` [*B, N, K]. No transposed copy is made. Leading dims
        broadcast as in `jnp.matmul`, without copies.
      operands: arrays of floats that broadcast to [*B, M, N], such as a bias [N], a scale of rows [M, 1],
        or a residual.
      epilogue: a function of one number of the product and one of each operand, of jnp functions. It is called on
        tracers without dims, so that it cannot mix elements. Define it once: calls with another function object
        compile again.
      transpose_lhs: True if lhs is [*B, K, M].
      transpose_rhs: True if rhs is [*B, N, K].
      split_k: the number of parts of a long sum that different programs may compute, as for `matmul`: it never changes
        results beyond rounding. The epilogue of a sum that may be split is XLA's, and a product that has at most 74
        tiles of 64 × 64 in memory.
      target: lower for this target's blocks, e.g. "cpu:xla".
      launch: the launch options of `matmul`.

    Returns:
      [*B, M, N] in the dtype of lhs.

    Raises:
      tilekern.errors.ArgumentError: shapes or dtypes do not fit, or the epilogue does not return one number.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.matmul import fused_matmul
      >>> def biased_relu(product, bias):
      ...     return jax.nn.relu(product + bias)
      >>> fused_matmul(jnp.eye(2), jnp.eye(2), jnp.array([-3.0, 1.0]), epilogue=biased_relu)
      Array([[0., 1.],
             [0., 2.]], dtype=float32)
    """
    check_launch("fused_matmul", launch)
    shape = _product_shape(lhs, rhs, operands, transpose_lhs, transpose_rhs)
    check_epilogue("fused_matmul", epilogue, lhs.dtype, 1 + len(operands))
    split_k = checked_split("fused_matmul", split_k)
    if math.prod(shape) == 0:
        return jnp.zeros(shape, lhs.dtype)

    def of_matrices(lhs: jax.Array, rhs: jax.Array, *operands: jax.Array) -> jax.Array:
        transposes = {"transpose_lhs": transpose_lhs, "transpose_rhs": transpose_rhs}
        if splits(lhs, rhs, transpose_lhs, transpose_rhs, split_k):
            wide = str(tk.accumulator(lhs.dtype))
            product = split_matmul(lhs, rhs, **transposes, dtype=wide, split_k=split_k, target=target, **launch)
            return applied(epilogue, jax.ShapeDtypeStruct(product.shape, lhs.dtype), product, *operands)
        keywords = {"epilogue": epilogue, "saves": False, **transposes, "target": target}
        return fused_matmul_forward(lhs, rhs, operands, **keywords, **launch)[0]

    if math.prod(rhs.shape[:-2]) == 1 and not transpose_lhs:
        rows = as_rows(lhs)
        flat = (_as_matrix(operand, shape, rows.shape[0]) for operand in operands)
        matrix = rhs.reshape(rhs.shape[-2:])
        # A part of rows has rows of operands, too, but not of a bias: no rule of the kernel says which.
        return over_rows(lambda _, rows, *parts: of_matrices(rows, matrix, *parts), rows, *flat).reshape(shape)
    padded = (operand.reshape((1,) * (2 - operand.ndim) + operand.shape) for operand in operands)
    return over_batches(of_matrices, shape[:-2], lhs, rhs, *padded)


def _product_shape(
    lhs: Any, rhs: Any, operands: Sequence[Any], transpose_lhs: bool, transpose_rhs: bool
) -> tuple[int, ...]:
    """The shape [*B, M, N] of the product.

    Raises:
      ArgumentError: the arrays do not fit.
    """
    named = {f"operand {n}": o for n, o in enumerate(operands)}
    fits = all(map(is_float, (lhs, rhs, *operands))) and lhs.dtype == rhs.dtype and min(lhs.ndim, rhs.ndim) >= 2
    fits = fits and lhs.shape[-2 if transpose_lhs else -1] == rhs.shape[-1 if transpose_rhs else -2]
    batch = broadcast(lhs.shape[:-2], rhs.shape[:-2]) if fits else None
    if batch is None:
        raise misfit("fused_matmul", transpose_lhs, transpose_rhs, lhs=lhs, rhs=rhs, **named)
    shape = *batch, lhs.shape[-1 if transpose_lhs else -2], rhs.shape[-2 if transpose_rhs else -1]
    for name, operand in named.items():
        padded = (1,) * (len(shape) - operand.ndim) + operand.shape
        if len(padded) != len(shape) or any(p not in (1, s) for p, s in zip(padded, shape, strict=True)):
            raise ArgumentError(
                f"{name} of fused_matmul does not broadcast to the product",
                expected=f"a shape that broadcasts to {list(shape)}",
                got=describe(operand),
                fix="a bias of columns has the shape [N], a scale of rows [M, 1]",
            )
    return shape


def _as_matrix(operand: Any, shape: tuple[int, ...], rows: int) -> jax.Array:
    """An operand as [M or 1, N or 1], with the leading dims in M."""
    *leading, columns = operand.shape or (1,)
    if math.prod(leading) == 1:
        return operand.reshape(1, columns)
    return jnp.broadcast_to(operand, (*shape[:-1], columns)).reshape(rows, columns)


# --- the kernel -------------------------------------------------------------------------------------------------------


def _types(
    lhs: Any, rhs: Any, operands: Any, *, epilogue: Any, saves: bool, transpose_lhs: bool, transpose_rhs: bool
) -> tuple[Any, Any]:
    product = plain.matmul_type(lhs, rhs, transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
    return product, product if saves else None


@tk.kernel(out_type=_types)
def fused_matmul_forward(
    lhs: tk.Ref,
    rhs: tk.Ref,
    operands: tuple[tk.Ref, ...],
    out: tk.Ref,
    product: tk.Ref | None,
    *,
    epilogue: Epilogue,
    saves: bool,
    transpose_lhs: bool,
    transpose_rhs: bool,
    block_m: tk.Block = 128,
    block_n: tk.Block = 128,
    block_k: tk.Block = 64,
) -> None:
    """out[M, N] = epilogue(lhs @ rhs, *operands), and with `saves` the product[M, N]."""
    i, j = tk.grid((out.shape[0], block_m), (out.shape[1], block_n), order=tk.grouped(8))
    wide = tk.accumulator(lhs.dtype)

    def step(k: tk.Tile, acc: jax.Array) -> jax.Array:
        return tk.dot(lhs[k, i].T if transpose_lhs else lhs[i, k], rhs[j, k].T if transpose_rhs else rhs[k, j], acc)

    def part(operand: tk.Ref) -> jax.Array:
        """The tile (i, j) of an operand; a dim of size 1 is broadcast."""
        rows, columns = (n == size for n, size in zip(out.shape, operand.shape, strict=True))
        tile = operand[i if rows else 0, j if columns else 0].astype(wide)
        tile = tile if rows else tile[None]
        return jnp.broadcast_to(tile if columns else tile[..., None], acc.shape)

    inner = lhs.shape[0 if transpose_lhs else 1]
    acc = tk.fold(tk.serial(inner, block_k), step, tk.zeros((i, j), wide))
    if product is not None:
        product[i, j] = acc.astype(product.dtype)
    result = mapped(epilogue, acc, *(part(operand) for operand in operands))
    out[i, j] = result.astype(out.dtype)


# --- derivatives ------------------------------------------------------------------------------------------------------


@fused_matmul_forward.defjvp
def _jvp(
    primals: Any,
    tangents: Any,
    *,
    epilogue: Epilogue,
    saves: bool,
    transpose_lhs: bool,
    transpose_rhs: bool,
    **blocks: int,
) -> Any:
    """The tangent of the epilogue at the saved product, which XLA fuses, and the tangent of the product.

    If the tangent does not depend on the product, the product is not saved, and zeros take its place.
    """
    (lhs, rhs, operands), (dlhs, drhs, doperands) = primals, tangents
    transposes = {"transpose_lhs": transpose_lhs, "transpose_rhs": transpose_rhs}
    like = plain.matmul_type(lhs, rhs, **transposes)
    moves = dlhs is not None or drhs is not None
    directions = [matmul_tangent(lhs, rhs, dlhs, drhs, **transposes) if moves else None, *doperands]

    def tangent(product: jax.Array, operands: Sequence[jax.Array], directions: Sequence[Any]) -> jax.Array:
        return along(partial(applied, epilogue, like), [product, *operands], directions)

    needed = saves or reads_first(tangent, like, operands, directions)
    out, product = fused_matmul_forward(*primals, epilogue=epilogue, saves=needed, **transposes, **blocks)
    point = product if needed else jnp.zeros(like.shape, like.dtype)
    # Only the arguments are kept for the backward pass, not the many intermediate results of a derivative.
    moved = cast(Any, jax.checkpoint)(tangent, prevent_cse=False)(point, operands, directions)
    saved = (product, directions[0]) if saves else (None, None)
    return (out, saved[0]), (moved, saved[1])


# --- blocks -----------------------------------------------------------------------------------------------------------


@fused_matmul_forward.schedule("cpu")
def _cpu(lhs: Any, rhs: Any, operands: Any, transpose_lhs: bool, transpose_rhs: bool) -> Mapping[str, int]:
    return plain.cpu_blocks(lhs, rhs, transpose_lhs, transpose_rhs)


@fused_matmul_forward.schedule("cpu:llvm")
def _llvm(lhs: Any, rhs: Any, operands: Any, transpose_lhs: bool, transpose_rhs: bool) -> Mapping[str, int]:
    return plain.llvm_blocks(lhs, rhs, transpose_lhs, transpose_rhs)


@fused_matmul_forward.schedule("cuda")
def _cuda(
    lhs: Any, rhs: Any, operands: Any, device: tk.Device, transpose_lhs: bool, transpose_rhs: bool
) -> Mapping[str, int]:
    return plain.cuda_blocks(lhs, rhs, device, transpose_lhs, transpose_rhs)


@fused_matmul_forward.schedule("tpu")
def _tpu(lhs: Any, rhs: Any, operands: Any, target: str, transpose_lhs: bool, transpose_rhs: bool) -> Mapping[str, int]:
    return plain.tpu_blocks(lhs, rhs, target, transpose_lhs, transpose_rhs)
