"""Kernels for the Gluon emitter, small enough to simulate; and whether a program computes what its Func means."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.ir.funcs import assert_near
from tilekern.ir.core import Array, Func
from tilekern.ir.interpret import interpret
from tilekern.kernels.flash_attention.arguments import Config, Extras, Residuals
from tilekern.kernels.flash_attention.backward import flash_attention_backward_key, flash_attention_backward_query
from tilekern.kernels.flash_attention.kernel import flash_attention_forward
from tilekern.kernels.matmul.fused import fused_matmul_forward
from tilekern.kernels.matmul.kernel import matmul
from tilekern.kernels.ragged_dot.kernel import ragged_dot_forward
from tilekern.kernels.ragged_dot.scaled import scaled_ragged_dot_forward
from tilekern.lower.triton.chip import CHIPS
from tilekern.lower.triton.compile.toolchain import CLUSTERS, has_clusters
from tilekern.lower.triton.gluon.build import build_gluon
from tilekern.lower.triton.gluon.simulator.run import simulate
from tilekern.lower.triton.program import Program

needs_clusters = pytest.mark.skipif(
    not has_clusters(), reason="needs multicast in Gluon: triton {}.{}".format(*CLUSTERS)
)

SM_90 = CHIPS["cuda:sm_90"]


def like(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """The type of an array."""
    return jax.ShapeDtypeStruct(shape, dtype)


@cache
def product(
    rows: int, inner: int, columns: int, dtype: str = "bfloat16", tall: bool = False, **transposes: bool
) -> Func:
    """A matrix product in tiles of 64 × 64 × 64; `tall` ones, here and below, have 128 rows, as clusters need."""
    left = (inner, rows) if transposes.get("transpose_lhs") else (rows, inner)
    right = (columns, inner) if transposes.get("transpose_rhs") else (inner, columns)
    blocks = {"block_m": 128 if tall else 64, "block_n": 64, "block_k": 64}
    return matmul.trace(like(*left, dtype=dtype), like(*right, dtype=dtype), **transposes, **blocks).ir


def gelu(sum: Any, operand: Any) -> Any:
    """An epilogue."""
    return jax.nn.gelu(sum + operand)


@cache
def fused(rows: int, inner: int, columns: int, *operand: int, tall: bool = False) -> Func:
    """A product with an epilogue of one operand."""
    return fused_matmul_forward.trace(
        *(like(rows, inner), like(inner, columns), (like(*operand),)),
        epilogue=gelu,
        saves=False,
        transpose_lhs=False,
        transpose_rhs=False,
        block_m=128 if tall else 64,
        block_n=64,
        block_k=64,
    ).ir


def extras_of(what: str, queries: int, keys: int) -> Extras:
    """The arrays of a feature of attention, for a batch of 2; for "key segments" in a kernel that owns keys."""
    vector, ids = partial(like, dtype=jnp.int32), [like(2, n, dtype=jnp.int32) for n in (queries, keys)]
    match what:
        case "lengths":
            return Extras(q_lengths=vector(2), kv_lengths=vector(2))
        case "segments" | "key segments":
            owned = ids[what == "key segments"]
            return Extras(segments=(ids[0], ids[1]), ranges=(owned, owned))
        case "sinks":
            return Extras(sinks=like(4, dtype=jnp.float32))
        case _:
            return Extras()


@cache
def attention(
    length: int,
    heads: int = 1,
    groups: int = 1,
    width: int = 64,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    dtype: str = "bfloat16",
    batch: int = 1,
    block_k: int = 64,
    softcap: float | None = None,
    extras: str = "",
    tall: bool = False,
) -> Func:
    """Attention with logsumexp, 64 queries for each program."""
    query, key = like(batch, length, heads, width, dtype=dtype), like(batch, length, groups, width, dtype=dtype)
    return flash_attention_forward.trace(
        *(query, key, key, extras_of(extras, length, length)),
        config=Config(0.125, causal=causal, window=window, softcap=softcap),
        return_logsumexp=True,
        block_q=128 if tall else 64,
        block_k=block_k,
    ).ir


@cache
def gradient(
    of: str,
    length: int,
    heads: int = 1,
    groups: int = 1,
    causal: bool = False,
    batch: int = 1,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float | None = None,
    extras: str = "",
    tall: bool = False,
) -> Func:
    """The gradient of attention by "query", or by "key" and value."""
    query, key = like(batch, length, heads, 64), like(batch, length, groups, 64)
    rows = like(batch, length, heads, dtype=jnp.float32)
    kernel = {"query": flash_attention_backward_query, "key": flash_attention_backward_key}[of]
    return kernel.trace(
        *(query, key, key, extras_of(extras, length, length), Residuals(rows, rows), query, rows),
        config=Config(0.125, causal=causal, window=window, softcap=softcap),
        block_q=128 if tall and of == "query" else 64,
        block_k=128 if tall and of == "key" else 64,
    ).ir


@tk.kernel(out_type=lambda x, w: like(x.shape[0], w.shape[1], dtype=x.dtype))
def backwards(x, w, out):
    """A product whose loop runs from its end."""
    i, j = tk.parallel(x.shape[0], 64), tk.parallel(w.shape[1], 64)
    axis = tk.serial(x.shape[1], 64, reverse=True)
    acc = tk.fold(axis, lambda k, acc: tk.dot(x[i, k], w[k, j], acc), tk.zeros((i, j)))
    out[i, j] = acc.astype(out.dtype)


@tk.kernel(out_type=lambda x, w, count: like(x.shape[0], w.shape[1]))
def limited(x, w, count, out):
    """A product whose right side counts up to a number of its rows, though all of them are visited."""
    i, j = tk.parallel(x.shape[0], 64), tk.parallel(w.shape[1], 64)

    def step(k, acc):
        return tk.dot(x[i, k], w.load((k, j), mask=(k.indices < count[0])[:, None]), acc)

    acc = tk.fold(tk.serial(x.shape[1], 64), step, tk.zeros((i, j)))
    out[i, j] = acc.astype(out.dtype)


@tk.kernel(out_type=lambda x, w: like(x.shape[0], w.shape[1]))
def lower_backwards(x, w, out):
    """A product of the lower triangle of x, whose loop runs from the diagonal back."""
    i, j = tk.parallel(x.shape[0], 64), tk.parallel(w.shape[1], 64)
    axis = tk.serial(w.shape[0], 64, stop=(i.index + 1) * i.size, reverse=True, whole_tiles=True)

    def step(k, acc):
        return tk.dot(tk.dot(x[i, :], w[:, k]).astype(x.dtype), w[k, j], acc)

    out[i, j] = tk.fold(axis, step, tk.zeros((i, j))).astype(out.dtype)


@tk.kernel(out_type=lambda x, y, w, count: like(x.shape[0], w.shape[1]))
def lower_limited(x, y, w, count, out):
    """Two products in a row, of the keys y up to a program's rows; w counts up to a number of its rows."""
    i, j = tk.parallel(x.shape[0], 64), tk.parallel(w.shape[1], 64)
    axis, query = tk.serial(y.shape[0], 64, stop=(i.index + 1) * i.size, whole_tiles=True), x[i, :]

    def step(k, acc):
        counted = (k.indices < count[0])[:, None]
        weights = jnp.tanh(tk.dot(query, y.load((k, slice(None)), mask=counted).T))
        return tk.dot(weights.astype(x.dtype), w.load((k, j), mask=counted), acc)

    out[i, j] = tk.fold(axis, step, tk.zeros((i, j))).astype(out.dtype)


