"""The forward kernel of cross entropy and its blocks.

For each tile of the vocabulary, with logits s, keep the running maximum m and the sum d = Σ exp(s - m), as in online
softmax (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867, algorithm 3), the label's logit, and for label
smoothing the sum of the logits. In the end logsumexp = m + ln d. With the target q = (1 - ε) onehot(label) + ε / V

    loss = -Σ q ln p = Σ q (logsumexp - s) = logsumexp - (1 - ε) s[label] - ε mean s.

Where the weight is a part of the vocabulary, the losses of parts are their shares of -Σ q s, which add up.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.blocks import depth, even, power_of_two, stages, takes_registers, tiled


def _out_type(hidden: Any, weight: Any, labels: Any) -> tuple[Any, Any]:
    out = jax.ShapeDtypeStruct(labels.shape, tk.accumulator(hidden.dtype))
    return out, out


def capped_logits(
    hidden: tk.Ref, weight: tk.Ref, i: tk.Tile, j: tk.Tile, block_d: int, softcap: float | None
) -> jax.Array:
    """The logits of a tile of tokens and one of words, in the accumulator's dtype, after the softcap."""

    def step(k: tk.Tile, acc: jax.Array) -> jax.Array:
        return tk.dot(hidden[i, k], weight[k, j], acc)

    start = tk.zeros((i, j), tk.accumulator(hidden.dtype))
    s = tk.fold(tk.serial(hidden.shape[1], block_d), step, start)
    return s if softcap is None else softcap * jnp.tanh(s / softcap)


@tk.kernel(out_type=_out_type)
def cross_entropy_forward(
    hidden: tk.Ref,
    weight: tk.Ref,
    labels: tk.Ref,
    loss: tk.Ref,
    logsumexp: tk.Ref,
    *,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    temperature: float = 1.0,
    vocabulary: int | None = None,
    block_t: tk.Block = 128,
    block_v: tk.Block = 128,
    block_d: tk.Block = 64,
) -> None:
    """hidden[T, D], weight[D, V], labels int32[T] -> loss[T], logsumexp[T] in float32 (float64 for float64).

    Args:
      hidden: the tokens.
      weight: the words, all or some of them.
      labels: the number of a word, counted from the first one of `weight`.
      loss: of each token; for some words their share of -Σ q s.
      logsumexp: of the logits with these words.
      ignore_index: label of tokens whose loss is 0, if `weight` has all words.
      label_smoothing: ε.
      softcap: c of c tanh(logit / c), or None.
      z_loss: factor of logsumexp², if `weight` has all words.
      temperature: logits are divided by it, after the softcap.
      vocabulary: V if `weight` has some of V words; None if it has all.
      block_t: tokens of a tile.
      block_v: words of a tile.
      block_d: elements of the inner dim in a tile.
    """
    i = tk.parallel(hidden.shape[0], block_t)
    wide = tk.accumulator(hidden.dtype)
    words = weight.shape[1]
    label = labels[i]

    def step(j: tk.Tile, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        m, d, picked, total = carry
        s = capped_logits(hidden, weight, i, j, block_d, softcap)
        s = s if temperature == 1 else s / temperature
        picked = picked + jnp.where(j.indices[None, :] == label[:, None], s, 0).sum(axis=1)
        if label_smoothing:
            total = total + jnp.where(j.valid[None, :], s, 0).sum(axis=1)
        s = jnp.where(j.valid[None, :], s, -jnp.inf)
        grown = jnp.maximum(m, s.max(axis=1))
        # Where the maximum is infinite: exp(±inf - 0) is inf or 0, as it should, and ±inf - ±inf would be NaN.
        base = jnp.where(jnp.abs(grown) == jnp.inf, 0, grown)
        d = d * jnp.exp(m - base) + jnp.exp(s - base[:, None]).sum(axis=1)
        return grown, d, picked, total

    zeros = tk.zeros(i, wide)
    start = tk.full(i, -jnp.inf, wide), zeros, zeros, zeros
    m, d, picked, total = tk.fold(tk.serial(words, block_v), step, start)
    log_total = m + jnp.log(d)
    logsumexp[i] = log_total

    base = log_total if vocabulary is None else 0
    result = base - (1 - label_smoothing) * picked
    if label_smoothing:
        result = result - (label_smoothing / (vocabulary or words)) * total
    if vocabulary is not None:
        loss[i] = result
        return
    if z_loss:
        result = result + z_loss * (log_total * log_total)
    inside = (label >= 0) & (label < words)
    loss[i] = jnp.where(label == ignore_index, 0, jnp.where(inside, result, jnp.nan))


@cross_entropy_forward.schedule("cpu")
def _cpu(hidden: Any, weight: Any, labels: Any) -> dict[str, int]:
    """A tile of logits, and one of the weights, in the cache."""
    sizes = {"block_t": hidden.shape[0], "block_v": weight.shape[1], "block_d": weight.shape[0]}
    return {name: even(size, 1024) for name, size in sizes.items()}


@cross_entropy_forward.schedule("cpu:llvm")
def _llvm(hidden: Any, weight: Any, labels: Any) -> dict[str, int]:
    """A tile of logits, and one of the weights, in the cache of a core."""
    sizes = {"block_t": hidden.shape[0], "block_v": weight.shape[1], "block_d": weight.shape[0]}
    return {name: even(size, 256) for name, size in sizes.items()}


@cross_entropy_forward.schedule("cuda")
def _cuda(hidden: Any, weight: Any, labels: Any, device: tk.Device) -> dict[str, int]:
    """Each program reads all weights, so tiles are large; but tokens must give work to all multiprocessors."""
    (tokens, width), itemsize = hidden.shape, hidden.dtype.itemsize
    if itemsize > 2:
        # No tensor cores: operands and sums are all in registers.
        block_t, block_v, num_warps, num_stages = 64, 64, 8, 3
    elif takes_registers(device):
        block_t, block_v, num_warps, num_stages = 64, 128, 4, 4
    elif tk.cdiv(tokens, 128) >= device.cores:
        block_t, block_v, num_warps, num_stages = 128, 128, 8, 4
    else:
        block_t, block_v, num_warps, num_stages = 64, 256, 8, 4
    block_d = depth(width, itemsize)
    return {
        "block_t": power_of_two(tokens, block_t, 16),
        "block_v": block_v,
        "block_d": block_d,
        "num_warps": num_warps,
        "num_stages": stages((block_t + block_v) * block_d * itemsize, num_stages, device),
    }


@cross_entropy_forward.schedule("tpu")
def _tpu(hidden: Any, weight: Any, labels: Any, target: str) -> dict[str, int]:
    """A tile of logits of 2 MiB; of the weights, all of the width at once where that is at most 8 MiB.

    Half as many logits where the whole rows and columns that make them would not fit. On v6e these have twice the room:
    by the static estimate narrow tiles of float32 are 3 % slower there, and 1 % faster on v5e.
    """
    (tokens, width), itemsize = hidden.shape, hidden.dtype.itemsize
    block_t, block_v = tiled(tokens, 512, 128), tiled(weight.shape[1], 1024, 128)
    block_d = max(1, width) if width * block_v * itemsize <= 8 << 20 else tiled(width, 2048, 128)
    copied = (
        4 * block_t * block_d * 4 if hidden.dtype == jnp.float32 else 0
    )  # bytes copied into operands of the matrix units
    most = 100 << 20 if target == "tpu:v6e" else 50 << 20
    if 2 * width * (block_t + block_v) * itemsize + copied > most:
        block_v = tiled(weight.shape[1], 512, 128)
    return {"block_t": block_t, "block_v": block_v, "block_d": block_d}
