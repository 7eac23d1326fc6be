"""Tokens drawn from logits that are a product: one pass over the weight, and more passes for rows that need them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.blocks import depth, even, power_of_two, soonest_parts, tiled
from tilekern.kernels.ragged_dot.scaled import whole_bytes
from tilekern.kernels.sample.arguments import Penalties, Rates
from tilekern.kernels.sample.best_of_parts import best_of_parts, merged
from tilekern.kernels.sample.kernel import drawable_tokens, drawn_token, rates_of
from tilekern.kernels.sample.part_candidates import LANES, candidates_of_parts, of_each_row, tokens_of_candidates
from tilekern.kernels.sample.product import Form, Operands, Product
from tilekern.kernels.sample.row import Row


def _tokens(operands: Operands, *unused: Any, **options: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(operands.hidden.shape[:1], jnp.int32)


@tk.op(out_type=_tokens)
def certain_tokens(
    operands: Operands,
    keys: jax.Array,
    scale: jax.Array,
    penalties: Penalties | None,
    *,
    form: Form,
    block_v: int | None = None,
    block_d: int | None = None,
    parts: tk.Block = 1,
) -> jax.Array:
    """int32[B]: the token of each row without filters, -1 where one pass over the weight cannot tell which it is."""
    blocks = {"block_v": block_v, "block_d": block_d}
    best, tokens, second = best_of_parts(operands, keys, scale, penalties, form=form, parts=parts, **blocks)
    return merged(best, tokens, second, scale)


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


@certain_tokens.schedule("cpu")
def parts_of_cpu(operands: Operands, *arguments: Any, form: Form) -> dict[str, int]:
    """Parts for few rows, so that several cores read the weight."""
    return {"parts": max(1, min(8, form.words(operands.weight) // 1024)) if operands.hidden.shape[0] <= 64 else 1}


@certain_tokens.schedule("cuda")
def parts_of_cuda(operands: Operands, *arguments: Any, form: Form, device: tk.Device) -> dict[str, int]:
    """As many parts as let all programs end soonest: a single row keeps all multiprocessors busy."""
    programs, tiles = tk.cdiv(operands.hidden.shape[0], 64), tk.cdiv(form.words(operands.weight), 128)
    return {"parts": soonest_parts(programs, tiles, device.cores)}


@certain_tokens_of_filters.schedule("cuda")
def parts_of_filters_cuda(operands: Operands, *arguments: Any, form: Form, device: tk.Device) -> dict[str, int]:
    """As many parts as let all programs end soonest, and at least 8, whose candidates suffice for most rows."""
    programs, tiles = tk.cdiv(operands.hidden.shape[0], 32), tk.cdiv(form.words(operands.weight), LANES)
    return {"parts": max(8, soonest_parts(programs, tiles, device.cores))}


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


@completed_tokens.schedule("tpu")
def _tpu(operands: Operands, *arguments: Any, form: Form) -> dict[str, int]:
    """A tile of the weight of at most 4 MiB."""
    block_v = tiled(form.words(operands.weight), 1024, 128)
    return whole_bytes({"block_v": block_v, "block_d": tiled(operands.hidden.shape[1], 1024, 128)}, operands.weight)
