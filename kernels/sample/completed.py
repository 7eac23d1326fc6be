"""Tokens drawn from logits that are a product: one pass over the weight, and more passes for rows that need them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.authoring import by_rows
from tilekern.kernels.blocks import depth, even, power_of_two
from tilekern.kernels.ragged_dot.scaled import whole_bytes
from tilekern.kernels.sample.arguments import Penalties, Rates
from tilekern.kernels.sample.divided import penalized_products
from tilekern.kernels.sample.kernel import drawable_tokens, drawn_token, rates_of, sampled_tokens
from tilekern.kernels.sample.part_candidates import (
    candidates_of_parts,
    of_each_row,
    parts_of_filters_cuda,
    tokens_of_candidates,
)
from tilekern.kernels.sample.product import Form, Operands, Product
from tilekern.kernels.sample.rounds import FEW_ROWS, LOGITS, Draw, drawn_in_rounds
from tilekern.kernels.sample.row import Row


def _tokens(operands: Operands, *unused: Any, **options: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(operands.hidden.shape[:1], jnp.int32)


@tk.op(out_type=_tokens)
def certain_tokens_of_filters(
    operands: Operands,
    keys: jax.Array,
    rates: Rates,
    penalties: Penalties | None,
    *,
    form: Form,
    block_d: int | None = None,
    parts: tk.Block = 8,
) -> jax.Array:
    """int32[B]: the token of each row with `top_k` or `min_p`, -1 where the candidates of one pass do not tell."""
    tokens, of_lanes, dropped = candidates_of_parts(operands, penalties, form=form, parts=parts, block_d=block_d)
    numbers, logits, dropped = of_each_row(tokens, of_lanes, dropped)
    return tokens_of_candidates(logits, numbers, dropped, keys, rates)


certain_tokens_of_filters.schedule("cuda")(parts_of_filters_cuda)


@tk.kernel(out_type=_tokens)
def completed_tokens(
    operands: Operands,
    keys: tk.Ref,
    rates: Rates,
    penalties: Penalties | None,
    tokens: tk.Ref,
    out: tk.Ref,
    *,
    form: Form,
    block_v: tk.Block = 128,
    block_d: tk.Block = 64,
) -> None:
    """tokens int32[B] -> int32[B]: each token from 0 on as it is, and a drawn token for each row that has -1.

    A program has one row. Rows with a token are not visited. All others compute their logits once for each pass of
    `sampled_tokens`.
    """
    logits = Product(operands, form, block_d)
    r, words = tk.parallel(logits.shape[0]), logits.shape[1]
    token = tokens[r]
    stop = jnp.where(token < 0, words, 0)
    row = Row(logits, penalties, r, stop, tk.serial(words, block_v, stop=stop))
    row, drawable = drawable_tokens(row, rates_of(rates, r), block_v)
    out[r] = jnp.where(token < 0, drawn_token(row, drawable, keys[r]), token)


@tk.op(out_type=_tokens)
def remaining_tokens(
    operands: Operands,
    keys: jax.Array,
    rates: Rates,
    penalties: Penalties | None,
    tokens: jax.Array,
    *,
    form: Form,
    block_v: int | None = None,
    block_d: int | None = None,
    logits_in_memory: tk.Choice[bool] = False,
) -> jax.Array:
    """tokens int32[B] -> int32[B]: `completed_tokens`; or in rounds, each of which has the logits of a few rows."""
    options: dict[str, Any] = {"form": form, "block_v": block_v, "block_d": block_d}
    if not logits_in_memory:
        return completed_tokens(operands, keys, rates, penalties, tokens, **options)

    def of_rows(
        hidden: jax.Array, keys: jax.Array, rates: Rates, penalties: Any, tokens: jax.Array, shared: Operands
    ) -> jax.Array:
        draw, rows = Draw(shared._replace(hidden=hidden), keys, rates, penalties), tokens.shape[0]
        most = LOGITS // form.words(shared.weight)
        by_candidates = rates.top_p is None or rates.top_k is not None or rates.min_p is not None
        most = min(most, FEW_ROWS) if by_candidates else most
        # The number of rows may be a symbol: then a round has the most rows.
        size = max(1, min(most, rows) if isinstance(rows, int) else most)

        def draw_at(places: jax.Array) -> jax.Array:
            of_round = draw.at(places)
            logits = penalized_products(of_round.operands, of_round.penalties, **options)
            return sampled_tokens(logits, of_round.keys, of_round.rates, None, block_v=block_v)

        return drawn_in_rounds(tokens, size, draw_at)

    return by_rows(of_rows, (operands.hidden, keys, rates, penalties, tokens), (operands._replace(hidden=None),))


@remaining_tokens.schedule("tpu")
def _rounds_tpu(operands: Operands, *arguments: Any, form: Form) -> dict[str, bool]:
    """Rounds: the search for the least key is a loop around the tiles, and no weight is read in it.

    The plan of a TPU has no pipeline inside of another loop, so `completed_tokens` would have the weight in its memory.
    """
    return {"logits_in_memory": True}


@completed_tokens.schedule("cpu")
def _cpu(operands: Operands, *arguments: Any, form: Form) -> dict[str, int]:
    """A tile of the weight in the second-level cache."""
    blocks = {"block_v": min(form.words(operands.weight), 512), "block_d": even(operands.hidden.shape[1], 256)}
    return whole_bytes(blocks, operands.weight)


@completed_tokens.schedule("cuda")
def _cuda(operands: Operands, *arguments: Any, form: Form) -> dict[str, int]:
    """Many lanes, so that candidates suffice for `top_k` and `top_p`; with 4 warps their registers spill."""
    block_v = power_of_two(form.words(operands.weight), 256)
    block_d = depth(operands.hidden.shape[1], operands.hidden.dtype.itemsize)
    return {"block_v": block_v, "block_d": block_d, "num_warps": 8}
