"""Products of a matrix with its own transpose: half of the tiles are computed, the rest are transposed copies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.authoring import describe, hide_frames, takes_python_numbers
from tilekern.errors import ArgumentError
from tilekern.kernels.blocks import copies_well, depth, even, stages, tiled
from tilekern.kernels.checks import as_real, is_float
from tilekern.kernels.conventions import Launch, check_launch
from tilekern.kernels.matmul.products import product

hide_frames(__file__)


@takes_python_numbers
def symmetric_matmul(
    x: jax.Array,
    added: jax.Array | None = None,
    *,
    scale: float = 1.0,
    scale_added: float = 1.0,
    target: str | None = None,
    **launch: Unpack[Launch],
) -> jax.Array:
    """scale x xᵀ + scale_added added, at half the price of a product.

    Only the tiles on and below the diagonal are computed. The elements above the diagonal are copies, so the result is
    exactly symmetric. The sum of both terms is in float32 (float64 for float64). For a symmetric x the result is
    scale x² + scale_added added. On TPUs a result of more than 40 MiB, half of the vector memory, takes all tiles.

    Args:
      x: [*B, M, K], float32, bfloat16, float16 or float64.
      added: [*B, M, M] of the same dtype, or None. It must be symmetric, because only its lower half may be read.
      scale: factor of the product, a number.
      scale_added: factor of `added`.
      target: lower for this target's blocks, e.g. "cpu:xla".
      launch: the launch options of `matmul`, without `block_n`: tiles have `block_m` rows and columns.

    Returns:
      [*B, M, M] in the dtype of x. It has derivatives of any order, along all elements of x and `added`.

    Raises:
      tilekern.errors.ArgumentError: shapes, dtypes or numbers do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.matmul import symmetric_matmul
      >>> symmetric_matmul(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.eye(2), scale_added=10.0)
      Array([[15., 11.],
             [11., 35.]], dtype=float32)
    """
    check_launch("symmetric_matmul", launch, without=("block_n",))
    arrays = {"x": x} if added is None else {"x": x, "added": added}
    fits = is_float(x) and x.ndim >= 2
    fits = fits and (added is None or (added.dtype == x.dtype and added.shape == (*x.shape[:-1], x.shape[-2])))
    if not fits:
        raise ArgumentError(
            "the arrays of symmetric_matmul do not fit",
            expected="x[*B, M, K] and added[*B, M, M] of one float dtype of at least 16 bits",
            got=", ".join(f"{name} = {describe(a)}" for name, a in arrays.items()),
            fix="cast with .astype; for a sum over rows give x.mT",
        )
    for name, value in (("scale", scale), ("scale_added", scale_added)):
        if as_real(value) is None:
            raise ArgumentError(
                f"the {name} of symmetric_matmul is no number",
                expected="a real number that is known when the call is traced",
                got=f"{name} = {describe(value)}",
                fix="multiply x or the result by an array instead",
            )

    def of_matrices(x: jax.Array, added: jax.Array | None) -> jax.Array:
        return symmetric_matmul_forward(
            x,
            added,
            scale=float(scale),
            scale_added=float(scale_added),
            target=target,
            **launch,
        )

    for _ in range(x.ndim - 2):
        of_matrices = jax.vmap(of_matrices)
    return of_matrices(x, added)


def _out_type(x: Any, added: Any, **scales: float) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((x.shape[0], x.shape[0]), x.dtype)


@tk.kernel(out_type=_out_type)
def symmetric_matmul_forward(
    x: tk.Ref,
    added: tk.Ref | None,
    out: tk.Ref,
    *,
    scale: float,
    scale_added: float,
    block_m: tk.Block = 128,
    block_k: tk.Block = 64,
    computed: tk.Choice[Literal["half", "all"]] = "half",
) -> None:
    """x[M, K], added[M, M] or None -> out[M, M]. One half of the tiles is computed, or all.

    With n tiles along a side, n rounded up to an even number, the lower half of n (n + 1) / 2 tiles is folded to a
    rectangle of n / 2 rows and n + 1 columns: row r has the tiles of row r, then the tiles of row n - 1 - r.
    """
    rows, inner = x.shape
    wide = tk.accumulator(x.dtype)
    if computed == "all":
        i, j = tk.grid((rows, block_m), (rows, block_m), order=tk.grouped(8))
        row = column = None
    else:
        count = tk.cdiv(rows, block_m)
        count = count + count % 2
        r, c = tk.parallel(count // 2), tk.parallel(count + 1)
        row, column = jnp.where(c <= r, r, count - 1 - r), jnp.where(c <= r, c, c - r - 1)
        i, j = tk.tile(rows, block_m, row), tk.tile(rows, block_m, column)

    def step(k: tk.Tile, acc: jax.Array) -> jax.Array:
        return tk.dot(x[i, k], x[j, k].T, acc)

    # A tile past the last row, where n was odd, has no terms.
    needed = tk.serial(inner, block_k, stop=jnp.where(i.start < rows, inner, 0), whole_tiles=True)
    tile = scale * tk.fold(needed, step, tk.zeros((i, j), wide))
    if added is not None:
        tile = tile + scale_added * added[i, j].astype(wide)
    if row is None:
        out[i, j] = tile.astype(out.dtype)
        return
    above = (row == column) & (i.indices[:, None] < j.indices[None, :])
    out[i, j] = jnp.where(above, tile.T, tile).astype(out.dtype)

    @tk.when(row != column)
    def _mirror() -> None:
        out[j, i] = tile.T.astype(out.dtype)


@symmetric_matmul_forward.defjvp
def _jvp(primals: Any, tangents: Any, *, scale: float, scale_added: float, **blocks: int | str) -> Any:
    """The tangent scale (dx xᵀ + x dxᵀ) + scale_added dadded: a product, its transpose, and the tangent of `added`."""
    (x, _), (dx, dadded) = primals, tangents
    terms: list[jax.Array] = []
    if dx is not None:
        half = scale * product(dx, x, transpose_rhs=True)
        terms.append(half + half.T)
    if dadded is not None:
        terms.append(scale_added * dadded)
    out = symmetric_matmul_forward(*primals, scale=scale, scale_added=scale_added, **blocks)
    return out, sum(terms[1:], terms[0]).astype(x.dtype)


# --- blocks -----------------------------------------------------------------------------------------------------------


@symmetric_matmul_forward.schedule("cpu")
def _cpu(x: Any, added: Any) -> dict[str, int]:
    return {"block_m": even(x.shape[0], 512), "block_k": even(x.shape[1], 2048)}


@symmetric_matmul_forward.schedule("cpu:llvm")
def _llvm(x: Any, added: Any) -> dict[str, int]:
    """The blocks of a product, for half as many tiles."""
    side = next((n for n in (512, 256, 128) if tk.cdiv(x.shape[0], n) ** 2 >= 32), 64)
    return {"block_m": even(x.shape[0], side), "block_k": even(x.shape[1], 256)}


@symmetric_matmul_forward.schedule("cuda")
def _cuda(x: Any, added: Any, device: tk.Device) -> dict[str, int]:
    """128 rows for tensor cores, if that gives work to all multiprocessors. Without them operands are in registers."""
    (rows, inner), itemsize = x.shape, x.dtype.itemsize
    if itemsize > 2 or not copies_well(inner, itemsize):
        block_k = 16 if itemsize > 2 and device.matrix_unit == "tcgen05" else 32  # deeper float32 tiles spill there
        return {"block_m": 64 if itemsize <= 4 else 32, "block_k": block_k, "num_warps": 8, "num_stages": 3}
    large = tk.cdiv(rows, 128) ** 2 // 2 >= device.cores
    block_m, block_k = 128 if large else 64, depth(inner, itemsize)
    return {
        "block_m": block_m,
        "block_k": block_k,
        "num_warps": 8 if large else 4,
        "num_stages": stages(2 * block_m * block_k * itemsize, 4, device),
    }


@symmetric_matmul_forward.schedule("tpu")
def _tpu(x: Any, added: Any) -> Mapping[str, int | str]:
    """512 rows: by the static estimate of 4096² bf16 on v5e 65 % of the time of the product.

    The whole result is in vector memory, because tiles are stored twice, at computed positions.
    """
    (rows, inner), itemsize = x.shape, x.dtype.itemsize
    block_m = tiled(rows, 512 if itemsize <= 2 else 256, 128)
    blocks = {"block_m": block_m, "block_k": tiled(inner, 2048 if itemsize <= 2 else 1024, 128)}
    return blocks if rows * rows * itemsize <= 40 << 20 else blocks | {"computed": "all"}
