"""The kernels of cross entropy's backward pass: the gradient of some words' logits, and products with it.

With probabilities p = exp(s - logsumexp) and the target q = (1 - ε) onehot(label) + ε / V, cotangents g of the loss and
h of the logsumexp give

    ∂s = a p - g q,  a = g (1 + 2 z logsumexp) + h,

divided by the temperature, and multiplied by 1 - (s / softcap)² for the logits before the softcap. The loss of a part
of the vocabulary has no p: a = h. The backward op computes ∂s for some words at a time.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.blocks import copies_well, depth, even, power_of_two, takes_registers, tiled
from tilekern.kernels.cross_entropy.kernel import capped_logits
from tilekern.kernels.softcap import softcap_cotangent


def _logits_type(hidden: Any, weight: Any, *unused: Any, **options: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((hidden.shape[0], weight.shape[1]), hidden.dtype)


@tk.kernel(out_type=_logits_type)
def cross_entropy_backward_logits(
    hidden: tk.Ref,
    weight: tk.Ref,
    labels: tk.Ref,
    logsumexp: tk.Ref,
    of_words: tk.Ref,
    of_target: tk.Ref,
    done: tk.Ref,
    out: tk.Ref,
    *,
    on_label: float,
    on_each: float,
    softcap: float | None,
    temperature: float,
    block_t: tk.Block = 128,
    block_v: tk.Block = 128,
    block_d: tk.Block = 64,
) -> None:
    """hidden[T, D], weight[D, W] of W words, [T] for each token -> out[T, W], the cotangents of hidden @ weight.

    Args:
      hidden: of the forward kernel.
      weight: the forward kernel's columns for the W words.
      labels: int32, counted from the first of the W words.
      logsumexp: of the forward kernel.
      of_words: a, the factor of p.
      of_target: g, the factor of q.
      done: int32[]; the gradient of words before this number is 0.
      out: the result.
      on_label: 1 - ε.
      on_each: ε / V.
      softcap: of the forward kernel.
      temperature: of the forward kernel.
      block_t: tokens of a tile.
      block_v: words of a tile.
      block_d: elements of the inner dim in a tile.
    """
    i, j = tk.grid((out.shape[0], block_t), (out.shape[1], block_v), order=tk.grouped(8))
    s = capped_logits(hidden, weight, i, j, block_d, softcap)
    target = jnp.where(j.indices[None, :] == labels[i][:, None], on_label, 0).astype(s.dtype) + on_each
    log_p = (s if temperature == 1 else s / temperature) - logsumexp[i][:, None]
    gradient = of_words[i][:, None] * jnp.exp(log_p) - of_target[i][:, None] * target
    if temperature != 1:
        gradient = gradient / temperature
    gradient = softcap_cotangent(gradient, s, softcap)
    out[i, j] = jnp.where(j.indices[None, :] >= done[()], gradient, 0).astype(out.dtype)


def _no_results(total: Any, x: Any, w: Any) -> tuple[()]:
    return ()


@tk.kernel(out_type=_no_results, donate=("total",))
def cross_entropy_backward_hidden(
    total: tk.Ref,
    x: tk.Ref,
    w: tk.Ref,
    *,
    block_t: tk.Block = 128,
    block_d: tk.Block = 128,
    block_v: tk.Block = 64,
) -> None:
    """Add x[T, W] w[D, W]ᵀ to total[T, D], which has the accumulator's dtype."""
    i, k = tk.grid((total.shape[0], block_t), (total.shape[1], block_d), order=tk.grouped(8))

    def step(j: tk.Tile, acc: jax.Array) -> jax.Array:
        return tk.dot(x[i, j], w[k, j].T, acc)

    total[i, k] = tk.fold(tk.serial(x.shape[1], block_v), step, total[i, k])


# --- blocks -----------------------------------------------------------------------------------------------------------


@cross_entropy_backward_logits.schedule("cpu")
def _logits_cpu(hidden: Any, weight: Any, *unused: Any) -> dict[str, int]:
    """XLA's own matrix product is fastest on large blocks."""
    return {
        "block_t": even(hidden.shape[0], 512),
        "block_v": even(weight.shape[1], 2048),
        "block_d": even(hidden.shape[1], 2048),
    }


@cross_entropy_backward_hidden.schedule("cpu")
def _hidden_cpu(total: Any, x: Any, w: Any) -> dict[str, int]:
    (tokens, width), words = total.shape, x.shape[1]
    return {"block_t": even(tokens, 512), "block_d": even(width, 2048), "block_v": even(words, 2048)}


