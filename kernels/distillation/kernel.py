"""The forward kernel of distillation and its blocks.

For each tile of the vocabulary, the logits s of the student and t of the teacher, and their running maxima m and n,
and sums d and e of exponentials, as in online softmax (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867,
algorithm 3). A Kullback-Leibler divergence is a mean of differences of logits from their maxima,

    forward KL = Σ p ((t - n) - (s - m)) - ln e + ln d,

so one pass over the words computes it. In the reverse divergence p and q change places. Where a maximum grows, so do
the differences before. The Jensen-Shannon divergence takes a second pass, with both probabilities of a word.

Parts of the vocabulary may have programs of their own. With the weights w and v of a part in p and in q, and the part's
divergence KL_part, of p and q scaled to add up to 1 in the part, the chain rule says

    Σ p ln(p / q) = Σ_parts w (KL_part + ln w - ln v).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.blocks import copies_well, depth, even, power_of_two, soonest_parts, tiled
from tilekern.kernels.cross_entropy.backward import tpu_tile
from tilekern.kernels.cross_entropy.kernel import capped_logits, merged_logsumexp
from tilekern.kernels.distillation.options import Options
from tilekern.kernels.softcap import softcapped


def _out_type(hidden: Any, *unused: Any, options: Options, parts: int = 1, **blocks: Any) -> tuple[Any, ...]:
    shape = hidden.shape[:1] if parts == 1 else (parts, *hidden.shape[:1])
    return (jax.ShapeDtypeStruct(shape, tk.accumulator(hidden.dtype)),) * 4


def both_logits(
    hidden: tk.Ref,
    weight: tk.Ref,
    teacher: tk.Ref,
    teacher_weight: tk.Ref | None,
    tiles: tuple[tk.Tile, tk.Tile],
    blocks: tuple[int, int],
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """A tile of the student's logits and of the teacher's, in the accumulator's dtype, before the temperature.

    Args:
      hidden: of the student.
      weight: of the student.
      teacher: hidden of the teacher, or the teacher's logits.
      teacher_weight: of the teacher, or None if `teacher` has logits.
      tiles: of tokens and words.
      blocks: elements of the two inner dims.
      options: of the kernel.
    """
    i, j = tiles
    s = capped_logits(hidden, weight, i, j, blocks[0], options.softcap)
    if teacher_weight is not None:
        return s, capped_logits(teacher, teacher_weight, i, j, blocks[1], options.teacher_softcap)
    return s, softcapped(teacher[i, j].astype(s.dtype), options.teacher_softcap)


@tk.kernel(out_type=_out_type)
def distillation_parts(
    hidden: tk.Ref,
    weight: tk.Ref,
    teacher: tk.Ref,
    teacher_weight: tk.Ref | None,
    loss: tk.Ref,
    logsumexp: tk.Ref,
    teacher_logsumexp: tk.Ref,
    slope: tk.Ref,
    *,
    options: Options,
    parts: int = 1,
    block_t: tk.Block = 64,
    block_v: tk.Block = 128,
    block_d: tk.Block = 64,
    block_e: tk.Block = 64,
) -> None:
    """hidden[T, D], weight[D, V], teacher[T, E], teacher_weight[E, V] -> four numbers [T] for each token.

    Args:
      hidden: of the student.
      weight: of the student.
      teacher: hidden of the teacher, or the teacher's logits [T, V].
      teacher_weight: of the teacher, or None for logits.
      loss: the divergence.
      logsumexp: of the student's logits.
      teacher_logsumexp: of the teacher's logits.
      slope: Σ φ of `Options.slopes`. The last three are constants under differentiation.
      options: all but blocks.
      parts: the number of parts of the words, above 1 only for the Kullback-Leibler divergences. Results are then
        [parts, T]: a row is the result for the words of a part alone.
      block_t: tokens of a tile.
      block_v: words of a tile.
      block_d: elements of the student's inner dim in a tile.
      block_e: elements of the teacher's inner dim in a tile.
    """
    p = tk.parallel(parts) if parts > 1 else None
    i = tk.parallel(hidden.shape[0], block_t)
    wide, size = tk.accumulator(hidden.dtype), tk.cdiv(tk.cdiv(weight.shape[1], block_v), parts) * block_v
    part = {} if p is None else {"start": p * size, "stop": (p + 1) * size}
    words, place = tk.serial(weight.shape[1], block_v, **part), i if p is None else (p, i)
    forward, mixed = options.divergence == "forward_kl", options.divergence == "jensen_shannon"

    def logits(j: tk.Tile) -> tuple[jax.Array, jax.Array]:
        pair = both_logits(hidden, weight, teacher, teacher_weight, (i, j), (block_d, block_e), options)
        s, t = (jnp.where(j.valid[None, :], x / options.temperature, -jnp.inf) for x in pair)
        return s, t

    def sums(j: tk.Tile, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        m_s, d_s, m_t, d_t, total = carry
        s, t = (_shifted(m, x) for m, x in zip((m_s, m_t), logits(j), strict=True))
        d_s, d_t = d_s * s.shrink, d_t * t.shrink
        if not mixed:
            of_p, of_q, d = (t, s, d_t) if forward else (s, t, d_s)
            total = total * of_p.shrink + d * (of_p.moved - of_q.moved)
            total = total + jnp.where(of_p.e > 0, of_p.e * (of_p.below - of_q.below), 0).sum(axis=1)
        return s.maximum, d_s + s.e.sum(axis=1), t.maximum, d_t + t.e.sum(axis=1), total

    none, zeros = tk.full(i, -jnp.inf, wide), tk.zeros(i, wide)
    m_s, d_s, m_t, d_t, total = tk.fold(words, sums, (none, zeros, none, zeros, zeros))
    logsumexp[place], teacher_logsumexp[place] = m_s + jnp.log(d_s), m_t + jnp.log(d_t)
    if not mixed:
        divergence = total / d_t - jnp.log(d_t) + jnp.log(d_s) if forward else total / d_s - jnp.log(d_s) + jnp.log(d_t)
        loss[place] = divergence
        slope[place] = tk.full(i, -1, wide) if forward else divergence
        return

    def shares(j: tk.Tile, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        divergence, slopes = carry
        s, t = logits(j)
        log_q = s - _finite(m_s)[:, None] - jnp.log(d_s)[:, None]
        log_p = t - _finite(m_t)[:, None] - jnp.log(d_t)[:, None]
        divergence = divergence + options.shares(log_q, log_p).sum(axis=1)
        return divergence, slopes + options.slopes(log_q, log_p).sum(axis=1)

    loss[place], slope[place] = tk.fold(words, shares, (zeros, zeros))


class _Shifted(NamedTuple):
    """A tile of logits relative to the running maximum.

    Attributes:
      maximum: the running maximum, with the logits of this tile.
      moved: the maximum before this tile minus `maximum`.
      shrink: exp(moved), the factor of the sums before this tile.
      below: the logits minus the maximum.
      e: exp(below).
    """

    maximum: jax.Array
    moved: jax.Array
    shrink: jax.Array
    below: jax.Array
    e: jax.Array


def _shifted(m: jax.Array, s: jax.Array) -> _Shifted:
    grown = jnp.maximum(m, s.max(axis=1))
    base = _finite(grown)
    below = s - base[:, None]
    return _Shifted(grown, _finite(m) - base, jnp.exp(m - base), below, jnp.exp(below))


def _finite(m: jax.Array) -> jax.Array:
    """m, or 0 where m is infinite: exp(±inf - 0) is inf or 0, as it should, and ±inf - ±inf would be NaN."""
    return jnp.where(jnp.abs(m) == jnp.inf, 0, m)


@tk.op(out_type=_out_type)
def distillation_forward(
    hidden: jax.Array,
    weight: jax.Array,
    teacher: jax.Array,
    teacher_weight: jax.Array | None,
    *,
    options: Options,
    block_t: int | None = None,
    block_v: int | None = None,
    block_d: int | None = None,
    block_e: int | None = None,
    parts: tk.Block = 1,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The four numbers [T] of `distillation_parts`, merged over the `parts` of the vocabulary.

    The arguments and blocks are as for `distillation_parts`; None leaves a block to the schedule of this kernel.
    """
    arrays = hidden, weight, teacher, teacher_weight
    blocks = {"block_t": block_t, "block_v": block_v, "block_d": block_d, "block_e": block_e}
    if parts == 1:
        return distillation_parts(*arrays, options=options, **blocks)
    losses, *numbers, _ = distillation_parts(*arrays, options=options, parts=parts, **blocks)
    of_student, of_teacher = map(merged_logsumexp, numbers)
    forward = options.divergence == "forward_kl"
    in_p, in_q = (x - whole[None] for x, whole in zip(numbers, (of_student, of_teacher), strict=True))
    in_p, in_q = (in_q, in_p) if forward else (in_p, in_q)
    share = jnp.exp(in_p)
    # A part with w = 0 adds nothing. A part with v = 0 and w > 0 has an infinite divergence, by ln v alone.
    inner = jnp.where(in_q == -jnp.inf, 0, losses)
    loss = jnp.where(share == 0, 0, share * (inner + in_p - in_q)).sum(axis=0)
    return loss, of_student, of_teacher, jnp.full_like(loss, -1) if forward else loss


