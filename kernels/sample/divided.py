"""The steps of `sample_hidden` on a device that has a part of the vocabulary: `tilekern.distributed` exchanges results.

Tokens are numbered in the whole vocabulary. The proof of `best_of_parts` holds for every division in parts, so it holds
for parts of devices. A token that is no candidate of any device is at most the largest `dropped` of all devices.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import tilekern as tk
from tilekern.kernels.sample.arguments import Penalties
from tilekern.kernels.sample.best_of_parts import cpu_blocks, cuda_blocks, tpu_blocks
from tilekern.kernels.sample.fixed_point import ordered
from tilekern.kernels.sample.part_candidates import candidates_of_parts, of_each_row, parts_of_filters_cuda
from tilekern.kernels.sample.product import Form, Operands, Product
from tilekern.kernels.sample.row import penalized_logits

CANDIDATES = 256
"""Candidates of a device, at most as many as one part has: few models are sampled with a larger `top_k`."""


def _candidates(operands: Operands, *unused: Any, **options: Any) -> tuple[Any, Any, Any]:
    rows = operands.hidden.shape[0]
    tokens = jax.ShapeDtypeStruct((rows, CANDIDATES), jnp.int32)
    logits = jax.ShapeDtypeStruct((rows, CANDIDATES), jnp.float32)
    return tokens, logits, jax.ShapeDtypeStruct((rows,), jnp.int32)


@tk.op(out_type=_candidates)
def largest_tokens(
    operands: Operands, penalties: Penalties | None, *, form: Form, block_d: int | None = None, parts: tk.Block = 8
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The candidates of each row for `top_k` and `min_p`: tokens int32[B, 256] and their logits float32[B, 256].

    The third result, int32[B], is the largest logit, by `ordered`, of all tokens that are no candidates. A candidate of
    -inf may be no token.
    """
    tokens, of_lanes, dropped = candidates_of_parts(operands, penalties, form=form, parts=parts, block_d=block_d)
    numbers, logits, dropped = of_each_row(tokens, of_lanes, dropped)
    # NaN is no candidate, and would be the first of `top_k`.
    logits = jnp.where(jnp.isnan(logits), -jnp.inf, logits)
    most, places = lax.top_k(logits, min(CANDIDATES + 1, logits.shape[1]))
    if logits.shape[1] > CANDIDATES:
        dropped = jnp.maximum(dropped, ordered(most[:, CANDIDATES]))
    numbers = jnp.take_along_axis(numbers, places[:, :CANDIDATES], axis=1)
    return numbers + operands.first, most[:, :CANDIDATES], dropped


largest_tokens.schedule("cuda")(parts_of_filters_cuda)


def _logits(operands: Operands, *unused: Any, form: Form) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((operands.hidden.shape[0], form.words(operands.weight)), jnp.float32)


@tk.kernel(out_type=_logits)
def penalized_products(
    operands: Operands,
    penalties: Penalties | None,
    out: tk.Ref,
    *,
    form: Form,
    block_b: tk.Block = 64,
    block_v: tk.Block = 128,
    block_d: tk.Block = 64,
) -> None:
    """Operands of logits [B, V] -> float32[B, V]: the logits behind their penalties, in memory."""
    logits = Product(operands, form, block_d)
    i, j = tk.parallel(logits.shape[0], block_b), tk.parallel(logits.shape[1], block_v)
    out[i, j] = penalized_logits(logits, penalties, i, j)


penalized_products.schedule("cpu")(cpu_blocks)
penalized_products.schedule("cuda")(cuda_blocks)
penalized_products.schedule("tpu")(tpu_blocks)
