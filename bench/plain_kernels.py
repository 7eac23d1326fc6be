"""Kernels as people write them first: every block 128, no schedule; with arguments of real sizes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import tilekern as tk

Struct = jax.ShapeDtypeStruct


def _like(x: Any, *_: Any) -> Any:
    return Struct(x.shape, x.dtype)


@tk.kernel(out_type=_like)
def gelu(x, out, *, block: tk.Block = 128):
    """Gelu of each element, by its tanh formula."""
    i = tk.parallel(x.shape[0], block)
    out[i] = jax.nn.gelu(x[i])


@tk.kernel(out_type=_like)
def add(x, y, out, *, rows: tk.Block = 128, columns: tk.Block = 128):
    """out[M, N] = x + y."""
    i, j = tk.parallel(x.shape[0], rows), tk.parallel(x.shape[1], columns)
    out[i, j] = x[i, j] + y[i, j]


@tk.kernel(out_type=_like)
def softmax_of_rows(x, out, *, rows: tk.Block = 128):
    """Softmax of rows that a program holds whole."""
    i = tk.parallel(x.shape[0], rows)
    out[i, :] = jax.nn.softmax(x[i, :].astype(jnp.float32), axis=1).astype(out.dtype)


@tk.kernel(out_type=_like)
def softmax_in_tiles(x, out, *, rows: tk.Block = 128, columns: tk.Block = 128):
    """Softmax of rows in two loops over their tiles."""
    i, tiles = tk.parallel(x.shape[0], rows), tk.serial(x.shape[1], columns)

    def lines(j, carry):
        high, total = carry
        tile = jnp.where(j.valid[None, :], x[i, j].astype(jnp.float32), -jnp.inf)
        higher = jnp.maximum(high, tile.max(axis=1))
        return higher, total * jnp.exp(high - higher) + jnp.exp(tile - higher[:, None]).sum(axis=1)

    high, total = tk.fold(tiles, lines, (tk.full((i,), -jnp.inf, jnp.float32), tk.zeros((i,), jnp.float32)))

    def store(j, carry):
        out[i, j] = (jnp.exp(x[i, j].astype(jnp.float32) - high[:, None]) / total[:, None]).astype(out.dtype)
        return carry

    tk.fold(tiles, store, ())


@tk.kernel(out_type=_like)
def rms_norm_of_rows(x, weight, out, *, rows: tk.Block = 128):
    """Rows divided by their root mean square, times weight[N]."""
    i = tk.parallel(x.shape[0], rows)
    row = x[i, :].astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(row * row, axis=1, keepdims=True) + 1e-6)
    out[i, :] = (row * scale * weight[:].astype(jnp.float32)).astype(out.dtype)


@tk.kernel(out_type=lambda x, w: Struct((x.shape[0], w.shape[1]), x.dtype))
def product(x, w, out, *, m: tk.Block = 128, n: tk.Block = 128, k: tk.Block = 128):
    """out[M, N] = x[M, K] @ w[K, N]."""
    i, j = tk.parallel(x.shape[0], m), tk.parallel(w.shape[1], n)
    total = tk.fold(tk.serial(x.shape[1], k), lambda t, acc: tk.dot(x[i, t], w[t, j], acc), tk.zeros((i, j)))
    out[i, j] = total.astype(out.dtype)


@tk.kernel(out_type=lambda x, w: Struct((x.shape[0], x.shape[1], w.shape[2]), x.dtype))
def batched_product(x, w, out, *, m: tk.Block = 128, n: tk.Block = 128, k: tk.Block = 128):
    """out[B, M, N] = x[B, M, K] @ w[B, K, N]."""
    b, i, j = tk.parallel(x.shape[0]), tk.parallel(x.shape[1], m), tk.parallel(w.shape[2], n)
    total = tk.fold(tk.serial(x.shape[2], k), lambda t, acc: tk.dot(x[b, i, t], w[b, t, j], acc), tk.zeros((i, j)))
    out[b, i, j] = total.astype(out.dtype)


@tk.kernel(out_type=lambda x, w: Struct((w.shape[1],), x.dtype))
def product_with_vector(x, w, out, *, n: tk.Block = 128, k: tk.Block = 128):
    """out[N] = x[K] @ w[K, N]."""
    j = tk.parallel(w.shape[1], n)

    def step(t, acc):
        return acc + (x[t][:, None].astype(jnp.float32) * w[t, j].astype(jnp.float32)).sum(axis=0)

    out[j] = tk.fold(tk.serial(x.shape[0], k), step, tk.zeros((j,), jnp.float32)).astype(out.dtype)


@tk.kernel(out_type=lambda x: Struct((x.shape[1], x.shape[0]), x.dtype))
def transposed(x, out, *, rows: tk.Block = 128, columns: tk.Block = 128):
    """out[N, M] = x[M, N].T."""
    i, j = tk.parallel(x.shape[0], rows), tk.parallel(x.shape[1], columns)
    out[j, i] = x[i, j].T


@tk.kernel(out_type=lambda x: Struct((x.shape[1],), jnp.float32))
def sums_of_columns(x, out, *, rows: tk.Block = 128, columns: tk.Block = 128):
    """out[N] = x[M, N].sum(axis=0), in float32."""
    j = tk.parallel(x.shape[1], columns)

    def step(i, acc):
        return acc + x[i, j].astype(jnp.float32).sum(axis=0)

    out[j] = tk.fold(tk.serial(x.shape[0], rows), step, tk.zeros((j,), jnp.float32))


@tk.kernel(out_type=lambda x: Struct((x.shape[0],), jnp.float32))
def sums_of_rows(x, out, *, rows: tk.Block = 128, columns: tk.Block = 128):
    """out[M] = x[M, N].sum(axis=1), in float32."""
    i = tk.parallel(x.shape[0], rows)

    def step(j, acc):
        return acc + x[i, j].astype(jnp.float32).sum(axis=1)

    out[i] = tk.fold(tk.serial(x.shape[1], columns), step, tk.zeros((i,), jnp.float32))


@tk.kernel(out_type=_like)
def stencil(x, out, *, rows: tk.Block = 128, columns: tk.Block = 128):
    """The sum of the four neighbours of each element less four times the element; 0 outside."""
    i, j = tk.parallel(x.shape[0], rows), tk.parallel(x.shape[1], columns)
    out[i, j] = (x[i - 1, j] + x[i + 1, j] + x[i, j - 1] + x[i, j + 1] - 4 * x[i, j]).astype(out.dtype)


@tk.kernel(out_type=lambda table, ids: Struct((ids.shape[0], table.shape[1]), table.dtype))
def embedding(table, ids, out, *, tokens: tk.Block = 128, columns: tk.Block = 128):
    """out[T, N] = table[ids[T], N]."""
    i, j = tk.parallel(ids.shape[0], tokens), tk.parallel(table.shape[1], columns)
    out[i, j] = table[ids[i], j]


@tk.kernel(out_type=_like)
def running_sums(x, out, *, rows: tk.Block = 128):
    """out[M, N] = cumsum(x, axis=1)."""
    i = tk.parallel(x.shape[0], rows)
    out[i, :] = jnp.cumsum(x[i, :], axis=1)


@tk.kernel(out_type=lambda x: Struct((x.shape[0],), jnp.int32))
def argmax_of_rows(x, out, *, rows: tk.Block = 128):
    """out[M] = argmax(x[M, N], axis=1)."""
    i = tk.parallel(x.shape[0], rows)
    out[i] = jnp.argmax(x[i, :], axis=1)


@tk.kernel(out_type=lambda q, k, v: Struct(q.shape, q.dtype))
def attention(q, k, v, out, *, queries: tk.Block = 128, keys: tk.Block = 128):
    """out[H, T, D] = softmax(q @ kᵀ / √D) @ v, by heads, with the softmax made in a loop over keys."""
    n, i = tk.parallel(q.shape[0]), tk.parallel(q.shape[1], queries)
    query, scale = q[n, i, :], q.shape[2] ** -0.5

    def step(j, carry):
        high, total, acc = carry
        scores = tk.dot(query, k[n, j, :].T) * scale
        scores = jnp.where(j.valid[None, :], scores, -jnp.inf)
        higher = jnp.maximum(high, scores.max(axis=1))
        p, fade = jnp.exp(scores - higher[:, None]), jnp.exp(high - higher)
        acc = acc * fade[:, None] + tk.dot(p.astype(v.dtype), v[n, j, :])
        return higher, total * fade + p.sum(axis=1), acc

    start = tk.full((i,), -jnp.inf, jnp.float32), tk.zeros((i,), jnp.float32), tk.zeros((i, q.shape[2]), jnp.float32)
    _, total, acc = tk.fold(tk.serial(k.shape[1], keys), step, start)
    out[n, i, :] = (acc / total[:, None]).astype(out.dtype)


class Case(NamedTuple):
    """A kernel with arguments.

    Attributes:
      kernel: the kernel.
      arguments: its inputs.
      name: a name that tells cases of a kernel apart.
    """

    kernel: Any
    arguments: tuple[Any, ...]
    name: str


def _case(kernel: Any, *arguments: tuple[Any, ...], dtype: Any = jnp.float32) -> Case:
    types = tuple(Struct(shape, dtype) for shape in arguments)
    sizes = "_".join("x".join(map(str, shape)) for shape in arguments[:2])
    return Case(kernel, types, f"{kernel.__name__}-{sizes}-{jnp.dtype(dtype).name}")


BF16 = jnp.bfloat16
CASES = (
    _case(gelu, (1 << 20,)),
    _case(add, (2048, 2048), (2048, 2048)),
    _case(add, (100000, 24), (100000, 24)),
    _case(softmax_of_rows, (4096, 1024)),
    _case(softmax_of_rows, (64, 50257), dtype=BF16),
    _case(softmax_in_tiles, (4096, 1024)),
    _case(softmax_in_tiles, (64, 50257)),
    _case(rms_norm_of_rows, (8192, 2048), (2048,), dtype=BF16),
    _case(rms_norm_of_rows, (100, 4096), (4096,)),
    _case(product, (1024, 1024), (1024, 1024)),
    _case(product, (512, 2048), (2048, 512), dtype=BF16),
    _case(product, (8, 4096), (4096, 4096)),
    _case(product, (10000, 64), (64, 96)),
    _case(batched_product, (64, 256, 128), (64, 128, 256)),
    _case(product_with_vector, (4096,), (4096, 4096)),
    _case(transposed, (2048, 2048)),
    _case(transposed, (10000, 100)),
    _case(sums_of_columns, (8192, 1024)),
    _case(sums_of_columns, (100000, 50)),
    _case(sums_of_rows, (8192, 1024)),
    _case(stencil, (2048, 2048)),
    Case(embedding, (Struct((32000, 1024), jnp.float32), Struct((4096,), jnp.int32)), "embedding-32000x1024"),
    _case(running_sums, (4096, 1024)),
    _case(argmax_of_rows, (4096, 1024)),
    _case(attention, (8, 1024, 64), (8, 1024, 64), (8, 1024, 64)),
    _case(attention, (8, 1024, 128), (8, 1024, 128), (8, 1024, 128), dtype=BF16),
)
