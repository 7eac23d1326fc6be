"""Grouped products with an epilogue: a function of the user is applied to the sums before they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack, cast

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.authoring import describe, hide_frames, takes_python_numbers
from tilekern.errors import ArgumentError
from tilekern.kernels.checks import as_int32, is_float
from tilekern.kernels.conventions import Launch, check_launch
from tilekern.kernels.derivatives import along
from tilekern.kernels.epilogues import Epilogue, applied, check_epilogue, mapped, reads_first
from tilekern.kernels.ragged_dot import kernel as plain
from tilekern.kernels.ragged_dot.arguments import (
    check_groups,
    check_scales,
    ends_of,
    result_dtype,
    with_scales_of_several,
)
from tilekern.kernels.ragged_dot.derivatives import spread
from tilekern.kernels.ragged_dot.products import Operands, products, widened
from tilekern.kernels.ragged_dot.scaled import scaled_cuda_blocks, scaled_tpu_blocks, whole_bytes
from tilekern.kernels.ragged_dot.scaled_derivatives import product_tangent
from tilekern.kernels.symbolic_rows import ends_within, over_rows

hide_frames(__file__)


@takes_python_numbers
def fused_ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array | Sequence[jax.Array],
    group_sizes: jax.Array,
    *operands: jax.Array,
    epilogue: Epilogue,
    transpose_rhs: bool = False,
    lhs_scale: jax.Array | None = None,
    rhs_scale: jax.Array | Sequence[jax.Array | None] | None = None,
    out_dtype: Any = None,
    target: str | None = None,
    **launch: Unpack[Launch],
) -> jax.Array:
    """epilogue(*products, *operands), elementwise, with a `ragged_dot` product of lhs and each of rhs, never in memory.

    The first layer of an expert is one call: rhs are the matrices of gate and up, and the epilogue is
    silu(gate) * up. Products are accumulated in float32 (float64 for float64), and the epilogue gets them and the
    operands in that dtype. The backward pass saves the products, in the dtype of the result, only if the epilogue's
    derivative depends on them: not for a bias or a residual.

    Args:
      lhs: [M, K] of a dtype of `ragged_dot`.
      rhs: [G, K, N] of a dtype of `ragged_dot`, or several of one shape and dtype; [G, N, K] with `transpose_rhs`.
      group_sizes: integers [G], as of `ragged_dot`.
      operands: arrays of floats. Operands of rows broadcast to [M, N], such as a scale of rows [M, 1], or an array to
        add. Operands of groups are [G, 1, N] or [G, 1, 1], such as the biases of experts.
      epilogue: a function of one number of each product and one of each operand, of jnp functions. It is called on
        tracers without dims, so that it cannot mix elements. Define it once: calls with another function object
        compile again.
      transpose_rhs: multiply by rhs[g] transposed, which is read in place.
      lhs_scale: as of `ragged_dot`.
      rhs_scale: as of `ragged_dot`; for several rhs a sequence of scales of one shape.
      out_dtype: of the result; None as of `ragged_dot`.
      target: lower for this target's blocks, e.g. "cpu:xla".
      launch: the launch options of `ragged_dot`.

    Returns:
      out[M, N]. Rows after the last group are 0, whatever the epilogue gives for zeros.

    Raises:
      tilekern.errors.ArgumentError: shapes or dtypes do not fit, or the epilogue does not return one number.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.ragged_dot import fused_ragged_dot
      >>> def gated(gate, up):
      ...     return jax.nn.relu(gate) * up
      >>> x, w = jnp.arange(4.0)[:, None], jnp.array([1.0, 10.0]).reshape(2, 1, 1)
      >>> fused_ragged_dot(x, (w, 2 * w), jnp.array([2, 1]), epilogue=gated).ravel()
      Array([  0.,   2., 800.,   0.], dtype=float32)
    """
    check_launch("fused_ragged_dot", launch)
    matrices, of_matrices = _several(rhs, rhs_scale)
    for matrix, scale in zip(matrices or (None,), of_matrices or (None,), strict=True):
        check_groups("fused_ragged_dot", lhs, matrix, group_sizes, transpose_rhs)
        check_scales("fused_ragged_dot", lhs, matrix, lhs_scale, scale, transpose_rhs)
    _check_alike(matrices, of_matrices)
    dtype = result_dtype("fused_ragged_dot", out_dtype, lhs, *matrices)
    product = plain.out_type(lhs, matrices[0], transpose_rhs=transpose_rhs, out_dtype=dtype)
    groups = matrices[0].shape[0]
    fitted = tuple(_fitted(n, x, product.shape, groups) for n, x in enumerate(operands))
    check_epilogue("fused_ragged_dot", epilogue, widened(lhs.dtype, matrices[0].dtype), len(matrices) + len(operands))
    if 0 in (*product.shape, groups):
        return jnp.zeros(product.shape, dtype)
    lhs, matrices, lhs_scale, scales = with_scales_of_several(lhs, matrices, lhs_scale, of_matrices, transpose_rhs)
    static: Any = {"transpose_rhs": transpose_rhs, "out_dtype": dtype, "target": target, **launch}

    all_ends = ends_of(as_int32(group_sizes), lhs.shape[0])

    def fused(start: Any, lhs: jax.Array, lhs_scale: jax.Array | None, *operands: jax.Array) -> jax.Array:
        inputs: Any = lhs, matrices, ends_within(all_ends, start, lhs.shape[0]), lhs_scale, scales, operands
        return fused_ragged_dot_forward(*inputs, epilogue=epilogue, saves=False, **static)[0]

    return over_rows(fused, lhs, lhs_scale, *fitted)


def _several(rhs: Any, rhs_scale: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The matrices, and a scale or None for each."""
    is_array = not isinstance(rhs, tuple | list)
    matrices: tuple[Any, ...] = (rhs,) if is_array else tuple(cast(Sequence[Any], rhs))
    several = isinstance(rhs_scale, tuple | list)
    scales: tuple[Any, ...] = tuple(cast(Sequence[Any], rhs_scale)) if several else (rhs_scale,)
    scales = (None,) * len(matrices) if rhs_scale is None else scales
    if len(scales) != len(matrices):
        raise _misfit(matrices, scales)
    return matrices, scales


