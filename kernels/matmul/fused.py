"""Products with an epilogue: a function of the user is applied to the sums before they are stored."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.authoring import check_sizes, describe, hide_frames, takes_python_numbers
from tilekern.errors import ArgumentError
from tilekern.kernels.api import is_float
from tilekern.kernels.epilogues import Epilogue, applied, check_epilogue, mapped, reads_first, tangent_along
from tilekern.kernels.matmul import kernel as plain
from tilekern.kernels.matmul.batches import broadcast, checked_split, misfit, over_batches, rows_joined, splits
from tilekern.kernels.matmul.split import split_matmul

hide_frames(__file__)


@takes_python_numbers
def fused_matmul(
    x: jax.Array,
    w: jax.Array,
    *operands: jax.Array,
    epilogue: Epilogue,
    transpose_x: bool = False,
    transpose_w: bool = False,
    split_k: int | None = None,
    target: str | None = None,
    block_m: int | None = None,
    block_n: int | None = None,
    block_k: int | None = None,
) -> jax.Array:
    """epilogue(x @ w, *operands), elementwise, without a product in memory: bias, activation, residual, scale or gate.

    The product is accumulated in float32 (float64 for float64). The epilogue gets product and operands in that dtype.
    The backward pass saves the product, in the dtype of x, only if the epilogue's derivative depends on the product:
    not for a bias or a residual.

    Args:
      x: [*B, M, K], float32, bfloat16, float16 or float64; with `transpose_x` [*B, K, M].
      w: [*B, K, N] of the dtype of x; with `transpose_w` [*B, N, K]. No transposed copy is made. Leading dims
        broadcast as in `jnp.matmul`, without copies.
      operands: arrays of floats that broadcast to [*B, M, N], such as a bias [N], a scale of rows [M, 1],
        or a residual.
      epilogue: a function of one number of the product and one of each operand, of jnp functions. It is called on
        tracers without dims, so that it cannot mix elements. Define it once: calls with another function object
        compile again.
      transpose_x: True if x is [*B, K, M].
      transpose_w: True if w is [*B, N, K].
      split_k: the number of parts of a long sum that different programs may compute, as for `matmul`: it never changes
        results beyond rounding. The epilogue of a sum that may be split is XLA's, and a product that has at most 74
        tiles of 64 × 64 in memory.
      target: lower for this target's blocks, e.g. "cpu:xla".
      block_m: rows of a tile, instead of the schedule's; no block changes the result beyond rounding.
      block_n: columns of a tile.
      block_k: terms that are summed at a time.

    Returns:
      [*B, M, N] in the dtype of x.

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
    shape = _product_shape(x, w, operands, transpose_x, transpose_w)
    check_epilogue("fused_matmul", epilogue, x.dtype, 1 + len(operands))
    split_k = checked_split("fused_matmul", split_k)
    if math.prod(shape) == 0:
        return jnp.zeros(shape, x.dtype)
    blocks = {"block_m": block_m, "block_n": block_n, "block_k": block_k}

    def of_matrices(x: jax.Array, w: jax.Array, *operands: jax.Array) -> jax.Array:
        transposes = {"transpose_x": transpose_x, "transpose_w": transpose_w}
        if splits(x, w, transpose_x, transpose_w, split_k):
            wide = str(tk.accumulator(x.dtype))
            product = split_matmul(x, w, **transposes, dtype=wide, split_k=split_k, target=target, **blocks)
            return applied(epilogue, jax.ShapeDtypeStruct(product.shape, x.dtype), product, *operands)
        keywords = {"epilogue": epilogue, "saves": False, **transposes, "target": target, **blocks}
        return fused_matmul_forward(x, w, operands, **keywords)[0]

    if math.prod(w.shape[:-2]) == 1 and not transpose_x:
        rows = rows_joined(x)
        flat = (_as_matrix(operand, shape, rows.shape[0]) for operand in operands)
        return of_matrices(rows, w.reshape(w.shape[-2:]), *flat).reshape(shape)
    padded = (operand.reshape((1,) * (2 - operand.ndim) + operand.shape) for operand in operands)
    return over_batches(of_matrices, shape[:-2], x, w, *padded)


def _product_shape(x: Any, w: Any, operands: Sequence[Any], transpose_x: bool, transpose_w: bool) -> tuple[int, ...]:
    """The shape [*B, M, N] of the product.

    Raises:
      ArgumentError: the arrays do not fit.
    """
    named = {f"operand {n}": o for n, o in enumerate(operands)}
    check_sizes("fused_matmul", {"x": x, "w": w} | named)
    fits = all(map(is_float, (x, w, *operands))) and x.dtype == w.dtype and min(x.ndim, w.ndim) >= 2
    fits = fits and x.shape[-2 if transpose_x else -1] == w.shape[-1 if transpose_w else -2]
    batch = broadcast(x.shape[:-2], w.shape[:-2]) if fits else None
    if batch is None:
        raise misfit("fused_matmul", transpose_x, transpose_w, x=x, w=w, **named)
    shape = *batch, x.shape[-1 if transpose_x else -2], w.shape[-2 if transpose_w else -1]
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
    padded = (1,) * (len(shape) - operand.ndim) + operand.shape
    if math.prod(padded[:-1]) == 1:
        return operand.reshape(1, padded[-1])
    full = jnp.broadcast_to(operand, (*shape[:-1], padded[-1]))
    return full.reshape(rows, padded[-1])


