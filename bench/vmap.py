"""Kernels under `jax.vmap` on the portable backend, compared with kernels whose batch axis is written by hand."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from bench.result import Result
from bench.timing import medians
from tilekern.kernels.matmul import matmul

RATIO_LIMIT = 1.05
PORTABLE = {"target": "cpu:xla"}
BATCH, ROWS, COLUMNS, SIZE = 16, 512, 1024, 512


def _softmax(row: jax.Array) -> jax.Array:
    p = jnp.exp(row - row.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


def _like(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@tk.kernel(out_type=_like)
def softmax(x: tk.Ref, out: tk.Ref, *, block: tk.Block = 64) -> None:
    """Softmax of each row of x[M, N]."""
    i = tk.parallel(x.shape[0], block)
    out[i] = _softmax(x[i])


@tk.kernel(out_type=_like)
def batched_softmax(x: tk.Ref, out: tk.Ref, *, block: tk.Block = 64) -> None:
    """Softmax of each row of x[B, M, N]."""
    b = tk.parallel(x.shape[0])
    i = tk.parallel(x.shape[1], block)
    out[b, i] = _softmax(x[b, i])


@tk.kernel(out_type=lambda x, w: jax.ShapeDtypeStruct((*x.shape[:2], w.shape[1]), x.dtype))
def batched_matmul(x: tk.Ref, w: tk.Ref, out: tk.Ref, *, block: tk.Block = 512) -> None:
    """out[B, M, N] = x[B, M, K] @ w[K, N]."""
    b = tk.parallel(x.shape[0])
    i = tk.parallel(x.shape[1], block)
    j = tk.parallel(w.shape[1], block)

    def step(k: tk.Tile, acc: jax.Array) -> jax.Array:
        return tk.dot(x[b, i, k], w[k, j], acc)

    out[b, i, j] = tk.fold(tk.serial(x.shape[2], block), step, tk.zeros((i, j)))


def measure() -> Iterator[Result]:
    """All results of this file."""
    keys = jax.random.split(jax.random.key(0), 3)
    rows = jax.random.normal(keys[0], (BATCH, ROWS, COLUMNS))
    ours, theirs = jax.jit(jax.vmap(partial(softmax, **PORTABLE))), jax.jit(partial(batched_softmax, **PORTABLE))
    yield _compare(f"vmap of softmax {BATCH} × {ROWS} × {COLUMNS}", lambda: ours(rows), lambda: theirs(rows))

    x, w = jax.random.normal(keys[1], (BATCH, SIZE, SIZE)), jax.random.normal(keys[2], (SIZE, SIZE))
    blocks = {"block_m": 512, "block_n": 512, "block_k": 512}
    mapped = jax.jit(jax.vmap(lambda x, w: matmul(x, w, **blocks, **PORTABLE), (0, None)))
    by_hand = jax.jit(partial(batched_matmul, **PORTABLE))
    yield _compare(f"vmap of matmul {BATCH} × {SIZE}³, one operand shared", lambda: mapped(x, w), lambda: by_hand(x, w))


def _compare(name: str, ours: Any, theirs: Any) -> Result:
    seconds = medians({"ours": ours, "theirs": theirs}, rounds=15)
    return Result(name, "ms", seconds["ours"] * 1e3, RATIO_LIMIT, "ratio", seconds["theirs"] * 1e3)