@cache
def grouped_product(rows: int, inner: int, columns: int, groups: int, block_n: int = 64) -> Func:
    """A grouped product in tiles of 64 rows: each of them visits groups of its own."""
    return ragged_dot_forward.trace(
        *(like(rows, inner), like(groups, inner, columns), like(groups, dtype=jnp.int32)),
        block_m=64,
        block_n=block_n,
        block_k=64,
    ).ir


@cache
def scaled_product(
    dtypes: tuple[str, str], blocks: tuple[int, int] = (1, 1), transposed: bool = False, columns: int = 64
) -> Func:
    """A grouped product of 8-bit numbers with scales, of rows if both sides have 8 bits, by blocks of both dims."""
    of_rows = like(136, blocks[0], dtype=jnp.float32) if dtypes[0] != "bfloat16" else None
    return scaled_ragged_dot_forward.trace(
        like(136, 256, dtype=dtypes[0]),
        like(3, 256, 256, dtype=dtypes[1]),
        like(3, dtype=jnp.int32),
        of_rows,
        like(3, blocks[0], 256 if blocks == (1, 1) else blocks[1], dtype=jnp.float32),
        transpose_rhs=transposed,
        block_m=64,
        block_n=columns,
        block_k=64,
    ).ir


def program(func: Func, **hints: int) -> Program:
    """The program of a Func."""
    return build_gluon(func, SM_90, hints)


def inputs(func: Func) -> list[Array]:
    """Numbers for its inputs: rows behind lengths are NaN; segments and ends are sorted, ranges any."""
    random = np.random.default_rng(7)
    made = {p.name: random.standard_normal(p.ref.shape).astype(p.ref.dtype) for p in func.inputs}
    for name, array in made.items():
        if name == "extras_ranges_1_":
            array[...] = random.integers(0, array.shape[1] + 1, array.shape)
        elif name.startswith("extras_segments"):
            array[...] = np.sort(random.integers(0, 4, array.shape))
        elif name == "ends":
            array[...] = np.sort(random.integers(0, max(x.shape[0] for x in made.values()) + 1, array.shape))
        elif name == "count":
            array[...] = 40
            made["w"][40:] = np.nan
        elif name.endswith("_lengths"):
            of_queries = name == "extras_q_lengths"
            rows = [made[x] for x in (("query", "cotangent") if of_queries else ("key", "value")) if x in made]
            array[...] = (75, 130) if of_queries else (rows[0].shape[1] - 30, 1)
            for row in rows:
                row[np.arange(row.shape[1]) >= array[:, None]] = np.nan
    return list(made.values())


@cache
def expected(func: Func) -> Sequence[Array]:
    """The results of the Func for `inputs`, by the interpreter of the IR."""
    return interpret(func, *inputs(func))


def assert_computes(made: Program, func: Func, seeds: Sequence[int] = (0,), blocks: int = 2) -> None:
    """Assert that a program computes the results of a Func, whatever goes on first; up to the order of sums."""
    for seed in seeds:
        for got, wanted in zip(simulate(made, inputs(func), seed=seed, blocks=blocks), expected(func), strict=True):
            assert_near(got, wanted.astype(np.float64), float(np.abs(wanted.astype(np.float64)).max()) / 8)
