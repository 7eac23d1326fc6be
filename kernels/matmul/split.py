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


def _sum_type(lhs: Any, rhs: Any, *, transpose_lhs: bool, transpose_rhs: bool) -> tk.Sum:
    whole = plain.matmul_type(lhs, rhs, transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
    return tk.Sum(jax.ShapeDtypeStruct(whole.shape, tk.accumulator(lhs.dtype)))


@tk.kernel(out_type=_sum_type)
def matmul_parts(
    lhs: tk.Ref,
    rhs: tk.Ref,
    out: tk.Ref,
    *,
    part: int,
    transpose_lhs: bool,
    transpose_rhs: bool,
    block_m: tk.Block = 128,
    block_n: tk.Block = 128,
    block_k: tk.Block = 64,
) -> None:
    """out[M, N] = lhs[M, K] @ rhs[K, N] in the accumulator's dtype; programs add up `part` terms each."""
    inner = lhs.shape[0 if transpose_lhs else 1]
    p = tk.parallel(inner, part)
    i, j = tk.parallel(out.shape[0], block_m), tk.parallel(out.shape[1], block_n)
    block = gcd(part, block_k)

    def step(t: jax.Array, acc: jax.Array) -> jax.Array:
        k = tk.tile(inner, block, p.index * (part // block) + t)
        return tk.dot(lhs[k, i].T if transpose_lhs else lhs[i, k], rhs[j, k].T if transpose_rhs else rhs[k, j], acc)

    out.at[i, j].add(tk.fold(tk.serial(part // block), step, tk.zeros((i, j), out.dtype)))


@matmul_parts.defsharding
def _divided(lhs: Any, rhs: Any, *, transpose_lhs: bool, transpose_rhs: bool) -> str:
    """The rule of a product. Accesses imply the same rule, but only if the devices divide the number of parts."""
    return f"{'k m' if transpose_lhs else 'm k'}, {'n k' if transpose_rhs else 'k n'} -> m n"


def _type(lhs: Any, rhs: Any, *, transpose_lhs: bool, transpose_rhs: bool, dtype: str) -> jax.ShapeDtypeStruct:
    whole = plain.matmul_type(lhs, rhs, transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
    return jax.ShapeDtypeStruct(whole.shape, dtype)


@tk.op(out_type=_type)
def split_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    dtype: str,
    block_m: int | None = None,
    block_n: int | None = None,
    block_k: int | None = None,
    split_k: tk.Block = 1,
) -> jax.Array:
    """lhs[M, K] @ rhs[K, N] as `dtype`, in at most `split_k` parts of at least 128 terms."""
    keywords: dict[str, Any] = {"transpose_lhs": transpose_lhs, "transpose_rhs": transpose_rhs}
    keywords |= {"block_m": block_m, "block_n": block_n, "block_k": block_k}
    inner = lhs.shape[0 if transpose_lhs else 1]
    if split_k == 1 and dtype == lhs.dtype:
        return matmul(lhs, rhs, **keywords)
    part = tk.cdiv(inner, split_k)
    unit = 256 if part >= 256 else 128
    return matmul_parts(lhs, rhs, part=tk.cdiv(part, unit) * unit, **keywords).astype(dtype)


# --- blocks -----------------------------------------------------------------------------------------------------------


@split_matmul.schedule("cpu:llvm")
def _parts_llvm(lhs: Any, rhs: Any, transpose_lhs: bool, transpose_rhs: bool) -> dict[str, int]:
    """Only results of one tile are split: several tiles keep the few cores of a CPU busy without parts."""
    whole = plain.matmul_type(lhs, rhs, transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
    inner = lhs.shape[0 if transpose_lhs else 1]
    return {"split_k": _PARTS_ON_CPUS if max(whole.shape) <= 64 and inner >= _LONG_ON_CPUS else 1}


@split_matmul.schedule("cuda")
def _parts_cuda(lhs: Any, rhs: Any, device: tk.Device, transpose_lhs: bool, transpose_rhs: bool) -> dict[str, int]:
    """As many parts as give each multiprocessor a program, if tiles keep at most half of the multiprocessors busy."""
    blocks = _cuda(lhs, rhs, device, transpose_lhs, transpose_rhs)
    whole = plain.matmul_type(lhs, rhs, transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
    tiles = tk.cdiv(whole.shape[0], blocks["block_m"]) * tk.cdiv(whole.shape[1], blocks["block_n"])
    inner = lhs.shape[0 if transpose_lhs else 1]
    return {"split_k": max(1, min(device.cores // tiles, inner // _LEAST_TERMS))}


@matmul_parts.schedule("cpu")
def _cpu(lhs: Any, rhs: Any, transpose_lhs: bool, transpose_rhs: bool) -> dict[str, int]:
    return {**plain.cpu_blocks(lhs, rhs, transpose_lhs, transpose_rhs), "block_k": 2048}


@matmul_parts.schedule("cpu:llvm")
def _llvm(lhs: Any, rhs: Any, transpose_lhs: bool, transpose_rhs: bool) -> dict[str, int]:
    return {**plain.llvm_blocks(lhs, rhs, transpose_lhs, transpose_rhs), "block_k": 256}


@matmul_parts.schedule("cuda")
def _cuda(lhs: Any, rhs: Any, device: tk.Device, transpose_lhs: bool, transpose_rhs: bool) -> dict[str, int]:
    """The tiles of a product; more warps where registers hold a transposed operand and its addresses."""
    blocks = plain.cuda_blocks(lhs, rhs, device, transpose_lhs, transpose_rhs)
    more = takes_registers(device) and transpose_lhs and lhs.dtype.itemsize <= 2
    return {**blocks, "num_warps": 8} if more else dict(blocks)


@matmul_parts.schedule("tpu")
def _tpu(lhs: Any, rhs: Any, target: str, part: int, transpose_lhs: bool, transpose_rhs: bool) -> dict[str, int]:
    blocks = plain.tpu_blocks(lhs, rhs, target, transpose_lhs, transpose_rhs)
    return {**blocks, "block_k": gcd(part, 2048)}
