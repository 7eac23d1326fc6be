"""The forward kernel of cross entropy and its blocks.

For each tile of the vocabulary, with logits s, keep the running maximum m and the sum d = Σ exp(s - m), as in online
softmax (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867, algorithm 3), the label's logit, and for label
smoothing the sum of the logits. In the end logsumexp = m + ln d. With the target q = (1 - ε) onehot(label) + ε / V

    loss = -Σ q ln p = Σ q (logsumexp - s) = logsumexp - (1 - ε) s[label] - ε mean s.

If the weight is a part of the vocabulary, the loss of the part is its share of -Σ q s; the shares add up.

A program reads all words for its tokens. Where the tokens of a call do not keep the whole machine busy, several
programs have the same tokens, each with a part of the words, and the op `cross_entropy_forward` merges their results.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.blocks import (
    copies_well,
    depth,
    even,
    power_of_two,
    soonest_parts,
    stages,
    takes_registers,
    tiled,
)
from tilekern.kernels.softcap import softcapped


def _out_type(hidden: Any, weight: Any, labels: Any, *, parts: int = 1) -> tuple[Any, Any]:
    shape = labels.shape if parts == 1 else (parts, *labels.shape)
    out = jax.ShapeDtypeStruct(shape, tk.accumulator(hidden.dtype))
    return out, out


def capped_logits(
    hidden: tk.Ref, weight: tk.Ref, i: tk.Tile, j: tk.Tile, block_d: int, softcap: float | None
) -> jax.Array:
    """The logits of tile i of tokens and tile j of words, in the accumulator's dtype, after the softcap."""

    def step(k: tk.Tile, acc: jax.Array) -> jax.Array:
        return tk.dot(hidden[i, k], weight[k, j], acc)

    start = tk.zeros((i, j), tk.accumulator(hidden.dtype))
    s = tk.fold(tk.serial(hidden.shape[1], block_d), step, start)
    return softcapped(s, softcap)


@tk.kernel(out_type=_out_type)
def cross_entropy_parts(
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
    parts: int = 1,
    block_t: tk.Block = 128,
    block_v: tk.Block = 128,
    block_d: tk.Block = 64,
) -> None:
    """hidden[T, D], weight[D, V], labels int32[T] -> loss[T], logsumexp[T] in float32 (float64 for float64).

    Args:
      hidden: the tokens.
      weight: all words, or a part of the vocabulary.
      labels: the number of a word, counted from the first word of `weight`.
      loss: of each token; for a part of the vocabulary the part's share of -Σ q s.
      logsumexp: of the logits of the words in `weight`.
      ignore_index: label of tokens whose loss is 0, if `weight` has all words.
      label_smoothing: ε.
      softcap: c of c tanh(logit / c), or None.
      z_loss: factor of logsumexp², if `weight` has all words.
      temperature: logits are divided by it, after the softcap.
      vocabulary: V if `weight` has a part of V words; None if it has all words.
      parts: the number of parts of the words. If above 1, results are [parts, T], a row for each part, and
        `vocabulary` is needed, so that rows are shares that add up.
      block_t: tokens of a tile.
      block_v: words of a tile.
      block_d: elements of the inner dim in a tile.
    """
    p = tk.parallel(parts) if parts > 1 else None
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
    size = tk.cdiv(tk.cdiv(words, block_v), parts) * block_v
    axis = tk.serial(words, block_v) if p is None else tk.serial(words, block_v, start=p * size, stop=(p + 1) * size)
    m, d, picked, total = tk.fold(axis, step, start)
    log_total = m + jnp.log(d)
    place: Any = i if p is None else (p, i)
    logsumexp[place] = log_total

    base = log_total if vocabulary is None else 0
    result = (1 - label_smoothing) * (base - picked)
    if label_smoothing:
        result = result + label_smoothing * (base - total / max(1, vocabulary or words))
    loss[place] = result if vocabulary is not None else _counted(result, log_total, label, words, ignore_index, z_loss)


def _counted(
    loss: jax.Array, logsumexp: jax.Array, label: jax.Array, words: int, ignore_index: int, z_loss: float
) -> jax.Array:
    """The loss over all words, with the z-loss; 0 for an ignored label, NaN for a label outside of the vocabulary."""
    if z_loss:
        loss = loss + z_loss * (logsumexp * logsumexp)
    inside = (label >= 0) & (label < words)
    return jnp.where(label == ignore_index, 0, jnp.where(inside, loss, jnp.nan))


def merged_logsumexp(parts: jax.Array) -> jax.Array:
    """The logsumexp[T] of all words from the parts' logsumexps [parts, T]; a NaN or infinity of a part stays."""
    most = parts.max(axis=0)
    base = jnp.where(jnp.abs(most) == jnp.inf, 0, most)
    return base + jnp.log(jnp.exp(parts - base).sum(axis=0))


