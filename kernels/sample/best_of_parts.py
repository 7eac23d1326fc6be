"""The best tokens of parts of the vocabulary, in one pass over the weight, and a proof that the best one is drawn.

`sample` draws the token with the largest integer score S = E + G. E = (x - best) scale is log2 of a
token's probability over the largest probability, in units of 2^-20, and G a number of the Gumbel distribution. One pass
does not know `best`, so it compares floats A = x scale + G. For two tokens, A - A' is S - S' but for rounding:

    E     is within 9 of (x - best) scale: two roundings, one cut, of numbers up to 2^26. A token below 2^-64 of the
          best one's probability, whose E is larger, is not drawn, for -4.5 <= G 2^-20 <= 32.
    A     is within 2^-23 |A| + 23 of x scale + G, with |A| of the largest one: three roundings

Thus the token of the largest A is drawn if the second largest one is smaller by 64 + 2^-22 |A|. `is_certain` asks for
twice as much. Of 10,000 rows about one is not certain; another kernel draws its token.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.blocks import depth, even, power_of_two, soonest_parts, tiled
from tilekern.kernels.ragged_dot.scaled import whole_bytes
from tilekern.kernels.sample.arguments import Penalties
from tilekern.kernels.sample.fixed_point import LOWEST, from_ordered, gumbel, ordered
from tilekern.kernels.sample.kernel import NO_TOKEN
from tilekern.kernels.sample.product import Form, Operands, Product
from tilekern.kernels.sample.row import LEAST, of_rows, penalized_logits

_LARGE = 2.0**126
"""Logits from here on have no certain order: their differences may be infinite."""


def part_of(words: int, parts: int, block_v: int) -> tuple[Any, Any]:
    """The number of a program's part of the vocabulary, and the axis of the tiles of the part."""
    p = tk.parallel(parts)
    size = tk.cdiv(tk.cdiv(words, block_v), parts) * block_v
    return p, tk.serial(words, block_v, start=p * size, stop=(p + 1) * size)


def _of_parts(operands: Operands, *unused: Any, parts: int, **options: Any) -> tuple[Any, Any, Any]:
    out = jax.ShapeDtypeStruct((parts, operands.hidden.shape[0]), jnp.int32)
    return out, out, out