def _check_alike(matrices: Sequence[Any], scales: Sequence[Any]) -> None:
    if any(_kind(x) != _kind(arrays[0]) for arrays in (matrices, scales) for x in arrays):
        raise _misfit(matrices, scales)


def _misfit(matrices: Sequence[Any], scales: Sequence[Any]) -> ArgumentError:
    return ArgumentError(
        "the matrices of fused_ragged_dot do not fit each other",
        expected="several rhs of one shape and dtype, and a rhs_scale of each, of one shape, or None",
        got=", ".join(describe(x) for x in (*matrices, *scales) if x is not None),
        fix="multiply by matrices of different shapes in calls of their own",
    )


def _kind(x: Any) -> Any:
    return getattr(x, "shape", None), getattr(x, "dtype", None)


def _fitted(number: int, operand: Any, product: tuple[int, ...], groups: int) -> jax.Array:
    """float[M or 1, N or 1] of an operand of rows, or float[G, 1, N or 1] of an operand of groups.

    Operands of three dims are of groups, and stay unchanged. Operands of rows get dims of 1 in front: [N] becomes
    [1, N], and a scalar [1, 1]. Any other shape raises an `ArgumentError` that names the operand by `number`.
    """
    if is_float(operand):
        whole = (groups, 1, product[1]) if operand.ndim == 3 else product
        padded = (1,) * (2 - operand.ndim) + operand.shape
        least = (groups, 1, 1) if operand.ndim == 3 else (1, 1)
        if len(padded) == len(whole) and all(p in pair for p, *pair in zip(padded, least, whole, strict=True)):
            return operand.reshape(padded)
    raise ArgumentError(
        f"operand {number} of fused_ragged_dot does not broadcast to the products",
        expected=f"floats of at least 16 bits whose shape broadcasts to {list(product)}, or of groups, "
        f"{[groups, 1, product[1]]} or {[groups, 1, 1]}",
        got=describe(operand),
        fix="a scale of rows has the shape [M, 1]; biases of groups [G, N] become bias[:, None]",
    )


# --- the kernel -------------------------------------------------------------------------------------------------------


def _types(
    lhs: Any, rhs: Any, *unused: Any, epilogue: Any, saves: bool, transpose_rhs: bool, out_dtype: Any
) -> tuple[Any, Any]:
    product = plain.out_type(lhs, rhs[0], transpose_rhs=transpose_rhs, out_dtype=out_dtype)
    return product, (product,) * len(rhs) if saves else ()


