"""Kernels as users write them, without rules for derivatives, and the same functions in plain JAX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tilekern as tk


@dataclass(frozen=True)
class Case:
    """A kernel.

    Attributes:
      name: of the case.
      kernel: of all arrays.
      reference: the same in plain JAX.
      shapes: of the arrays of floats that are differentiated, the first ones.
      rest: the other arrays.
    """

    name: str
    kernel: Callable[..., Any]
    reference: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    rest: tuple[Any, ...] = ()

    def arrays(self, seed: int = 0, dtype: Any = np.float64) -> tuple[jax.Array, ...]:
        """Standard normal arrays of the shapes."""
        random = np.random.default_rng(seed)
        return tuple(jnp.asarray(random.standard_normal(shape), dtype) for shape in self.shapes)


def like(x: Any, *rest: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def of(shape: tuple[int, ...], x: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, x.dtype)


@tk.kernel(out_type=like)
def pointwise(x, y, out, *, block: tk.Block = 8):
    i = tk.parallel(x.shape[0], block)
    out[i] = jnp.where(x[i] > 0, jnp.exp(-x[i]) * y[i], jnp.tanh(y[i]) / (2 + x[i] * x[i]))


@tk.kernel(out_type=like)
def norm(x, w, out, *, rows: tk.Block = 4, columns: tk.Block = 8):
    i = tk.parallel(x.shape[0], rows)

    def add(k, total):
        return total + (x[i, k] ** 2).sum(axis=1)

    def write(k):
        out[i, k] = x[i, k] * scale[:, None] * w[k]

    scale = jax.lax.rsqrt(tk.fold(tk.serial(x.shape[1], columns), add, tk.zeros(i, x.dtype)) / x.shape[1] + 1e-3)
    tk.foreach(tk.serial(x.shape[1], columns), write)


def norm_reference(x, w):
    return x * jax.lax.rsqrt((x * x).mean(axis=1, keepdims=True) + 1e-3) * w


@tk.kernel(out_type=lambda x, w: of((x.shape[0], w.shape[1]), x))
def product(x, w, out, *, block: tk.Block = 8):
    i, j = tk.parallel(x.shape[0], block), tk.parallel(w.shape[1], block)

    def add(k, total):
        return tk.dot(x[i, k], w[k, j], total)

    out[i, j] = tk.fold(tk.serial(x.shape[1], block), add, tk.zeros((i, j), tk.accumulator(x.dtype))).astype(x.dtype)


@tk.kernel(out_type=lambda x, w: of((x.shape[0], w.shape[0]), x))
def product_and_bias(x, w, out, *, block: tk.Block = 8):
    """The second operand is transposed; its row sums are added."""
    i, j = tk.parallel(x.shape[0], block), tk.parallel(w.shape[0], block)
    wide = tk.accumulator(x.dtype)

    def add(k, carry):
        total, bias = carry
        return tk.dot(x[i, k], w[j, k].T, total), bias + w[j, k].astype(wide).sum(axis=1)

    start = tk.zeros((i, j), wide), tk.zeros(j, wide)
    total, bias = tk.fold(tk.serial(x.shape[1], block), add, start)
    out[i, j] = (jnp.sin(total) + bias[None]).astype(x.dtype)


@tk.kernel(out_type=like)
def softmax(x, out, *, rows: tk.Block = 4, columns: tk.Block = 8):
    """Online: the maximum and the sum are carried together."""
    i = tk.parallel(x.shape[0], rows)
    axis = tk.serial(x.shape[1], columns)

    def gather(k, carry):
        m, d = carry
        tile = x.load((i, k), fill=-jnp.inf)
        grown = jnp.maximum(m, tile.max(axis=1))
        return grown, d * jnp.exp(m - grown) + jnp.exp(tile - grown[:, None]).sum(axis=1)

    def write(k):
        out[i, k] = jnp.exp(x[i, k] - m[:, None]) / d[:, None]

    m, d = tk.fold(axis, gather, (tk.full(i, -1e30, x.dtype), tk.zeros(i, x.dtype)))
    tk.foreach(axis, write)


@tk.kernel(out_type=lambda q, k, v: of((q.shape[0], v.shape[1]), q))
def attention(q, k, v, out, *, queries: tk.Block = 8, keys: tk.Block = 8):
    """Causal, with bounds of the loop that depend on the program."""
    i = tk.parallel(q.shape[0], queries)
    wide = tk.accumulator(q.dtype)

    def step(j, carry):
        m, d, total = carry
        s = tk.dot(q[i, :], k[j, :].T, tk.zeros((i, j), wide))
        s = jnp.where(j.valid[None] & (i.indices[:, None] >= j.indices[None]), s, -1e30)
        grown = jax.lax.stop_gradient(jnp.maximum(m, s.max(axis=1)))
        p, shrink = jnp.exp(s - grown[:, None]), jnp.exp(m - grown)
        return grown, d * shrink + p.sum(axis=1), total * shrink[:, None] + tk.dot(p.astype(v.dtype), v[j, :])

    start = tk.full(i, -1e30, wide), tk.zeros(i, wide), tk.zeros((i, v.shape[1]), wide)
    stop = (i.index + 1) * queries
    _, d, total = tk.fold(tk.serial(k.shape[0], keys, stop=stop), step, start)
    out[i, :] = (total / d[:, None]).astype(out.dtype)


def attention_reference(q, k, v):
    mask = jnp.arange(len(q))[:, None] >= jnp.arange(len(k))
    return jax.nn.softmax(jnp.where(mask, q @ k.T, -1e30)) @ v


@tk.kernel(out_type=lambda q, k, v: of((q.shape[0], v.shape[1]), q))
def two_passes(q, k, v, out, *, queries: tk.Block = 8, keys: tk.Block = 8):
    """Attention whose sums of exponentials are known before its products."""
    i = tk.parallel(q.shape[0], queries)
    axis = tk.serial(k.shape[0], keys)

    def scores(j):
        return jnp.where(j.valid[None], tk.dot(q[i, :], k[j, :].T, tk.zeros((i, j), q.dtype)), -1e30)

    def weigh(j, d):
        return d + jnp.exp(scores(j)).sum(axis=1)

    def add(j, total):
        return total + tk.dot(jnp.exp(scores(j)) / d[:, None], v[j, :])

    d = tk.fold(axis, weigh, tk.zeros(i, q.dtype))
    out[i, :] = tk.fold(axis, add, tk.zeros((i, v.shape[1]), q.dtype))


@tk.kernel(out_type=lambda table, rows: of((rows.shape[0], table.shape[1]), table))
def lookup(table, rows, out, *, block: tk.Block = 8):
    i = tk.parallel(rows.shape[0], block)
    out[i, :] = table[rows[i], :] ** 2


@tk.kernel(out_type=like)
def recurrence(x, a, out, *, block: tk.Block = 4):
    """h[t] = a[t] h[t - 1] + x[t], a tile of time at once."""
    c = tk.parallel(x.shape[1], block)

    def step(t, h):
        decays, total = jax.lax.associative_scan(combine, (a[t, c], x[t, c]))
        total = total + decays * h[None]
        out[t, c] = total
        last = jnp.minimum(block - 1, x.shape[0] - 1 - t.index * block)
        return jax.lax.dynamic_index_in_dim(total, last, 0, keepdims=False)

    tk.fold(tk.serial(x.shape[0], block), step, tk.zeros(c, x.dtype))


def combine(first, second):
    (a, x), (b, y) = first, second
    return a * b, x * b + y


def recurrence_reference(x, a):
    def step(h, both):
        h = both[1] * h + both[0]
        return h, h

    return jax.lax.scan(step, jnp.zeros(x.shape[1], x.dtype), (x, a))[1]


@tk.kernel(out_type=like)
def stencil(x, out, *, block: tk.Block = 8):
    i = tk.parallel(x.shape[0], block)
    start = i.index * block
    out[i] = x[tk.ds(start - 1, block)] * x[i] + jnp.sin(x[tk.ds(start + 2, block)])


def stencil_reference(x):
    grown = jnp.pad(x, (1, 2))
    return grown[: len(x)] * x + jnp.sin(grown[3:])


@tk.kernel(out_type=lambda x, w: (tk.Sum(like(w)), tk.Zeros(like(x))))
def sums_and_zeros(x, w, total, part, *, block: tk.Block = 4):
    i = tk.parallel(x.shape[0], block)
    total.at[:].add((x[i, :] * w[:][None]).sum(axis=0))

    @tk.when(i.index != 1)
    def _():
        part[i, :] = x[i, :] * jnp.cos(w[:])[None]


def sums_and_zeros_reference(x, w):
    kept = (jnp.arange(len(x)) // 4 != 1)[:, None]
    return (x * w).sum(axis=0), jnp.where(kept, x * jnp.cos(w), 0)


@tk.kernel(out_type=lambda x, key: like(x))
def dropout(x, key, out, *, block: tk.Block = 8):
    i = tk.parallel(x.shape[0], block)
    kept = (tk.random_bits(key[:], i.indices) >> 31) == 0
    out[i] = jnp.where(kept, x[i] * x[i], 0)


def dropout_reference(x, key):
    kept = (tk_bits(key, len(x)) >> 31) == 0
    return jnp.where(kept, x * x, 0)


@tk.kernel(out_type=lambda key, x: jax.ShapeDtypeStruct(x.shape, jnp.uint32))
def _bits(key, x, out):
    out[...] = tk.random_bits(key[:], jnp.arange(x.shape[0]))


def tk_bits(key, size):
    return _bits(key, jnp.zeros(size))


@tk.kernel(out_type=lambda x: (like(x), of((x.shape[0], 3), x)))
def ordered(x, out, best, *, block: tk.Block = 4):
    i = tk.parallel(x.shape[0], block)
    tile = x[i, :]
    out[i, :] = jnp.sort(tile, axis=1) * jnp.arange(x.shape[1])
    best[i, :] = jax.lax.top_k(tile, 3)[0] ** 2


def ordered_reference(x):
    return jnp.sort(x, axis=1) * jnp.arange(x.shape[1]), jax.lax.top_k(x, 3)[0] ** 2


@tk.kernel(out_type=lambda x, w: of((x.shape[0], 4), x))
def heads(x, w, out, *, block: tk.Block = 2):
    """Views: the columns of x are seen as heads; two heads share a row of w."""
    h = tk.parallel(4)
    i = tk.parallel(x.shape[0], block)
    out[i, h] = (x.reshape(x.shape[0], 4, 6)[i, h, :] * w[h // 2, :]).sum(axis=1)


def heads_reference(x, w):
    return (x.reshape(len(x), 4, 6) * jnp.repeat(w, 2, axis=0)).sum(axis=2)


@tk.kernel(out_type=lambda x, w: of((x.shape[0],), x))
def nested(x, w, out, *, block: tk.Block = 4):
    """A loop in a loop, with a product of carries."""
    i = tk.parallel(x.shape[0], block)

    def outer(j, total):
        def inner(k, part):
            return part * (1 + 0.1 * w[j, k].sum()) + x[i, k].sum(axis=1)

        part = tk.fold(tk.serial(x.shape[1], 4), inner, tk.zeros(i, x.dtype))
        return total * 0.5 + jnp.sin(part)

    out[i] = tk.fold(tk.serial(w.shape[0], 2), outer, tk.zeros(i, x.dtype))


def nested_reference(x, w):
    total = jnp.zeros(len(x), x.dtype)
    for j in range(0, w.shape[0], 2):
        part = jnp.zeros(len(x), x.dtype)
        for k in range(0, x.shape[1], 4):
            part = part * (1 + 0.1 * w[j : j + 2, k : k + 4].sum()) + x[:, k : k + 4].sum(axis=1)
        total = total * 0.5 + jnp.sin(part)
    return total


@tk.kernel(out_type=lambda x, y: (like(x), like(x)))
def overwritten(x, y, out, last, *, block: tk.Block = 8):
    """Elements are stored several times: on some conditions, in a loop over tiles that overlap, and by a constant."""
    i = tk.parallel(x.shape[0], block)
    out[i] = jnp.sin(x[i])

    @tk.when(i.index != 1)
    def _():
        out[tk.ds(i.index * block + 2, 3)] = x[tk.ds(i.index * block + 2, 3)] * y[i][0]

    def step(k, shift):
        last[tk.ds(i.index * block + k, 8 - k)] = x[tk.ds(i.index * block + k, 8 - k)] ** (k + 1)
        return shift

    last[i] = y[i]
    for k in range(1, 3):
        step(k, 0)
    out[i.index * block + 4] = 1.0


def overwritten_reference(x, y):
    lane, tile = jnp.arange(len(x)) % 8, jnp.arange(len(x)) // 8
    moved = (lane >= 2) & (lane < 5) & (tile != 1)
    out = jnp.where(moved, x * y[8 * tile], jnp.sin(x))
    last = jnp.where(lane >= 2, x**3, jnp.where(lane >= 1, x**2, y))
    return jnp.where(lane == 4, 1.0, out), last


@tk.kernel(out_type=like)
def last_of_loop(x, out, *, block: tk.Block = 4):
    """Each iteration of a loop stores a tile that overlaps that of the one before; what comes last stays."""
    i = tk.parallel(1)

    def step(k, total):
        total = total + x[tk.ds(3 * k, 5)].sum()
        out[tk.ds(3 * k, 5)] = x[tk.ds(3 * k, 5)] * total
        return total

    tk.fold(tk.serial(x.shape[0] // 3), step, i * 0.0 + tk.zeros((), x.dtype))


def last_of_loop_reference(x):
    total, out = 0.0, jnp.zeros_like(x)
    for k in range(0, len(x), 3):
        total = total + x[k : k + 5].sum()
        out = out.at[k : k + 5].set(x[k : k + 5] * total)
    return out


@tk.kernel(out_type=lambda x, y: of((x.shape[0], 2 * x.shape[1]), x))
def halves(x, y, out, *, block: tk.Block = 4):
    """Two stores in a loop that never meet; and loads of a diagonal."""
    i = tk.parallel(x.shape[0], block)
    half = x.shape[1]

    def write(k):
        out[i, k] = x[i, k] * y[i.index, i.index]
        out[i, tk.ds(half + k.index * block, block)] = jnp.cos(x[i, k])

    tk.foreach(tk.serial(half, block), write)


def halves_reference(x, y):
    return jnp.concatenate([x * jnp.diag(y)[jnp.arange(len(x)) // 4][:, None], jnp.cos(x)], 1)


_ROWS = np.array([0, 3, 3, 6, 1, 3, 0, 0, 5, 2, 3], np.int32)
_KEY = np.array([7, 11], np.uint32)

CASES = (
    Case(
        "pointwise", pointwise, lambda x, y: jnp.where(x > 0, jnp.exp(-x) * y, jnp.tanh(y) / (2 + x * x)), ((21,),) * 2
    ),
    Case("norm", norm, norm_reference, ((13, 21), (21,))),
    Case("product", product, jnp.matmul, ((29, 37), (37, 19))),
    Case("product and bias", product_and_bias, lambda x, w: jnp.sin(x @ w.T) + w.sum(axis=1), ((29, 37), (19, 37))),
    Case("softmax", softmax, jax.nn.softmax, ((6, 21),)),
    Case("attention", attention, attention_reference, ((43, 8), (43, 8), (43, 5))),
    Case("two passes", two_passes, lambda q, k, v: jax.nn.softmax(q @ k.T) @ v, ((43, 8), (45, 8), (45, 5))),
    Case("lookup", lookup, lambda table, rows: table[rows] ** 2, ((7, 5),), (_ROWS,)),
    Case("recurrence", recurrence, recurrence_reference, ((11, 6), (11, 6))),
    Case("stencil", stencil, stencil_reference, ((21,),)),
    Case("sums and zeros", sums_and_zeros, sums_and_zeros_reference, ((10, 5), (5,))),
    Case("dropout", dropout, dropout_reference, ((21,),), (_KEY,)),
    Case("ordered", ordered, ordered_reference, ((6, 9),)),
    Case("heads", heads, heads_reference, ((5, 24), (2, 6))),
    Case("overwritten", overwritten, overwritten_reference, ((24,), (24,))),
    Case("last of loop", last_of_loop, last_of_loop_reference, ((21,),)),
    Case("halves", halves, halves_reference, ((10, 8), (4, 5))),
    Case("nested", nested, nested_reference, ((6, 9), (5, 9))),
)
