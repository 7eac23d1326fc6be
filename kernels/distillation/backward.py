"""The kernel of distillation's backward pass: the gradient of some words' logits.

With the cotangent g of the loss, q of the student, and φ and Φ of `Options.slopes`, ∂s = g (φ - q Φ), divided by
the temperature, and multiplied by 1 - (s / softcap)² for the logits before the softcap.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.blocks import copies_well, depth, even, power_of_two, tiled
from tilekern.kernels.cross_entropy.backward import tpu_tile
from tilekern.kernels.distillation.kernel import both_logits
from tilekern.kernels.distillation.options import Options
from tilekern.kernels.softcap import softcap_cotangent


def _logits_type(hidden: Any, weight: Any, *unused: Any, **options: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((hidden.shape[0], weight.shape[1]), hidden.dtype)


@tk.kernel(out_type=_logits_type)
def distillation_backward_logits(
    hidden: tk.Ref,
    weight: tk.Ref,
    teacher: tk.Ref,
    teacher_weight: tk.Ref | None,
    logsumexp: tk.Ref,
    teacher_logsumexp: tk.Ref,
    slope: tk.Ref,
    cotangent: tk.Ref,
    done: tk.Ref,
    out: tk.Ref,
    *,
    options: Options,
    block_t: tk.Block = 64,
    block_v: tk.Block = 128,
    block_d: tk.Block = 64,
    block_e: tk.Block = 64,
) -> None:
    """The arrays of the forward kernel for W words, its results, cotangents [T] -> out[T, W], cotangents of the logits.

    Args:
      hidden: of the student.
      weight: the student's columns for the W words.
      teacher: hidden of the teacher, or the teacher's logits of the W words.
      teacher_weight: the teacher's columns for the W words, or None for logits.
      logsumexp: of the forward kernel.
      teacher_logsumexp: of the forward kernel.
      slope: of the forward kernel.
      cotangent: of the loss.
      done: int32[]; the gradient of words before this number is 0.
      out: the result.
      options: of the forward kernel.
      block_t: tokens of a tile.
      block_v: words of a tile.
      block_d: elements of the student's inner dim in a tile.
      block_e: elements of the teacher's inner dim in a tile.
    """
    i, j = tk.grid((out.shape[0], block_t), (out.shape[1], block_v), order=tk.grouped(8))
    s, t = both_logits(hidden, weight, teacher, teacher_weight, (i, j), (block_d, block_e), options)
    log_q = s / options.temperature - logsumexp[i][:, None]
    log_p = t / options.temperature - teacher_logsumexp[i][:, None]
    gradient = options.slopes(log_q, log_p) - jnp.exp(log_q) * slope[i][:, None]
    gradient = gradient * cotangent[i][:, None] / options.temperature
    gradient = softcap_cotangent(gradient, s, options.softcap)
    out[i, j] = jnp.where(j.indices[None, :] >= done[()], gradient, 0).astype(out.dtype)


@distillation_backward_logits.schedule("cpu")
def _cpu(hidden: Any, weight: Any, teacher: Any, *unused: Any) -> dict[str, int]:
    """XLA's own matrix product is fastest on large blocks."""
    return {
        "block_t": even(hidden.shape[0], 512),
        "block_v": even(weight.shape[1], 2048),
        "block_d": even(hidden.shape[1], 2048),
        "block_e": even(teacher.shape[1], 2048),
    }


@distillation_backward_logits.schedule("cpu:llvm")
def _llvm(hidden: Any, weight: Any, teacher: Any, *unused: Any) -> dict[str, int]:
    """Blocks of a matrix product."""
    sizes = {"block_t": hidden.shape[0], "block_v": weight.shape[1]}
    inner = {"block_d": hidden.shape[1], "block_e": teacher.shape[1]}
    return {name: even(size, 256) for name, size in (sizes | inner).items()}


@distillation_backward_logits.schedule("cuda")
def _cuda(hidden: Any, weight: Any, teacher: Any, *unused: Any) -> dict[str, int]:
    """Small tiles: registers hold two sums, and also the operands without copies of rows to shared memory."""
    itemsize = hidden.dtype.itemsize
    block_v = 128 if itemsize <= 2 and copies_well(hidden.shape[1], itemsize) else 32
    return {
        "block_t": power_of_two(hidden.shape[0], 64, 16),
        "block_v": block_v,
        "block_d": depth(hidden.shape[1], itemsize),
        "block_e": depth(teacher.shape[1], itemsize),
        "num_warps": 8,
        "num_stages": 3 if itemsize <= 2 else 2,
    }


@distillation_backward_logits.schedule("tpu")
def _tpu(hidden: Any, weight: Any, teacher: Any, teacher_weight: Any, *unused: Any) -> dict[str, int]:
    """Two tiles of logits of 1 MiB; at most 2048 elements of the inner dims."""
    widest = max(hidden.shape[1], teacher.shape[1] if teacher_weight is not None else 0)
    block_t, block_v = tpu_tile(hidden, weight.shape[1], 2 * widest * hidden.dtype.itemsize, 1)
    return {
        "block_t": block_t,
        "block_v": block_v,
        "block_d": tiled(hidden.shape[1], 2048, 128),
        "block_e": tiled(teacher.shape[1], 2048, 128),
    }