@tk.op(out_type=_out_type)
def cross_entropy_forward(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    temperature: float = 1.0,
    vocabulary: int | None = None,
    block_t: int | None = None,
    block_v: int | None = None,
    block_d: int | None = None,
    parts: tk.Block = 1,
) -> tuple[jax.Array, jax.Array]:
    """hidden[T, D], weight[D, V], labels int32[T] -> loss[T], logsumexp[T]: `cross_entropy_parts`, merged.

    The arguments and blocks are as for `cross_entropy_parts`; None leaves a block to the schedule of this kernel. Each
    of the `parts` of the vocabulary has its own programs.
    """
    call = partial(
        cross_entropy_parts,
        hidden,
        weight,
        labels,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        temperature=temperature,
        block_t=block_t,
        block_v=block_v,
        block_d=block_d,
    )
    if parts == 1:
        return call(z_loss=z_loss, vocabulary=vocabulary)
    words = weight.shape[1]
    shares, logsumexps = call(z_loss=0.0, vocabulary=vocabulary or words, parts=parts)
    share, logsumexp = shares.sum(axis=0), merged_logsumexp(logsumexps)
    if vocabulary is not None:
        return share, logsumexp
    return _counted(logsumexp + share, logsumexp, labels, words, ignore_index, z_loss), logsumexp


@cross_entropy_forward.schedule("cpu")
def _parts_cpu(hidden: Any, weight: Any, labels: Any) -> dict[str, int]:
    """Parts for few tokens: one program's products are too narrow for several threads; loads of the weight dominate."""
    return {"parts": max(1, min(8, weight.shape[1] // 1024)) if hidden.shape[0] <= 32 else 1}


@cross_entropy_parts.schedule("cpu")
def _cpu(hidden: Any, weight: Any, labels: Any) -> dict[str, int]:
    """A tile of logits and a tile of weights fit the cache."""
    sizes = {"block_t": hidden.shape[0], "block_v": weight.shape[1], "block_d": weight.shape[0]}
    return {name: even(size, 1024) for name, size in sizes.items()}


@cross_entropy_parts.schedule("cpu:llvm")
def _llvm(hidden: Any, weight: Any, labels: Any) -> dict[str, int]:
    """A tile of logits and a tile of weights fit the cache of a core."""
    sizes = {"block_t": hidden.shape[0], "block_v": weight.shape[1], "block_d": weight.shape[0]}
    return {name: even(size, 256) for name, size in sizes.items()}


def _tile(hidden: Any, weight: Any, plain: bool, device: tk.Device) -> tuple[int, int, int, int]:
    """Tokens and words of a tile on a GPU, warps and stages. `plain`: logits are neither capped nor scaled or added up.

    A tile of T tokens and W words loads T + W elements for T x W products, so tiles are as large as registers allow.
    """
    tokens, itemsize = hidden.shape[0], hidden.dtype.itemsize
    if itemsize > 2:
        # No tensor cores: operands and sums are all in registers.
        tile = 64, 64, 8, 3
    elif takes_registers(device):
        tile = 64, 128, 4, 4
    elif tokens <= 64:
        tile = 64, 256, 8, 4
    elif not copies_well(weight.shape[1], itemsize):
        # Threads that copy the weight need registers for addresses.
        tile = (128, 128, 8, 4) if device.matrix_unit == "wgmma" else (64, 256, 8, 4)
    else:
        tile = (128, 256, 8, 4) if plain and device.matrix_unit == "wgmma" else (128, 128, 8, 4)
    block_t, block_v, num_warps, num_stages = tile
    return power_of_two(tokens, block_t, 16), block_v, num_warps, num_stages


@cross_entropy_parts.schedule("cuda")
def _cuda(
    hidden: Any,
    weight: Any,
    labels: Any,
    softcap: float | None,
    label_smoothing: float,
    temperature: float,
    device: tk.Device,
) -> dict[str, int]:
    itemsize = hidden.dtype.itemsize
    plain = _is_plain(softcap, label_smoothing, temperature)
    block_t, block_v, num_warps, num_stages = _tile(hidden, weight, plain, device)
    block_d = depth(hidden.shape[1], itemsize)
    return {
        "block_t": block_t,
        "block_v": block_v,
        "block_d": block_d,
        "num_warps": num_warps,
        "num_stages": stages((block_t + block_v) * block_d * itemsize, num_stages, device),
    }


def _is_plain(softcap: float | None, label_smoothing: float, temperature: float) -> bool:
    return softcap is None and not label_smoothing and temperature == 1


@cross_entropy_forward.schedule("cuda")
def _parts_cuda(
    hidden: Any,
    weight: Any,
    labels: Any,
    softcap: float | None,
    label_smoothing: float,
    temperature: float,
    block_t: int | None,
    block_v: int | None,
    device: tk.Device,
) -> dict[str, int]:
    """As many parts as let all programs end soonest."""
    tile_t, tile_v, *_ = _tile(hidden, weight, _is_plain(softcap, label_smoothing, temperature), device)
    programs = tk.cdiv(hidden.shape[0], block_t or tile_t)
    return {"parts": soonest_parts(programs, tk.cdiv(weight.shape[1], block_v or tile_v), device.cores)}


@cross_entropy_parts.schedule("tpu")
def _tpu(hidden: Any, weight: Any, labels: Any, target: str) -> dict[str, int]:
    """A tile of logits of 2 MiB; of the weights, all of the width at once where that is at most 8 MiB.

    Half as many logits where their whole rows and columns would not fit. On v6e rows and columns have twice the room:
    by the static estimate narrow tiles of float32 are 3 % slower on v6e, and 1 % faster on v5e.
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