@cross_entropy_backward_logits.schedule("cpu:llvm")
def _logits_llvm(hidden: Any, weight: Any, *unused: Any) -> dict[str, int]:
    """Blocks of a matrix product: large blocks copy less of the operands, small blocks keep more cores busy."""
    (tokens, width), words = hidden.shape, weight.shape[1]
    side = _side(tokens, words)
    return {"block_t": even(tokens, side), "block_v": even(words, side), "block_d": even(width, 256)}


@cross_entropy_backward_hidden.schedule("cpu:llvm")
def _hidden_llvm(total: Any, x: Any, w: Any) -> dict[str, int]:
    (tokens, width), words = total.shape, x.shape[1]
    side = _side(tokens, width)
    return {"block_t": even(tokens, side), "block_d": even(width, side), "block_v": even(words, 256)}


def _side(rows: int, columns: int) -> int:
    return next((n for n in (512, 256, 128) if tk.cdiv(rows, n) * tk.cdiv(columns, n) >= 16), 64)


@cross_entropy_backward_logits.schedule("cuda")
def _logits_cuda(hidden: Any, weight: Any, *unused: Any) -> dict[str, int]:
    block_t, block_v, options = _cuda_tile(hidden)
    return {"block_t": block_t, "block_v": block_v, "block_d": depth(hidden.shape[1], hidden.dtype.itemsize), **options}


@cross_entropy_backward_hidden.schedule("cuda")
def _hidden_cuda(total: Any, x: Any, w: Any, device: tk.Device) -> dict[str, int]:
    block_t, block_d, options = _cuda_tile(x)
    block_v = depth(x.shape[1], x.dtype.itemsize)
    if x.dtype.itemsize > 2 and takes_registers(device) and device.fast_memory > 128 << 10:
        block_v = 16  # deeper tiles would spill; GPUs with less memory have fewer threads, each with more registers
    return {"block_t": block_t, "block_d": block_d, "block_v": block_v, **options}


def _cuda_tile(x: Any) -> tuple[int, int, dict[str, int]]:
    """Rows and columns of a tile, and launch options.

    Operands are in registers beside the sums without tensor cores, or without copies of rows to shared memory.
    """
    (tokens, width), itemsize = x.shape, x.dtype.itemsize
    side = 128 if itemsize <= 2 and copies_well(width, itemsize) else 64
    return power_of_two(tokens, side, 16), side, {"num_warps": 8, "num_stages": 3}


@cross_entropy_backward_logits.schedule("tpu")
def _logits_tpu(hidden: Any, weight: Any, *unused: Any) -> dict[str, int]:
    """Tiles of whole rows and columns, or of 2048 elements of the inner dim."""
    width, words = weight.shape
    block_t, block_v = tpu_tile(hidden, words, width * hidden.dtype.itemsize, 0)
    return {"block_t": block_t, "block_v": block_v, "block_d": _tpu_depth(width, block_t + block_v, hidden)}


def tpu_tile(hidden: Any, words: int, line: int, first: int) -> tuple[int, int]:
    """(tokens, words) of a tile whose rows and columns, of `line` bytes each, take at most 40 MiB in two buffers.

    Float32 takes two more copies, the operands of the matrix units, and its products are long programs to compile.
    """
    sides = (512, 1024), (512, 512), (256, 512), (256, 256), (128, 256), (128, 128)
    if hidden.dtype.itemsize > 2:
        line, first = 3 * line, 2
    fitting = (s for s in sides[first:] if 2 * line * sum(s) <= 40 << 20)
    block_t, block_v = next(fitting, sides[-1])
    return tiled(hidden.shape[0], block_t, 128), tiled(words, block_v, 128)


@cross_entropy_backward_hidden.schedule("tpu")
def _hidden_tpu(total: Any, x: Any, w: Any) -> dict[str, int]:
    """Few tokens and all words, for many words: a program computes while the next program's rows are loaded."""
    (tokens, width), words = total.shape, x.shape[1]
    block_t, block_d = tpu_tile(x, width, words * x.dtype.itemsize, 0)
    if x.dtype.itemsize <= 2 and block_t < tiled(tokens, 512, 128):
        return {"block_t": tiled(tokens, 128, 128), "block_d": tiled(width, 1024, 128), "block_v": max(1, words)}
    return {"block_t": block_t, "block_d": block_d, "block_v": _tpu_depth(words, block_t + block_d, x)}


def _tpu_depth(inner: int, lines: int, x: Any) -> int:
    """The whole inner dim where two buffers of `lines` rows and columns take at most 32 MiB; else about 2048."""
    return max(1, inner) if 2 * inner * lines * x.dtype.itemsize <= 32 << 20 else tiled(inner, 2048, 128)
