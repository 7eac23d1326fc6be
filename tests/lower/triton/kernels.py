"""Kernels whose Triton source is kept as golden text, which names lines of this file."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import tilekern as tk

LIKE = jax.ShapeDtypeStruct


@tk.kernel(out_type=lambda x, w: LIKE((x.shape[0], w.shape[1]), x.dtype))
def matmul(x, w, out, *, block_m: tk.Block = 128, block_n: tk.Block = 128, block_k: tk.Block = 64):
    i, j = tk.grid((x.shape[0], block_m), (w.shape[1], block_n), order=tk.grouped(8))

    def step(k, acc):
        return tk.dot(x[i, k], w[k, j], acc)

    acc = tk.fold(tk.serial(x.shape[1], block_k), step, tk.zeros((i, j)))
    out[i, j] = acc.astype(out.dtype)


@tk.kernel(out_type=lambda x: LIKE(x.shape, x.dtype))
def softmax(x, out, *, block: tk.Block = 4):
    i = tk.parallel(x.shape[0], block)
    logits = x.load((i, slice(None)), fill=-jnp.inf).astype(jnp.float32)
    largest = logits.max(axis=1)
    weights = jnp.exp(logits - largest[:, None])
    total = weights.sum(axis=1)
    out[i, :] = (weights / total[:, None]).astype(out.dtype)


@tk.kernel(out_type=lambda q, k, v: (LIKE(q.shape, q.dtype), LIKE(q.shape[:2], jnp.float32)))
def attention(q, k, v, out, logsumexp, *, block_q: tk.Block = 128, block_k: tk.Block = 128):
    n = tk.parallel(q.shape[1])
    i = tk.parallel(q.shape[0], block_q, order="descending")
    queries = q[i, n]

    def step(j, carry):
        m, d, acc = carry
        s = tk.dot(queries, k[j, n].T)
        s = jnp.where(i.indices[:, None] >= j.indices[None, :], s, -jnp.inf)
        grown = jnp.maximum(m, s.max(axis=1))
        p = jnp.exp2(s - grown[:, None])
        shrink = jnp.exp2(m - grown)
        d = d * shrink + p.sum(axis=1)
        acc = tk.dot(p.astype(v.dtype), v[j, n], acc * shrink[:, None])
        return grown, d, acc

    start = tk.full(i, -jnp.inf), tk.zeros(i), tk.zeros((i, v.shape[2]))
    m, d, acc = tk.fold(tk.serial(k.shape[0], block_k, stop=i.stop), step, start)
    out[i, n] = (acc / d[:, None]).astype(out.dtype)
    logsumexp[i, n] = m + jnp.log2(d)


@tk.kernel(out_type=lambda x, rows, kind: (tk.Sum(LIKE(x.shape, x.dtype)), tk.Zeros(LIKE((4,), jnp.int32))))
def histogram(x, rows, kind, out, counts):
    i = tk.parallel(x.shape[0], 4)
    tile = x[i, :]

    def halve(state):
        value, steps = state
        return value * 0.5, steps + 1

    small, steps = jax.lax.while_loop(lambda s: jnp.max(s[0]) > 1, halve, (tile, jnp.int32(0)))
    chosen = jax.lax.switch(kind[()], [lambda: small, lambda: -small, lambda: jnp.zeros_like(small)])
    out.at[rows[i], :].add(chosen)
    counts.at[jnp.minimum(steps, 3)].add(1)


@matmul.schedule("cuda")
def _large_tiles(x, w):
    """For all sizes, with operands by TMA and products of warpgroups."""
    return {"block_m": 128, "block_n": 128, "block_k": 64}


@attention.schedule("cuda")
def _square_tiles(q, k, v):
    return {"block_q": 128, "block_k": 128}
