"""Products with an epilogue: a function of the user is applied to the sums before they are stored."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.authoring import check_sizes, describe, hide_frames
from tilekern.errors import ArgumentError
from tilekern.kernels.api import is_float
from tilekern.kernels.epilogues import Epilogue, applied, check_epilogue, mapped, reads_first, tangent_along
from tilekern.kernels.matmul import kernel as plain

hide_frames(__file__)


def fused_matmul(
    x: jax.Array,
    w: jax.Array,
    *operands: jax.Array,
    epilogue: Epilogue,
    transpose_x: bool = False,
    transpose_w: bool = False,
    target: str | None = None,
    block_m: int | None = None,
    block_n: int | None = None,
    block_k: int | None = None,
) -> jax.Array:
    """epilogue(x @ w, *operands), elementwise, without a product in memory: bias, activation, residual, scale or gate.

    The product is accumulated in float32 (float64 for float64). The epilogue gets it and the operands in that dtype.
    The backward pass saves the product, in the dtype of x, only if the epilogue's derivative depends on it: not for a
    bias or a residual.

    Args:
      x: [*B, M, K], float32, bfloat16, float16 or float64; with `transpose_x` [K, M], without leading dims.
      w: [K, N] of the dtype of x; with `transpose_w` [N, K]. No transposed copy is made.
      operands: arrays of floats that broadcast to [*B, M, N], such as a bias [N], a scale of rows [M, 1],
        or a residual.
      epilogue: a function of one number of the product and one of each operand, of jnp functions. It is called on
        tracers without dims, so that it cannot mix elements. Define it once: calls with another function object
        compile again.
      transpose_x: x is given as its transpose.
      transpose_w: w is given as its transpose.
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
    _check_matrices(x, w, operands, transpose_x, transpose_w)
    rows = x if transpose_x else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    product = plain.matmul_type(rows, w, transpose_x=transpose_x, transpose_w=transpose_w)
    shape = (*(product.shape[:1] if transpose_x else x.shape[:-1]), product.shape[1])
    flat = tuple(_as_matrix(n, operand, shape, product.shape) for n, operand in enumerate(operands))
    check_epilogue("fused_matmul", epilogue, x.dtype, 1 + len(flat))
    if math.prod(shape) == 0:
        return jnp.zeros(shape, x.dtype)
    out, _ = fused_matmul_forward(
        rows,
        w,
        flat,
        epilogue=epilogue,
        saves=False,
        transpose_x=transpose_x,
        transpose_w=transpose_w,
        target=target,
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
    )
    return out.reshape(shape)


def _check_matrices(x: Any, w: Any, operands: Sequence[Any], transpose_x: bool, transpose_w: bool) -> None:
    check_sizes("fused_matmul", {"x": x, "w": w} | {f"operand {n}": o for n, o in enumerate(operands)})
    fits = all(is_float(array) for array in (x, w, *operands)) and x.dtype == w.dtype
    fits = fits and w.ndim == 2 and (x.ndim == 2 if transpose_x else x.ndim >= 2)
    if fits and x.shape[0 if transpose_x else -1] == w.shape[1 if transpose_w else 0]:
        return
    left, right = ("[K, M]" if transpose_x else "[*B, M, K]"), ("[N, K]" if transpose_w else "[K, N]")
    raise ArgumentError(
        "the arrays of fused_matmul do not fit",
        expected=f"x{left} and w{right} of one dtype, and operands, all of floats of at least 16 bits",
        got=", ".join([f"x = {describe(x)}", f"w = {describe(w)}", *(describe(o) for o in operands)]),
        fix="cast with .astype; jax.vmap takes leading dims of w",
    )


def _as_matrix(number: int, operand: Any, shape: tuple[int, ...], product: tuple[int, ...]) -> jax.Array:
    """An operand as [M or 1, N or 1], with the leading dims in M."""
    padded = (1,) * (len(shape) - operand.ndim) + operand.shape
    if len(padded) != len(shape) or any(p not in (1, s) for p, s in zip(padded, shape, strict=True)):
        raise ArgumentError(
            f"operand {number} of fused_matmul does not broadcast to the product",
            expected=f"a shape that broadcasts to {list(shape)}",
            got=describe(operand),
            fix="a bias of columns has the shape [N], a scale of rows [M, 1]",
        )
    if math.prod(padded[:-1]) == 1:
        return operand.reshape(1, padded[-1])
    full = jnp.broadcast_to(operand, (*shape[:-1], padded[-1]))
    return full.reshape(product[0], padded[-1])


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
    """out[M, N] = epilogue(x @ w, *operands), and the product itself if the call `saves` it."""
    i, j = tk.grid((out.shape[0], block_m), (out.shape[1], block_n), order=tk.grouped(8))
    wide = tk.accumulator(x.dtype)

    def step(k: tk.Tile, acc: jax.Array) -> jax.Array:
        return tk.dot(x[k, i].T if transpose_x else x[i, k], w[j, k].T if transpose_w else w[k, j], acc)

    def part(operand: tk.Ref) -> jax.Array:
        """The numbers of an operand, of which a row or a column may stand for the others."""
        rows, columns = (size == given for size, given in zip(out.shape, operand.shape, strict=True))
        found = operand[i if rows else 0, j if columns else 0].astype(wide)
        found = found if rows else found[None]
        return jnp.broadcast_to(found if columns else found[..., None], acc.shape)

    inner = x.shape[0 if transpose_x else 1]
    acc = tk.fold(tk.serial(inner, block_k), step, tk.zeros((i, j), wide))
    if product is not None:
        product[i, j] = acc.astype(product.dtype)
    found = mapped(epilogue, acc, *(part(operand) for operand in operands))
    out[i, j] = found.astype(out.dtype)


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

    Where the tangent does not depend on the product, zeros stand for it, and nothing is saved.
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
    found = cast(Any, jax.checkpoint)(tangent, prevent_cse=False)(point, operands, directions)
    saved = (product, directions[0]) if saves else (None, None)
    return (out, saved[0]), (found, saved[1])


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
