"""Kernels to check, right ones and wrong ones."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

import tilekern as tk


def like(x: Any, *_: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@tk.kernel(out_type=like)
def scaled_rows(x, s, out, *, block: tk.Block = 8):
    rows, _ = x.shape
    i = tk.parallel(rows, block)
    out[i, :] = x[i, :] * s[i][:, None]


def scaled_rows_reference(x, s):
    return x * s[:, None]


@tk.kernel(out_type=lambda x, w: jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype))
def product(x, w, out, *, block_m: tk.Block = 8, block_k: tk.Block = 8):
    i = tk.parallel(x.shape[0], block_m)

    def step(k, acc):
        return tk.dot(x[i, k], w[k, :], acc)

    start = jnp.zeros((block_m, w.shape[1]), tk.accumulator(x.dtype))
    out[i, :] = tk.fold(tk.serial(x.shape[1], block_k), step, start).astype(out.dtype)


def product_reference(x, w):
    return jnp.dot(x, w, preferred_element_type=tk.accumulator(x.dtype)).astype(x.dtype)


@tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape[:1], jnp.int32))
def largest(x, out):
    i = tk.parallel(x.shape[0], 4)
    out[i] = jnp.argmax(x[i, :], axis=1)


@tk.kernel(out_type=like)
def chosen(x, at, out, *, way: Literal["add", "mul"], twice: bool = False):
    i = tk.parallel(x.shape[0], 8)
    found = x.load(at[i]) if way == "add" else x[i] * x.load(at[i])
    out[i] = found * 2 if twice else found


@tk.kernel(out_type=like)
def whole_blocks(x, out):
    assert x.shape[0] % 4 == 0, "rows come in fours"
    i = tk.parallel(x.shape[0], 4)
    out[i] = x[i] + 1


@tk.kernel(out_type=like)
def forgets_its_tail(x, out, *, block: tk.Block = 8):
    """Wrong: the last lanes of a tail count as zeros in the mean."""
    i = tk.parallel(x.shape[0], block)
    tile = x[i]
    out[i] = tile - tile.sum() / block


def forgets_its_tail_reference(x):
    return x - x.mean()


@tk.kernel(out_type=like)
def leaves_holes(x, out):
    """Wrong: odd rows are not written."""
    i = tk.parallel(x.shape[0])
    out.store(i, x[i], mask=i % 2 == 0)


@tk.kernel(out_type=like)
def squared(x, out):
    i = tk.parallel(x.shape[0], 8)
    out[i] = x[i] * x[i]


@squared.defjvp
def _wrong(primals, tangents):
    (x,), (t,) = primals, tangents
    return squared(x), x * t


@tk.kernel(out_type=like)
def never(x, out):
    raise ValueError("I take nothing")


@tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape[:1], x.dtype))
def sums_narrowly(x, out, *, block: tk.Block = 8, block_k: tk.Block = 16):
    """Wrong: what tiles add is rounded to the dtype of x, which a sum of few elements does not show."""
    i = tk.parallel(x.shape[0], block)

    def step(k, acc):
        return (acc + x[i, k].sum(axis=1)).astype(x.dtype)

    out[i] = tk.fold(tk.serial(x.shape[1], block_k), step, tk.zeros(i, x.dtype))


@tk.kernel(out_type=like)
def counts_in_floats(x, out, *, block: tk.Block = 8):
    """Wrong: float32 does not hold integers above 2**24."""
    i = tk.parallel(x.shape[0], block)
    out[i] = (x[i].astype(jnp.float32) + 1).astype(x.dtype)


@tk.kernel(out_type=like)
def countdown(x, out):
    """A loop as long as an integer of the array says."""
    i = tk.parallel(x.shape[0])

    def step(state):
        left, done = state
        return left - 1, done + 1

    out[i] = jax.lax.while_loop(lambda state: state[0] > 0, step, (x[i], jnp.zeros((), x.dtype)))[1]
