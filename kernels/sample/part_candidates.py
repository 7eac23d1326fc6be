"""Candidates of parts of the vocabulary, in one pass over the weight, for `top_k` and `min_p`.

Each lane of a part's tiles holds the two largest logits among its tokens, as in a row of `sample`. `dropped` is the
largest logit that no lane holds. If all tokens that `top_k` or `min_p` leave are above it, the row is drawn from its
candidates, a few thousand numbers in the place of V logits.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.blocks import depth, even, power_of_two, soonest_parts, tiled
from tilekern.kernels.ragged_dot.scaled import whole_bytes
from tilekern.kernels.sample.arguments import Penalties, Rates
from tilekern.kernels.sample.best_of_parts import part_of
from tilekern.kernels.sample.fixed_point import LOWEST, from_ordered, ordered
from tilekern.kernels.sample.kernel import best_key, count_of, drawable_tokens, drawn_token, of_best, rates_of
from tilekern.kernels.sample.product import Form, Operands, Product
from tilekern.kernels.sample.row import LEAST, Row, penalized_logits, with_tokens

LANES = 128
"""Tokens of a tile: 8 parts of them have 1024 lanes, of which three of 64 tokens share one in 4% of all rows."""
RANKS = 2
"""Candidates of a lane."""


def _of_parts(operands: Operands, *unused: Any, parts: int, **options: Any) -> tuple[Any, Any, Any]:
    rows = operands.hidden.shape[0]
    held = jax.ShapeDtypeStruct((parts, RANKS, rows, LANES), jnp.int32)
    return held, held, jax.ShapeDtypeStruct((parts, rows), jnp.int32)


@tk.kernel(out_type=_of_parts)
def candidates_of_parts(
    operands: Operands,
    penalties: Penalties | None,
    tokens: tk.Ref,
    keys: tk.Ref,
    dropped: tk.Ref,
    *,
    form: Form,
    parts: int,
    block_b: tk.Block = 64,
    block_d: tk.Block = 64,
) -> None:
    """Operands of logits [B, V] -> tokens and keys, int32[parts, 2, B, 128], and dropped int32[parts, B].

    Args:
      operands: of the logits.
      penalties: of the logits, or None.
      tokens: for each lane of each part, its two tokens with the largest logits.
      keys: the logits of `tokens` by `ordered`; `LEAST` where a lane has fewer tokens.
      dropped: the largest key of the part's tokens that are not in `tokens`; `LEAST` if there is none.
      form: of the logits.
      parts: of the vocabulary, of equal size up to a tile.
      block_b: rows of a tile.
      block_d: elements of the inner dim in a tile.
    """
    logits = Product(operands, form, block_d)
    rows, words = logits.shape
    p, columns = part_of(words, parts, LANES)
    i = tk.parallel(rows, block_b)

    def step(j: tk.Tile, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        held, left = carry
        of_tile = jnp.where(j.valid[None, :], ordered(penalized_logits(logits, penalties, i, j)), LEAST)
        numbers = jnp.broadcast_to(j.indices[None, :], of_tile.shape)
        held, of_tile = with_tokens(held, numbers, of_tile)
        return held, jnp.maximum(left, of_tile)

    least = tk.full((i, LANES), LEAST, jnp.int32)
    init: tuple[Any, jax.Array] = ((tk.zeros((i, LANES), jnp.int32), least),) * RANKS, least
    held, left = tk.fold(columns, step, init)
    for rank, (numbers, of_lanes) in enumerate(held):
        tokens[p, rank, i, :] = numbers
        keys[p, rank, i, :] = of_lanes
    dropped[p, i] = left.max(axis=1)


def of_each_row(tokens: jax.Array, keys: jax.Array, dropped: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The results of `candidates_of_parts` as tokens int32[B, C], their logits float32[B, C], and dropped int32[B]."""
    rows = tokens.shape[2]
    numbers, of_rows = (jnp.moveaxis(a, 2, 0).reshape(rows, -1) for a in (tokens, keys))
    return numbers, from_ordered(of_rows), dropped.max(axis=0)