@tk.kernel(out_type=_of_parts)
def best_of_parts(
    operands: Operands,
    keys: tk.Ref,
    scale: tk.Ref,
    penalties: Penalties | None,
    best: tk.Ref,
    tokens: tk.Ref,
    second: tk.Ref,
    *,
    form: Form,
    parts: int,
    block_b: tk.Block = 64,
    block_v: tk.Block = 128,
    block_d: tk.Block = 64,
) -> None:
    """Operands of logits [B, V], keys uint32[B, 2], scale float32[B] -> three arrays int32[parts, B].

    Args:
      operands: of the logits.
      keys: of the rows.
      scale: as in `Rates`.
      penalties: of the logits, or None.
      best: the largest score of each part by `ordered`: A; of greedy rows x. `LEAST` of a part without tokens.
      tokens: the token with this score; of equal ones the first.
      second: the largest score of the part's other tokens.
      form: of the logits.
      parts: of the vocabulary, of equal size up to a tile.
      block_b: rows of a tile.
      block_v: tokens of a tile.
      block_d: elements of the inner dim in a tile.
    """
    logits = Product(operands, form, block_d)
    rows, words = logits.shape
    p, columns = part_of(words, parts, block_v)
    i = tk.parallel(rows, block_b)
    key_data = keys[i, 0][:, None], keys[i, 1][:, None]
    factor = of_rows(scale[i])

    def step(j: tk.Tile, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, token, below = carry
        x = penalized_logits(logits, penalties, i, j)
        drawn = x * factor + gumbel(tk.random_bits(key_data, logits.numbers(j)[None, :])).astype(jnp.float32)
        drawn = jnp.where((jnp.abs(x) >= _LARGE) & (x != -jnp.inf), jnp.inf, drawn)
        scores = jnp.where(j.valid[None, :], ordered(jnp.where(factor == jnp.inf, x, drawn)), LEAST)
        most = scores.max(axis=1)
        first = jnp.where(scores == most[:, None], j.indices[None, :], NO_TOKEN).min(axis=1)
        lower = jnp.where(j.indices[None, :] == first[:, None], LEAST, scores).max(axis=1)
        exceeds = most > top  # the tokens before have smaller numbers
        below = jnp.maximum(jnp.where(exceeds, top, below), jnp.where(exceeds, lower, most))
        return jnp.maximum(most, top), jnp.where(exceeds, first, token), below

    least = tk.full(i, LEAST, jnp.int32)
    best[p, i], tokens[p, i], second[p, i] = tk.fold(columns, step, (least, tk.zeros(i, jnp.int32), least))


def _three_of_rows(operands: Operands, *unused: Any, **options: Any) -> tuple[Any, Any, Any]:
    of_rows = jax.ShapeDtypeStruct(operands.hidden.shape[:1], jnp.int32)
    return of_rows, of_rows, of_rows


@tk.op(out_type=_three_of_rows)
def best_tokens(
    operands: Operands,
    keys: jax.Array,
    scale: jax.Array,
    penalties: Penalties | None,
    *,
    form: Form,
    block_v: int | None = None,
    block_d: int | None = None,
    parts: tk.Block = 1,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """int32[B] each: the largest score of each row without filters, its token, and the second largest score."""
    blocks = {"block_v": block_v, "block_d": block_d}
    of_parts = best_of_parts(operands, keys, scale, penalties, form=form, parts=parts, **blocks)
    top, token, below = best_of(*of_parts)
    return top, token if operands.first is None else token + operands.first, below


def merged(best: jax.Array, tokens: jax.Array, second: jax.Array, scale: jax.Array) -> jax.Array:
    """int32[B]: the token of the best part, of equal parts of the first; -1 where `is_certain` is False."""
    return certain_token(*best_of(best, tokens, second), scale)


def certain_token(top: jax.Array, token: jax.Array, below: jax.Array, scale: jax.Array) -> jax.Array:
    """int32[B]: the token of the largest score `top`, -1 where `is_certain` is False."""
    return jnp.where(is_certain(top, below, scale), token, -1)


def best_of(best: jax.Array, tokens: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """int32[B] each: the three results of `best_of_parts` for all parts [parts, B] as one; of equal parts the first."""
    part = jnp.argmax(best, axis=0)[None]
    is_best = jnp.arange(best.shape[0])[:, None] == part
    below = jnp.where(is_best, second, best).max(axis=0)
    top, token = (jnp.take_along_axis(a, part, axis=0)[0] for a in (best, tokens))
    return top, token, below


def is_certain(top: jax.Array, below: jax.Array, scale: jax.Array) -> jax.Array:
    """bool[B]: True if the token of the largest score `top` has the largest integer score; `below` is the second one.

    Scores of greedy rows are compared as they are, and always certain.
    """
    most, next_one = from_ordered(top), from_ordered(jnp.maximum(below, LOWEST))
    size = jnp.abs(most)
    gap = (size < 2.0**40) & (scale < 2.0**100) & (most - next_one > 128 + size * 2.0**-21)
    return gap | (scale == jnp.inf)


# --- blocks -----------------------------------------------------------------------------------------------------------


@best_tokens.schedule("cpu")
def _parts_cpu(operands: Operands, *arguments: Any, form: Form) -> dict[str, int]:
    """Parts for few rows, so that several cores read the weight."""
    return {"parts": max(1, min(8, form.words(operands.weight) // 1024)) if operands.hidden.shape[0] <= 64 else 1}


@best_tokens.schedule("cuda")
def _parts_cuda(operands: Operands, *arguments: Any, form: Form, device: tk.Device) -> dict[str, int]:
    """As many parts as let all programs end soonest: a single row keeps all multiprocessors busy."""
    programs, tiles = tk.cdiv(operands.hidden.shape[0], 64), tk.cdiv(form.words(operands.weight), 128)
    return {"parts": soonest_parts(programs, tiles, device.cores)}


@best_of_parts.schedule("cpu")
def cpu_blocks(operands: Operands, *arguments: Any, form: Form) -> dict[str, int]:
    """A tile of logits and a tile of weights fit the cache of a core."""
    rows, width = operands.hidden.shape
    blocks = {"block_b": even(rows, 64), "block_v": even(form.words(operands.weight), 256)}
    return whole_bytes(blocks | {"block_d": even(width, 256)}, operands.weight)


@best_of_parts.schedule("cuda")
def cuda_blocks(operands: Operands, *arguments: Any, device: tk.Device) -> dict[str, int]:
    """Few rows: a program has its sums, scores and random bits in registers. 64 rows spill with mma alone."""
    rows, width = operands.hidden.shape
    itemsize = operands.hidden.dtype.itemsize
    most = 64 if itemsize == 2 and device.matrix_unit != "mma" else 32
    block_b, block_v = power_of_two(rows, most, 16), 64 if itemsize > 2 else 128
    return {"block_b": block_b, "block_v": block_v, "block_d": depth(width, itemsize), "num_warps": 8, "num_stages": 3}


@best_of_parts.schedule("tpu")
def tpu_blocks(operands: Operands, *arguments: Any, form: Form) -> dict[str, int]:
    """Whole columns of the weight where a tile takes at most 8 MiB."""
    rows, width = operands.hidden.shape
    block_v = tiled(form.words(operands.weight), 512, 128)
    whole = width * block_v * operands.hidden.dtype.itemsize <= 8 << 20
    block_d = max(1, width) if whole else tiled(width, 2048, 128)
    return whole_bytes({"block_b": tiled(rows, 128, 128), "block_v": block_v, "block_d": block_d}, operands.weight)