# --- blocks -----------------------------------------------------------------------------------------------------------


@distillation_forward.schedule("cuda")
def _parts_cuda(
    hidden: Any,
    weight: Any,
    teacher: Any,
    teacher_weight: Any,
    options: Options,
    block_t: int | None,
    block_v: int | None,
    device: tk.Device,
) -> dict[str, int]:
    """`parts` with which all programs end soonest; 1 where a second pass needs the sums of all words."""
    if options.divergence == "jensen_shannon":
        return {"parts": 1}
    blocks = _cuda(hidden, weight, teacher, teacher_weight, options, device)
    programs = tk.cdiv(hidden.shape[0], block_t or blocks["block_t"])
    return {"parts": soonest_parts(programs, tk.cdiv(weight.shape[1], block_v or blocks["block_v"]), device.cores)}


@distillation_parts.schedule("cpu")
def _cpu(hidden: Any, weight: Any, teacher: Any, teacher_weight: Any) -> dict[str, int]:
    """`block_t`, `block_v`, `block_d` and `block_e` of up to 1024: tiles of logits and weights fit the cache."""
    return _even(hidden, weight, teacher, 1024)


@distillation_parts.schedule("cpu:llvm")
def _llvm(hidden: Any, weight: Any, teacher: Any, teacher_weight: Any) -> dict[str, int]:
    """`block_t`, `block_v`, `block_d` and `block_e` of up to 256: tiles of logits and weights fit a core's cache."""
    return _even(hidden, weight, teacher, 256)