def _tokens(logits: Any, *unused: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(logits.shape[:1], jnp.int32)


@tk.kernel(out_type=_tokens)
def tokens_of_candidates(
    logits: tk.Ref,
    tokens: tk.Ref,
    dropped: tk.Ref,
    keys: tk.Ref,
    rates: Rates,
    out: tk.Ref,
    *,
    block_v: tk.Block = 1024,
) -> None:
    """logits float32[B, C] and tokens int32[B, C] of candidates, dropped int32[B] -> int32[B].

    The drawn token of each row, or -1 where a drawable token may be no candidate. NaN stands for no candidate. It is
    taken for a token of -inf, which is not drawn unless all are; and then the row is not certain.
    """
    r, count = tk.parallel(logits.shape[0]), logits.shape[1]
    of_row, left = rates_of(rates, r), dropped[r]
    row = Row(logits, None, r, count, tk.serial(count, block_v), tokens=tokens)
    certain = _holds_all(row, of_row, left)
    row, drawable = drawable_tokens(row, of_row, block_v)
    out[r] = jnp.where(certain, drawn_token(row, drawable, keys[r]), -1)


def _holds_all(row: Row, rates: Rates, dropped: jax.Array) -> jax.Array:
    """True if the tokens that `min_p` and `top_k` leave are candidates, where no other token is above `dropped`."""
    all_tokens = of_best(rates, best_key(row))
    # No token is left over but those of -inf, or the row is greedy and its largest logits are candidates.
    certain = (all_tokens.best > LOWEST) & (dropped <= LOWEST)
    certain = certain | ((rates.scale == jnp.inf) & (dropped < all_tokens.best))
    if rates.min_p is not None:
        certain = certain | (all_tokens.exponents(dropped) < rates.min_p)
    if rates.top_k is None:
        return certain

    def is_drawable(keys: jax.Array) -> jax.Array:
        return all_tokens(keys, all_tokens.exponents(keys))

    # The k-th largest token is above the others.
    return certain | (count_of(row, dropped + 1, is_drawable) >= rates.top_k)


# --- blocks -----------------------------------------------------------------------------------------------------------


@candidates_of_parts.schedule("cpu")
def _cpu(operands: Operands, *arguments: Any) -> dict[str, int]:
    """Blocks whose tile of candidates, [block_b, 128] int32, is in the first-level cache."""
    rows, width = operands.hidden.shape
    return whole_bytes({"block_b": even(rows, 16), "block_d": even(width, 512)}, operands.weight)


@candidates_of_parts.schedule("cuda")
def _cuda(operands: Operands, *arguments: Any) -> dict[str, int]:
    """Blocks of few rows: a program has its sums and six tiles of candidates in registers."""
    rows, width = operands.hidden.shape
    block_d = depth(width, operands.hidden.dtype.itemsize)
    return {"block_b": power_of_two(rows, 32, 16), "block_d": block_d, "num_warps": 8, "num_stages": 3}


@candidates_of_parts.schedule("tpu")
def _tpu(operands: Operands, *arguments: Any) -> dict[str, int]:
    """Blocks with the whole inner dim if 128 columns of the weight take at most 8 MiB, else 2048 elements of it.

    Two buffers of 8 MiB fill a fourth of the vector memory.
    """
    rows, width = operands.hidden.shape
    whole = width * LANES * operands.hidden.dtype.itemsize <= 8 << 20
    block_d = max(1, width) if whole else tiled(width, 2048, 128)
    return whole_bytes({"block_b": tiled(rows, 128, 128), "block_d": block_d}, operands.weight)


@tokens_of_candidates.schedule("cpu")
def _of_candidates_cpu(logits: Any, *arguments: Any) -> dict[str, int]:
    """A tile in the first-level cache."""
    return {"block_v": min(logits.shape[1], 2048)}


@tokens_of_candidates.schedule("cuda")
def _of_candidates_cuda(logits: Any, *arguments: Any) -> dict[str, int]:
    """A tile with candidates, which lie in registers."""
    return {"block_v": power_of_two(logits.shape[1], 1024), "num_warps": 16}


@tokens_of_candidates.schedule("tpu")
def _of_candidates_tpu(logits: Any, *arguments: Any) -> dict[str, int]:
    """Two registers of lanes, as for `sampled_tokens`."""
    return {"block_v": tiled(logits.shape[1], 2048, 1024)}


def parts_of_filters_cuda(operands: Operands, *arguments: Any, form: Form, device: tk.Device) -> dict[str, int]:
    """As many parts as let all programs end soonest, and at least 8, whose candidates suffice for most rows."""
    programs, tiles = tk.cdiv(operands.hidden.shape[0], 32), tk.cdiv(form.words(operands.weight), LANES)
    return {"parts": max(8, soonest_parts(programs, tiles, device.cores))}
