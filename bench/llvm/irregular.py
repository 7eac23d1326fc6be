"""Kernels that move elements by data, and a convolution, against XLA."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import tilekern as tk
from bench.llvm.peak import host
from bench.result import Result
from bench.timing import by_round, clock, take_turns

RATIO_LIMIT = 1.0


@tk.kernel(out_type=lambda x, *, k: tuple(jax.ShapeDtypeStruct((x.shape[0], k), d) for d in (x.dtype, jnp.int32)))
def top_k(x: tk.Ref, values: tk.Ref, places: tk.Ref, *, k: int) -> None:
    """The k greatest elements of each row, and their positions."""
    i = tk.parallel(x.shape[0])
    values[i], places[i] = lax.top_k(x[i], k)


@tk.kernel(out_type=lambda values, *, count: tk.Zeros(jax.ShapeDtypeStruct((count,), jnp.int32)))
def histogram(values: tk.Ref, bins: tk.Ref, *, count: int, block: tk.Block = 4096) -> None:
    """The number of times that each number occurs."""
    n = tk.parallel(values.shape[0], block)
    bins.at[values[n]].add(1)


@tk.kernel(out_type=lambda x, ids, *, count: tk.Sum(jax.ShapeDtypeStruct((count, x.shape[1]), x.dtype)))
def segment_sum(x: tk.Ref, ids: tk.Ref, total: tk.Ref, *, count: int, block: tk.Block = 128) -> None:
    """The sums of the rows of each segment."""
    n = tk.parallel(x.shape[0], block)
    total.at[ids[n]].add(x[n])


@tk.kernel(out_type=lambda x, w: jax.ShapeDtypeStruct((*x.shape[:3], w.shape[3]), x.dtype))
def convolution(x: tk.Ref, w: tk.Ref, out: tk.Ref, *, rows: tk.Block = 4) -> None:
    """Each pixel of NHWC and its neighbours by a kernel of 3 × 3: nine products of shifted windows."""
    b, i = tk.grid(x.shape[0], (x.shape[1], rows))
    j = tk.tile(x.shape[2], x.shape[2], 0)
    pixels = i.size * j.size

    def step(taps: Any, total: jax.Array) -> jax.Array:
        down, right = taps
        window = x[b, i + (down - 1), j + (right - 1)].reshape(pixels, x.shape[3])
        return tk.dot(window, w[down, right], total)

    total = tk.fold((tk.serial(3), tk.serial(3)), step, tk.zeros((pixels, out.shape[3])))
    out[b, i, j] = total.astype(out.dtype).reshape(i.size, j.size, out.shape[3])


def measure() -> Iterator[Result]:
    """All results of this file."""
    if host() is None:
        return
    for dtype in ("float32", "bfloat16", "int32"):
        for shape in ((512, 1024), (32, 32768)):
            for k in (1, 8, 64):
                yield greatest(shape, k, dtype)
    for size in (1_000_000, 10_000_000):
        for count in (256, 65536):
            for skewed in (False, True):
                yield counted(size, count, skewed)
    for shape in ((1 << 20, 1), (1 << 18, 16), (1 << 16, 128), (1 << 14, 512)):
        for count in (64, 4096):
            yield summed(shape, count)
    for dtype in ("float32", "bfloat16"):
        for channels in ((64, 64), (128, 128), (256, 256), (64, 256)):
            yield convolved((4, 56, 56), channels, dtype)


def greatest(shape: tuple[int, int], k: int, dtype: str) -> Result:
    """Top-k of rows of random numbers."""
    x = (1e6 * jax.random.normal(jax.random.key(0), shape)).astype(dtype)
    return _time(f"top_k {k} of {shape[0]}×{shape[1]} {dtype}", partial(top_k, k=k), partial(lax.top_k, k=k), x)


def counted(size: int, count: int, skewed: bool) -> Result:
    """A histogram of uniform numbers, or of many small ones and few large ones."""
    rng = np.random.default_rng(0)
    numbers = np.minimum(rng.zipf(1.3, size) - 1, count - 1) if skewed else rng.integers(0, count, size)
    values, how = jnp.asarray(numbers, jnp.int32), "skewed" if skewed else "uniform"
    theirs = partial(jnp.bincount, length=count)
    return _time(f"histogram {size:.0e} in {count} {how}", partial(histogram, count=count), theirs, values)


def summed(shape: tuple[int, int], count: int) -> Result:
    """Sums of rows in random segments."""
    x = jax.random.normal(jax.random.key(0), shape)
    ids = jax.random.randint(jax.random.key(1), shape[:1], 0, count)
    theirs = partial(jax.ops.segment_sum, num_segments=count)
    return _time(f"segment_sum {shape[0]}×{shape[1]} in {count}", partial(segment_sum, count=count), theirs, x, ids)


def convolved(shape: tuple[int, int, int], channels: tuple[int, int], dtype: str) -> Result:
    """A convolution of 3 × 3, padded to the same size."""
    x = jax.random.normal(jax.random.key(0), (*shape, channels[0])).astype(dtype)
    w = (jax.random.normal(jax.random.key(1), (3, 3, *channels)) / 30).astype(dtype)
    forms = ("NHWC", "HWIO", "NHWC")
    theirs = partial(lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=forms)
    return _time(f"conv 3×3 {'×'.join(map(str, shape))} {channels[0]}→{channels[1]} {dtype}", convolution, theirs, x, w)


def _time(name: str, kernel: Callable[..., Any], peer: Callable[..., Any], *arrays: jax.Array) -> Result:
    ours, theirs = jax.jit(partial(kernel, target="cpu:llvm")), jax.jit(peer)
    times = take_turns({"ours": clock(lambda: ours(*arrays)), "theirs": clock(lambda: theirs(*arrays))}, rounds=9)
    value, baseline = (statistics.median(times[who]) * 1e3 for who in ("ours", "theirs"))
    ratio = by_round(times["ours"], times["theirs"])
    return Result(f"llvm: {name}, to XLA", "ms", value, RATIO_LIMIT, "ratio", baseline, ratio)