# --- the kernel -------------------------------------------------------------------------------------------------------


def _types(
    x: Any, w: Any, operands: Any, *, epilogue: Any, saves: bool, transpose_x: bool, transpose_w: bool
) -> tuple[Any, Any]:
    product = plain.matmul_type(x, w, transpose_x=transpose_x, transpose_w=transpose_w)
    return product, product if saves else None


@tk.kernel(out_type=_types)
def fused_matmul_forward(
    x: tk.Ref,
    w: tk.Ref,
    operands: tuple[tk.Ref, ...],
    out: tk.Ref,
    product: tk.Ref | None,
    *,
    epilogue: Epilogue,
    saves: bool,
    transpose_x: bool,
    transpose_w: bool,
    block_m: tk.Block = 128,
    block_n: tk.Block = 128,
    block_k: tk.Block = 64,
) -> None:
    """out[M, N] = epilogue(x @ w, *operands), and with `saves` the product[M, N]."""
    i, j = tk.grid((out.shape[0], block_m), (out.shape[1], block_n), order=tk.grouped(8))
    wide = tk.accumulator(x.dtype)

    def step(k: tk.Tile, acc: jax.Array) -> jax.Array:
        return tk.dot(x[k, i].T if transpose_x else x[i, k], w[j, k].T if transpose_w else w[k, j], acc)

    def part(operand: tk.Ref) -> jax.Array:
        """The tile (i, j) of an operand; a dim of size 1 is broadcast."""
        rows, columns = (n == size for n, size in zip(out.shape, operand.shape, strict=True))
        tile = operand[i if rows else 0, j if columns else 0].astype(wide)
        tile = tile if rows else tile[None]
        return jnp.broadcast_to(tile if columns else tile[..., None], acc.shape)

    inner = x.shape[0 if transpose_x else 1]
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
    transpose_x: bool,
    transpose_w: bool,
    **blocks: int,
) -> Any:
    """The tangent of the epilogue at the saved product, which XLA fuses, and the tangent of the product.

    If the tangent does not depend on the product, the product is not saved, and zeros take its place.
    """
    (x, w, operands), (dx, dw, doperands) = primals, tangents
    transposes = {"transpose_x": transpose_x, "transpose_w": transpose_w}
    like = plain.matmul_type(x, w, **transposes)
    moves = dx is not None or dw is not None
    directions = [plain.matmul_tangent(x, w, dx, dw, **transposes) if moves else None, *doperands]

    def tangent(product: jax.Array, operands: Sequence[jax.Array], directions: Sequence[Any]) -> jax.Array:
        return tangent_along(partial(applied, epilogue, like), [product, *operands], directions)

    needed = saves or reads_first(tangent, like, operands, directions)
    out, product = fused_matmul_forward(*primals, epilogue=epilogue, saves=needed, **transposes, **blocks)
    point = product if needed else jnp.zeros(like.shape, like.dtype)
    # Only the arguments are kept for the backward pass, not the many intermediate results of a derivative.
    moved = cast(Any, jax.checkpoint)(tangent, prevent_cse=False)(point, operands, directions)
    saved = (product, directions[0]) if saves else (None, None)
    return (out, saved[0]), (moved, saved[1])


# --- blocks -----------------------------------------------------------------------------------------------------------


@fused_matmul_forward.schedule("cpu")
def _cpu(x: Any, w: Any, operands: Any, transpose_x: bool, transpose_w: bool) -> Mapping[str, int]:
    return plain.cpu_blocks(x, w, transpose_x, transpose_w)


@fused_matmul_forward.schedule("cpu:llvm")
def _llvm(x: Any, w: Any, operands: Any, transpose_x: bool, transpose_w: bool) -> Mapping[str, int]:
    return plain.llvm_blocks(x, w, transpose_x, transpose_w)


@fused_matmul_forward.schedule("cuda")
def _cuda(x: Any, w: Any, operands: Any, device: tk.Device, transpose_x: bool, transpose_w: bool) -> Mapping[str, int]:
    return plain.cuda_blocks(x, w, device, transpose_x, transpose_w)


@fused_matmul_forward.schedule("tpu")
def _tpu(x: Any, w: Any, operands: Any, target: str, transpose_x: bool, transpose_w: bool) -> Mapping[str, int]:
    return plain.tpu_blocks(x, w, target, transpose_x, transpose_w)
