"""Products whose sums are split over programs, for few rows and columns: a `tk.Sum` adds parts in order."""

from __future__ import annotations

from math import gcd
from typing import Any

import jax

import tilekern as tk
from tilekern.kernels.blocks import takes_registers
from tilekern.kernels.matmul import kernel as plain
from tilekern.kernels.matmul.kernel import matmul

# Terms of a part on a GPU, at least: then its loads take longer than the sum over the parts.
_LEAST_TERMS = 1024
# On CPUs: parts of a sum, fixed for the same bits with any number of cores, and the fewest terms that are split.
_PARTS_ON_CPUS, _LONG_ON_CPUS = 16, 1 << 16


def _sum_type(x: Any, w: Any, *, transpose_x: bool, transpose_w: bool) -> tk.Sum:
    whole = plain.matmul_type(x, w, transpose_x=transpose_x, transpose_w=transpose_w)
    return tk.Sum(jax.ShapeDtypeStruct(whole.shape, tk.accumulator(x.dtype)))


@tk.kernel(out_type=_sum_type)
def matmul_parts(
    x: tk.Ref,
    w: tk.Ref,
    out: tk.Ref,
    *,
    part: int,
    transpose_x: bool,
    transpose_w: bool,
    block_m: tk.Block = 128,
    block_n: tk.Block = 128,
    block_k: tk.Block = 64,
) -> None:
    """out[M, N] = x[M, K] @ w[K, N] in the accumulator's dtype; programs add up `part` terms each."""
    inner = x.shape[0 if transpose_x else 1]
    p = tk.parallel(inner, part)
    i, j = tk.parallel(out.shape[0], block_m), tk.parallel(out.shape[1], block_n)
    block = gcd(part, block_k)

    def step(t: jax.Array, acc: jax.Array) -> jax.Array:
        k = tk.tile(inner, block, p.index * (part // block) + t)
        return tk.dot(x[k, i].T if transpose_x else x[i, k], w[j, k].T if transpose_w else w[k, j], acc)

    out.at[i, j].add(tk.fold(tk.serial(part // block), step, tk.zeros((i, j), out.dtype)))


@matmul_parts.defsharding
def _divided(x: Any, w: Any, *, transpose_x: bool, transpose_w: bool) -> str:
    """The rule of a product. Accesses imply the same rule, but only if the devices divide the number of parts."""
    return f"{'k m' if transpose_x else 'm k'}, {'n k' if transpose_w else 'k n'} -> m n"


def _type(x: Any, w: Any, *, transpose_x: bool, transpose_w: bool, dtype: str) -> jax.ShapeDtypeStruct:
    whole = plain.matmul_type(x, w, transpose_x=transpose_x, transpose_w=transpose_w)
    return jax.ShapeDtypeStruct(whole.shape, dtype)


@tk.op(out_type=_type)
def split_matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    transpose_x: bool = False,
    transpose_w: bool = False,
    dtype: str,
    block_m: int | None = None,
    block_n: int | None = None,
    block_k: int | None = None,
    split_k: tk.Block = 1,
) -> jax.Array:
    """x[M, K] @ w[K, N] as `dtype`, in at most `split_k` parts of at least 128 terms."""
    keywords: dict[str, Any] = {"transpose_x": transpose_x, "transpose_w": transpose_w}
    keywords |= {"block_m": block_m, "block_n": block_n, "block_k": block_k}
    inner = x.shape[0 if transpose_x else 1]
    if split_k == 1 and dtype == x.dtype:
        return matmul(x, w, split_k=1, **keywords)
    part = tk.cdiv(inner, split_k)
    unit = 256 if part >= 256 else 128
    return matmul_parts(x, w, part=tk.cdiv(part, unit) * unit, **keywords).astype(dtype)


matmul.by_parts = split_matmul


@split_matmul.defjvp
def _jvp(primals: Any, tangents: Any, *, transpose_x: bool, transpose_w: bool, dtype: str, **blocks: Any) -> Any:
    transposes = {"transpose_x": transpose_x, "transpose_w": transpose_w}
    moved = plain.matmul_tangent(*primals, *tangents, **transposes)
    return split_matmul(*primals, **transposes, dtype=dtype, **blocks), moved.astype(dtype)


# --- blocks -----------------------------------------------------------------------------------------------------------


@split_matmul.schedule("cpu:llvm")
def _parts_llvm(x: Any, w: Any, transpose_x: bool, transpose_w: bool) -> dict[str, int]:
    """Only results of one tile are split: several tiles keep the few cores of a CPU busy without parts."""
    whole = plain.matmul_type(x, w, transpose_x=transpose_x, transpose_w=transpose_w)
    inner = x.shape[0 if transpose_x else 1]
    return {"split_k": _PARTS_ON_CPUS if max(whole.shape) <= 64 and inner >= _LONG_ON_CPUS else 1}


@split_matmul.schedule("cuda")
def _parts_cuda(x: Any, w: Any, device: tk.Device, transpose_x: bool, transpose_w: bool) -> dict[str, int]:
    """As many parts as give each multiprocessor a program, if tiles keep at most half of the multiprocessors busy."""
    blocks = _cuda(x, w, device, transpose_x, transpose_w)
    whole = plain.matmul_type(x, w, transpose_x=transpose_x, transpose_w=transpose_w)
    tiles = tk.cdiv(whole.shape[0], blocks["block_m"]) * tk.cdiv(whole.shape[1], blocks["block_n"])
    inner = x.shape[0 if transpose_x else 1]
    return {"split_k": max(1, min(device.cores // tiles, inner // _LEAST_TERMS))}


@matmul_parts.schedule("cpu")
def _cpu(x: Any, w: Any, transpose_x: bool, transpose_w: bool) -> dict[str, int]:
    return {**plain.cpu_blocks(x, w, transpose_x, transpose_w), "block_k": 2048}


@matmul_parts.schedule("cpu:llvm")
def _llvm(x: Any, w: Any, transpose_x: bool, transpose_w: bool) -> dict[str, int]:
    return {**plain.llvm_blocks(x, w, transpose_x, transpose_w), "block_k": 256}


@matmul_parts.schedule("cuda")
def _cuda(x: Any, w: Any, device: tk.Device, transpose_x: bool, transpose_w: bool) -> dict[str, int]:
    """The tiles of a product; more warps where registers hold a transposed operand and its addresses."""
    blocks = plain.cuda_blocks(x, w, device, transpose_x, transpose_w)
    more = takes_registers(device) and transpose_x and x.dtype.itemsize <= 2
    return {**blocks, "num_warps": 8} if more else dict(blocks)


@matmul_parts.schedule("tpu")
def _tpu(x: Any, w: Any, target: str, part: int, transpose_x: bool, transpose_w: bool) -> dict[str, int]:
    blocks = plain.tpu_blocks(x, w, target, transpose_x, transpose_w)
    return {**blocks, "block_k": gcd(part, 2048)}
