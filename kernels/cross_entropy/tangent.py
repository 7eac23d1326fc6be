"""The tangent kernel of cross entropy: the derivative of loss and logsumexp along tangents of hidden and weight.

With the probabilities p = exp(s - logsumexp), the target q of `backward`, and the tangents ds of the logits,

    dlogsumexp = Σ p ds,  dloss = (1 + 2 z logsumexp) dlogsumexp - Σ q ds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.blocks import copies_well, depth, even, power_of_two, stages, tiled
from tilekern.kernels.cross_entropy.backward import tpu_tile

Pair = tuple[Any, Any]


@dataclass(frozen=True)
class Options:
    """The static arguments of the forward kernel except for blocks."""

    ignore_index: int
    label_smoothing: float
    softcap: float | None
    z_loss: float
    temperature: float = 1.0
    vocabulary: int | None = None

    def counts(self, labels: jax.Array, words: int) -> jax.Array | bool:
        """bool[T]: False for a token whose loss is constant, for its label is `ignore_index` or none of the `words`.

        True for all tokens if the weight is a part of a `vocabulary`: labels of other parts count, too.
        """
        if self.vocabulary is not None:
            return True
        return (labels >= 0) & (labels < words) & (labels != self.ignore_index)

    def on_each(self, words: int) -> float:
        """ε / V, the target of a word that is not the label."""
        return self.label_smoothing / (words if self.vocabulary is None else self.vocabulary)


def _out_type(hidden: Any, weight: Any, labels: Any, *unused: Any, options: Options) -> Pair:
    rows = jax.ShapeDtypeStruct(labels.shape, tk.accumulator(hidden.dtype))
    return rows, rows


@tk.kernel(out_type=_out_type, linear=("tangents",))
def cross_entropy_tangent(
    hidden: tk.Ref,
    weight: tk.Ref,
    labels: tk.Ref,
    logsumexp: tk.Ref,
    tangents: tuple[tk.Ref | None, tk.Ref | None],
    loss_tangent: tk.Ref,
    logsumexp_tangent: tk.Ref,
    *,
    options: Options,
    block_t: tk.Block = 64,
    block_v: tk.Block = 128,
    block_d: tk.Block = 64,
) -> None:
    """The arrays of the forward kernel, its logsumexp, tangents of hidden and weight -> the tangents of its results."""
    i = tk.parallel(hidden.shape[0], block_t)
    wide = tk.accumulator(hidden.dtype)
    width, words = weight.shape
    label, softcap = labels[i], options.softcap
    dhidden, dweight = tangents

    def products(j: tk.Tile) -> tuple[jax.Array, jax.Array]:
        """The logits, and their tangents."""

        def step(k: tk.Tile, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            s, ds = carry
            s = tk.dot(hidden[i, k], weight[k, j], s)
            if dhidden is not None:
                ds = tk.dot(dhidden[i, k], weight[k, j], ds)
            if dweight is not None:
                ds = tk.dot(hidden[i, k], dweight[k, j], ds)
            return s, ds

        s, ds = tk.fold(tk.serial(width, block_d), step, (tk.zeros((i, j), wide),) * 2)
        if softcap is not None:
            share = jnp.tanh(s / softcap)
            s, ds = softcap * share, ds * (1 - share * share)
        return (s, ds) if options.temperature == 1 else (s / options.temperature, ds / options.temperature)

    def step(j: tk.Tile, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        moved, picked, total = carry
        s, ds = products(j)
        p = jnp.where(j.valid[None, :], jnp.exp(s - logsumexp[i][:, None]), 0)
        moved = moved + (p * ds).sum(axis=1)
        picked = picked + jnp.where(j.indices[None, :] == label[:, None], ds, 0).sum(axis=1)
        if options.label_smoothing:
            total = total + jnp.where(j.valid[None, :], ds, 0).sum(axis=1)
        return moved, picked, total

    zeros = (tk.zeros(i, wide),) * 3
    moved, picked, total = tk.fold(tk.serial(words, block_v), step, zeros)
    logsumexp_tangent[i] = moved
    dloss = -(1 - options.label_smoothing) * picked
    if options.label_smoothing:
        dloss = dloss - options.on_each(words) * total
    if options.vocabulary is None:
        dloss = dloss + (moved + 2 * options.z_loss * logsumexp[i] * moved if options.z_loss else moved)
    loss_tangent[i] = jnp.where(options.counts(label, words), dloss, 0)


@cross_entropy_tangent.schedule("cpu")
def _cpu(hidden: Any, weight: Any, *unused: Any) -> dict[str, int]:
    """The blocks of the forward kernel."""
    return _even(hidden, weight, 1024)


@cross_entropy_tangent.schedule("cpu:llvm")
def _llvm(hidden: Any, weight: Any, *unused: Any) -> dict[str, int]:
    """The blocks of the forward kernel."""
    return _even(hidden, weight, 256)


def _even(hidden: Any, weight: Any, side: int) -> dict[str, int]:
    sizes = {"block_t": hidden.shape[0], "block_v": weight.shape[1], "block_d": weight.shape[0]}
    return {name: even(size, side) for name, size in sizes.items()}


@cross_entropy_tangent.schedule("cuda")
def _cuda(hidden: Any, weight: Any, *unused: Any, device: tk.Device) -> dict[str, int]:
    """Half a tile of the forward kernel, because registers hold two sums."""
    itemsize = hidden.dtype.itemsize
    block_v, most = (32, 2) if itemsize > 2 else (128, 3) if copies_well(hidden.shape[1], itemsize) else (32, 3)
    block_d = depth(hidden.shape[1], itemsize)
    return {
        "block_t": power_of_two(hidden.shape[0], 64, 16),
        "block_v": block_v,
        "block_d": block_d,
        "num_warps": 8,
        "num_stages": stages(2 * (64 + block_v) * block_d * itemsize, most, device),
    }


@cross_entropy_tangent.schedule("tpu")
def _tpu(hidden: Any, weight: Any, *unused: Any) -> dict[str, int]:
    """Tiles of logits and of their tangents, 1 MiB each; at most 2048 elements of the inner dim, of four arrays."""
    width, words = weight.shape
    block_t, block_v = tpu_tile(hidden, words, 2 * width * hidden.dtype.itemsize, 1)
    return {"block_t": block_t, "block_v": block_v, "block_d": tiled(width, 2048, 128)}