def _even(hidden: Any, weight: Any, teacher: Any, side: int) -> dict[str, int]:
    tokens, width = hidden.shape
    sizes = {"block_t": tokens, "block_v": weight.shape[1], "block_d": width, "block_e": teacher.shape[1]}
    return {name: even(size, side) for name, size in sizes.items()}


@distillation_parts.schedule("cuda")
def _cuda(
    hidden: Any, weight: Any, teacher: Any, teacher_weight: Any, options: Options, device: tk.Device
) -> dict[str, int]:
    """Half a tile of cross entropy's, for registers hold two sums; shallow where threads copy float32 one by one.

    On sm_90 a tile has 128 tokens if logits are plain products and rows are copied well: by the static estimate 0.67 of
    the time of 64 tokens, whose copies take longer than their products. A teacher's own logits would spill.
    """
    itemsize, words = hidden.dtype.itemsize, weight.shape[1]
    block_v, stages = (32, 2) if itemsize > 2 else (128, 3) if copies_well(hidden.shape[1], itemsize) else (32, 3)
    plain = (options.softcap, options.teacher_softcap, options.temperature) == (None, None, 1)
    plain = plain and options.divergence != "jensen_shannon" and copies_well(words, itemsize)
    large = block_v == 128 and plain and teacher_weight is not None and device.matrix_unit == "wgmma"
    deepest = 16 if itemsize > 2 and not copies_well(words, itemsize) else 128 // itemsize
    return {
        "block_t": power_of_two(hidden.shape[0], 128 if large else 64, 16),
        "block_v": block_v,
        "block_d": min(deepest, depth(hidden.shape[1], itemsize)),
        "block_e": min(deepest, depth(teacher.shape[1], itemsize)),
        "num_warps": 8,
        "num_stages": stages,
    }


@distillation_parts.schedule("tpu")
def _tpu(hidden: Any, weight: Any, teacher: Any, teacher_weight: Any) -> dict[str, int]:
    """Blocks for two tiles of logits of 1 MiB; `block_d` and `block_e` have up to 2048 elements of the inner dims."""
    widest = max(hidden.shape[1], teacher.shape[1] if teacher_weight is not None else 0)
    block_t, block_v = tpu_tile(hidden, weight.shape[1], 2 * widest * hidden.dtype.itemsize, 1)
    return {
        "block_t": block_t,
        "block_v": block_v,
        "block_d": tiled(hidden.shape[1], 2048, 128),
        "block_e": tiled(teacher.shape[1], 2048, 128),
    }