@tk.kernel(out_type=_types)
def fused_ragged_dot_forward(
    lhs: tk.Ref,
    rhs: tuple[tk.Ref, ...],
    ends: tk.Ref,
    lhs_scale: tk.Ref | None,
    rhs_scales: tuple[tk.Ref | None, ...],
    operands: tuple[tk.Ref, ...],
    out: tk.Ref,
    saved: tuple[tk.Ref, ...],
    *,
    epilogue: Epilogue,
    saves: bool,
    transpose_rhs: bool,
    out_dtype: Any,
    block_m: tk.Block = 128,
    block_n: tk.Block = 128,
    block_k: tk.Block = 64,
) -> None:
    """out[rows of g] = epilogue(*(lhs[rows of g] @ w[g] for w in rhs), *operands), and with `saves` the products.

    Shapes are as for `scaled_ragged_dot_forward`; operands are [M or 1, N or 1] or [G, 1, N or 1].
    """
    i = tk.parallel(lhs.shape[0], block_m)
    j = tk.parallel(out.shape[1], block_n)
    factors = Operands(lhs, rhs, lhs_scale, rhs_scales, transpose_rhs)
    inner, wide = lhs.shape[1], factors.wide

    def part(operand: tk.Ref, g: jax.Array) -> jax.Array:
        """The tile (i, j) of an operand for group g; a dim of size 1 is broadcast."""
        *_, rows, columns = operand.shape
        at: Any = (g, 0) if len(operand.shape) == 3 else (i if rows > 1 else 0,)
        tile = operand[(*at, j if columns > 1 else 0)].astype(wide)
        tile = tile if at[-1] is i else tile[None]
        return jnp.broadcast_to(tile if columns > 1 else tile[..., None], (block_m, block_n))

    def add_group(g: jax.Array, tiles: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        begin, end = ends[g - 1], ends[g]  # ends[-1] is outside of the array: a load gives 0
        sums = products(factors, i, j, g, jnp.where(begin < end, inner, 0), block_k)
        result = mapped(epilogue, *sums, *(part(operand, g) for operand in operands)).astype(wide)
        mine = ((i.indices >= begin) & (i.indices < end))[:, None]
        results = (result, *(sums if saves else ()))
        return tuple(jnp.where(mine, x, tile) for x, tile in zip(results, tiles, strict=True))

    groups = plain.groups_of_rows(i, ends)
    tiles = tk.fold(groups, add_group, tuple(tk.zeros((i, j), wide) for _ in (out, *saved)))
    for ref, tile in zip((out, *saved), tiles, strict=True):
        ref[i, j] = tile.astype(ref.dtype)


# --- derivatives ------------------------------------------------------------------------------------------------------


@fused_ragged_dot_forward.defjvp
def _jvp(primals: Any, tangents: Any, *, epilogue: Epilogue, saves: bool, **static: Any) -> Any:
    """The tangent of the epilogue at the saved products, which XLA fuses, and the tangents of the products.

    If the tangent does not depend on the products, the products are not saved, and zeros take their place.
    """
    lhs, rhs, ends, lhs_scale, rhs_scales, operands = primals
    dlhs, drhs, _, dlhs_scale, drhs_scales, doperands = tangents
    options: Any = {name: static[name] for name in ("transpose_rhs", "out_dtype")}
    like = plain.out_type(lhs, rhs[0], **options)
    dproducts = tuple(
        product_tangent((lhs, matrix, ends, lhs_scale, scale), (dlhs, dmatrix, None, dlhs_scale, dscale), **options)
        for matrix, dmatrix, scale, dscale in zip(rhs, drhs, rhs_scales, drhs_scales, strict=True)
    )
    directions = (*dproducts, *doperands)

    def whole(*values: jax.Array) -> jax.Array:
        rows = (
            spread(x.astype(tk.accumulator(x.dtype)), ends, rows=lhs.shape[0]) if x.ndim == 3 else x for x in values
        )
        inside = jnp.arange(lhs.shape[0])[:, None] < ends[-1]
        return jnp.where(inside, applied(epilogue, like, *rows), 0)

    def tangent(products: Sequence[jax.Array], operands: Sequence[jax.Array], directions: Any) -> jax.Array:
        return along(whole, [*products, *operands], directions)

    likes = (like,) * len(rhs)
    needed = saves or reads_first(tangent, likes, operands, directions)
    out, saved = fused_ragged_dot_forward(*primals, epilogue=epilogue, saves=needed, **static)
    points = saved if needed else tuple(jnp.zeros(x.shape, x.dtype) for x in likes)
    # Only the arguments are kept for the backward pass, not the many intermediate results of a derivative.
    moved = cast(Any, jax.checkpoint)(tangent, prevent_cse=False)(points, operands, directions)
    return (out, saved if saves else ()), (moved, dproducts if saves else ())


# --- blocks -----------------------------------------------------------------------------------------------------------


@fused_ragged_dot_forward.schedule("cpu")
def _cpu(lhs: Any, rhs: Any, *unused: Any, transpose_rhs: bool) -> dict[str, int]:
    return whole_bytes(plain.cpu_blocks(lhs, rhs[0], transpose_rhs), lhs, rhs[0])


@fused_ragged_dot_forward.schedule("cpu:llvm")
def _llvm(lhs: Any, rhs: Any, *unused: Any, transpose_rhs: bool) -> dict[str, int]:
    return whole_bytes(plain.llvm_blocks(lhs, rhs[0], transpose_rhs), lhs, rhs[0])


@fused_ragged_dot_forward.schedule("cuda")
def _cuda(lhs: Any, rhs: Any, *unused: Any, device: tk.Device) -> dict[str, int]:
    return scaled_cuda_blocks(lhs, rhs[0], device, products=len(rhs))


@fused_ragged_dot_forward.schedule("tpu")
def _tpu(lhs: Any, rhs: Any, *inputs: Any, transpose_rhs: bool) -> dict[str, int]:
    _, lhs_scale, rhs_scales, operands = inputs
    extra: Any = {"products": len(rhs), "operands": len(operands)}
    return scaled_tpu_blocks(lhs, rhs[0], (lhs_scale, *rhs_scales), transpose_rhs, **extra)
