"""The public function `sample_hidden`: tokens drawn from logits that are never in memory."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from tilekern.authoring import advise_instead_of_gathers, hide_frames, takes_python_numbers
from tilekern.kernels.checks import as_rows, softcap_of_scores
from tilekern.kernels.quantized_array import QuantizedArray
from tilekern.kernels.sample import checks
from tilekern.kernels.sample.best_of_parts import best_of_parts, best_tokens, certain_token
from tilekern.kernels.sample.completed import certain_tokens_of_filters, completed_tokens, remaining_tokens
from tilekern.kernels.sample.operands import operands_of
from tilekern.kernels.sample.part_candidates import candidates_of_parts
from tilekern.kernels.sample.product import Form

hide_frames(__file__)

for _kernel in (best_of_parts, candidates_of_parts, completed_tokens):
    advise_instead_of_gathers(
        _kernel,
        "for a weight that devices divide by vocabulary call tilekern.distributed.vocab_parallel_sample_hidden in "
        "jax.shard_map: it draws the same tokens, and the weight stays where it is",
    )


@takes_python_numbers
def sample_hidden(
    hidden: jax.Array,
    weight: jax.Array | QuantizedArray,
    key: jax.Array,
    *,
    bias: jax.Array | None = None,
    transpose_weight: bool = False,
    softcap: float | None = None,
    temperature: jax.Array | float = 1.0,
    top_k: jax.Array | int | None = None,
    top_p: jax.Array | float | None = None,
    min_p: jax.Array | float | None = None,
    counts: jax.Array | None = None,
    repetition_penalty: jax.Array | float | None = None,
    presence_penalty: jax.Array | float | None = None,
    frequency_penalty: jax.Array | float | None = None,
    target: str | None = None,
    block_v: int | None = None,
    block_d: int | None = None,
) -> jax.Array:
    """A token for each row of hidden @ weight, drawn as `sample` draws it; the logits are never in memory.

    The token is that of `sample` for the same logits and key. Logits are sums in float32 and are not rounded to the
    dtype of hidden; the order of a sum depends on the target and on the blocks.

    Tiles of rows read the weight once. Without filters this draws all rows but about one of 10,000, whose two best
    tokens are too close. With `top_k` or `min_p` it draws all rows whose drawable tokens are among its candidates, at
    least 2048 logits of each row. `top_p` without these two, and all rows that are left, have a program for each row,
    which reads the weight twice as a rule, and up to 34 times if the candidates do not suffice.

    On TPUs the rows that are left are drawn in rounds: the logits of up to 16 rows are in memory at a time, for `top_p`
    alone up to 2^22 logits.

    Devices may divide the rows. Under `jax.jit` they gather a weight that they divide, with a
    `tilekern.errors.GatherWarning`; `tilekern.distributed.vocab_parallel_sample_hidden` leaves it where it is.

    Args:
      hidden: [*B, D], float32, bfloat16, float16 or float64.
      weight: [D, V] of the same dtype, V up to 2^19; with `transpose_weight` [V, D]. Or a `QuantizedArray` of this
        shape, of 8 or 4 bits, without zero points, for hidden of up to 32 bits: it is multiplied as in
        `quantized_matmul`; the dequantised weight is in memory only for scales of fewer than 16 neighbours of D.
      key: as for `sample`.
      bias: float [V], added to the logits before the softcap.
      transpose_weight: True if weight is [V, D], as the embedding of tied weights is; no copy is made of it.
      softcap: logits become softcap * tanh(logits / softcap) before the penalties; from 1e-30 to 1e30.
      temperature: as for `sample`.
      top_k: as for `sample`.
      top_p: as for `sample`.
      min_p: as for `sample`.
      counts: integers [*B, V], as for `sample`.
      repetition_penalty: as for `sample`.
      presence_penalty: as for `sample`.
      frequency_penalty: as for `sample`.
      target: lower for this target's blocks, e.g. "cpu:xla".
      block_v: tokens of a tile, instead of the schedule's.
      block_d: elements of the inner dim in a tile.

    Returns:
      int32[*B], from 0 to V - 1.

    Raises:
      tilekern.errors.ArgumentError: shapes or dtypes do not fit, or a number is out of its range.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.sample import sample_hidden
      >>> hidden, embedding = jnp.eye(2, 4), jnp.eye(7, 4)[::-1]
      >>> sample_hidden(hidden, embedding, jax.random.key(0), transpose_weight=True, temperature=0.0)
      Array([6, 5], dtype=int32)
    """
    form = Form(softcap_of_scores("sample_hidden", softcap), transpose_weight)
    operands = operands_of("sample_hidden", hidden, weight, bias, form)
    batch, vocabulary = hidden.shape[:-1], form.words(operands.weight)
    keys = checks.keys_of_rows("sample_hidden", key, batch)
    rates = checks.rates_of_rows("sample_hidden", batch, vocabulary, temperature, top_k, top_p, min_p)
    penalties = checks.penalties_of_rows(
        "sample_hidden", batch, vocabulary, counts, repetition_penalty, presence_penalty, frequency_penalty
    )
    rows = math.prod(batch)
    if rows == 0:
        return jnp.zeros(batch, jnp.int32)
    words = as_rows(keys)
    options: dict[str, Any] = {"form": form, "target": target, "block_d": block_d}
    if rates.top_k is not None or rates.min_p is not None:
        tokens = certain_tokens_of_filters(operands, words, rates, penalties, **options)
    elif rates.top_p is None:
        best = best_tokens(operands, words, rates.scale, penalties, **options, block_v=block_v)
        tokens = certain_token(*best, rates.scale)
    else:
        tokens = jnp.full(rows, -1, jnp.int32)
    return remaining_tokens(operands, words, rates, penalties, tokens, **options, block_v=block_v).reshape(batch)
