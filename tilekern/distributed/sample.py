"""Tokens drawn where several devices hold parts of the vocabulary: the weight of the logits never moves.

Each device computes what its own tokens can say about a row: the two best scores, or the tokens with the largest
logits. These few numbers of all devices prove the token of nearly every row. For all other rows devices exchange
logits, so that each has some rows whole. The bits of a token depend on its number in the whole vocabulary alone.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from tilekern._meshes import varying_like
from tilekern.authoring import hide_frames, takes_python_numbers
from tilekern.distributed.axes import axis_size
from tilekern.kernels.checks import as_rows, refusal, softcap_of_scores
from tilekern.kernels.quantized_array import QuantizedArray
from tilekern.kernels.sample import checks
from tilekern.kernels.sample.best_of_parts import best_tokens, merged
from tilekern.kernels.sample.divided import largest_tokens, penalized_products
from tilekern.kernels.sample.kernel import sampled_tokens
from tilekern.kernels.sample.operands import operands_of
from tilekern.kernels.sample.part_candidates import tokens_of_candidates
from tilekern.kernels.sample.product import Form
from tilekern.kernels.sample.rounds import FEW_ROWS, LOGITS, Draw, drawn_in_rounds

hide_frames(__file__)

_NAME = "vocab_parallel_sample_hidden"


class _Devices(NamedTuple):
    """Devices that divide a vocabulary.

    Attributes:
      axis: the mesh axis.
      size: the number of devices.
      vocabulary: the number of tokens of all devices, without padding.
    """

    axis: str
    size: int
    vocabulary: int

    def of_all(self, x: jax.Array) -> jax.Array:
        """[n, ...]: x of each device, by a sum, whose type does not vary over the axis."""
        blocks = jnp.zeros((self.size, *x.shape), x.dtype).at[lax.axis_index(self.axis)].set(x)
        return cast(jax.Array, lax.psum(blocks, self.axis))


@takes_python_numbers
def vocab_parallel_sample_hidden(
    hidden: jax.Array,
    weight: jax.Array | QuantizedArray,
    key: jax.Array,
    *,
    axis_name: str,
    vocabulary: int | None = None,
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
    """`sample_hidden` inside of `jax.shard_map`, where each device of an axis holds some tokens of the vocabulary.

    `sample_hidden` on one device draws the same tokens for the same logits and key. The weight stays where it is.
    Without filters devices exchange three numbers for each row, which decide all rows but about one of 10,000. With
    `top_k` or `min_p` devices exchange 513 numbers, which decide a row if all its drawable tokens are among the 256
    largest logits of each device. For undecided rows, and for all rows of `top_p` without these two, devices exchange
    logits: each device draws some rows, up to 2^22 logits at a time.

    Args:
      hidden: [*B, D], the same on all devices of the axis: float32, bfloat16, float16 or float64.
      weight: [D, V / n] of the same dtype, this device's part of V tokens, up to 2^19: device i of n begins at token
        i V / n. With `transpose_weight` [V / n, D]; or a `QuantizedArray` of this shape, as for `sample_hidden`.
      key: as for `sample`, the same on all devices of the axis.
      axis_name: the mesh axis that divides the vocabulary, over n devices.
      vocabulary: the number of tokens, if the last ones of the V are padding, which is never drawn; None for V.
      bias: float [V / n], of this device's tokens, as for `sample_hidden`.
      transpose_weight: as for `sample_hidden`.
      softcap: as for `sample_hidden`.
      temperature: as for `sample`; all rates and penalties are the same on all devices of the axis.
      top_k: as for `sample`.
      top_p: as for `sample`.
      min_p: as for `sample`.
      counts: integers [*B, V / n], of this device's tokens, as for `sample`.
      repetition_penalty: as for `sample`.
      presence_penalty: as for `sample`.
      frequency_penalty: as for `sample`.
      target: lower for this target's blocks, e.g. "cpu:xla".
      block_v: tokens of a tile, instead of the schedule's.
      block_d: elements of the inner dim in a tile.

    Returns:
      int32[*B], numbers in the whole vocabulary, the same on all devices of the axis.

    Raises:
      tilekern.errors.ArgumentError: shapes or dtypes do not fit, a number is out of its range, or the axis is unknown.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> from tilekern.distributed import vocab_parallel_sample_hidden
      >>> mesh = jax.make_mesh((1,), ("model",), (AxisType.Auto,), devices=jax.devices()[:1])
      >>> local = lambda h, w, key: vocab_parallel_sample_hidden(h, w, key, axis_name="model", temperature=0.0)
      >>> draw = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(None, "model"), P()), out_specs=P())
      >>> draw(jnp.eye(2, 4), jnp.eye(4, 7)[:, ::-1], jax.random.key(0))
      Array([6, 5], dtype=int32)
    """
    size = axis_size(axis_name, _NAME)
    form = Form(softcap_of_scores(_NAME, softcap), transpose_weight)
    operands = operands_of(_NAME, hidden, weight, bias, form, size)
    batch, words = hidden.shape[:-1], form.words(operands.weight)
    devices = _Devices(axis_name, size, _vocabulary(vocabulary, size * words))
    keys = as_rows(checks.keys_of_rows(_NAME, key, batch))
    rates = checks.rates_of_rows(_NAME, batch, devices.vocabulary, temperature, top_k, top_p, min_p)
    penalties = checks.penalties_of_rows(
        _NAME, batch, words, counts, repetition_penalty, presence_penalty, frequency_penalty
    )
    if math.prod(batch) == 0:
        return jnp.zeros(batch, jnp.int32)
    first = lax.axis_index(axis_name).astype(jnp.int32)[None] * words
    operands = operands._replace(first=first)
    if devices.vocabulary < size * words:
        operands = operands._replace(stop=devices.vocabulary - first)
    draw = Draw(operands, keys, rates, penalties)
    options: dict[str, Any] = {"form": form, "target": target, "block_d": block_d}
    if rates.top_k is not None or rates.min_p is not None:
        tokens, share = _by_candidates(devices, draw, options), -(-FEW_ROWS // size)
    elif rates.top_p is None:
        tokens, share = _by_scores(devices, draw, options | {"block_v": block_v}), -(-FEW_ROWS // size)
    else:
        tokens, share = _no_tokens(devices, draw), math.prod(batch)
    return _by_logits(devices, draw, tokens, share, options | {"block_v": block_v}).reshape(batch)


def _vocabulary(vocabulary: int | None, padded: int) -> int:
    """The number of tokens without padding.

    Raises:
      ArgumentError: it is not from 1 to the number with padding.
    """
    if vocabulary is None:
        return padded
    if 1 <= vocabulary <= padded:
        return vocabulary
    fix = "leave it out, unless the weight is padded at its end so that devices divide it evenly"
    raise refusal(_NAME, "vocabulary", f"an int from 1 to {padded}, the tokens of all devices", vocabulary, fix)


def _no_tokens(devices: _Devices, draw: Draw) -> jax.Array:
    """int32[B] of -1, of the type of tokens: it varies over the axes over which operands do, but not over this one."""
    tokens = jnp.full(draw.keys.shape[0], -1, jnp.int32)
    return varying_like(tokens, [jax.typeof(x) for x in jax.tree.leaves(draw)], without=[devices.axis])


def _by_scores(devices: _Devices, draw: Draw, options: dict[str, Any]) -> jax.Array:
    """int32[B]: the token of each row without filters, -1 where two scores are too close."""
    own = jnp.stack(best_tokens(draw.operands, draw.keys, draw.rates.scale, draw.penalties, **options))
    best, tokens, second = jnp.moveaxis(devices.of_all(own), 1, 0)
    return merged(best, tokens, second, draw.rates.scale)


def _by_candidates(devices: _Devices, draw: Draw, options: dict[str, Any]) -> jax.Array:
    """int32[B]: the token of each row with `top_k` or `min_p`, -1 where candidates do not tell."""
    tokens, logits, dropped = largest_tokens(draw.operands, draw.penalties, **options)
    own = jnp.concatenate([tokens, lax.bitcast_convert_type(logits, jnp.int32), dropped[:, None]], axis=1)
    gathered = devices.of_all(own)
    tokens, bits = (jnp.moveaxis(a, 0, 1).reshape(own.shape[0], -1) for a in jnp.split(gathered[..., :-1], 2, axis=-1))
    logits = lax.bitcast_convert_type(bits, jnp.float32)
    drawn = tokens_of_candidates(
        logits, tokens, gathered[..., -1].max(axis=0), draw.keys, draw.rates, target=options["target"]
    )
    # Where all logits are -inf, a candidate may be no token.
    return jnp.where((logits > -jnp.inf).any(axis=1), drawn, -1)


def _by_logits(devices: _Devices, draw: Draw, tokens: jax.Array, share: int, options: dict[str, Any]) -> jax.Array:
    """int32[B]: the tokens, and a drawn token for each row that has -1, whose logits devices exchange.

    A round computes the logits of n `share` rows at most, for n devices. A device then has `share` rows whole, draws
    their tokens, and tells all devices. There is no round if all rows have tokens.
    """
    axis, size, vocabulary = devices
    share = max(1, min(share, -(-tokens.shape[0] // size), LOGITS // vocabulary))
    of_sample = {name: options[name] for name in ("target", "block_v")}

    def draw_at(places: jax.Array) -> jax.Array:
        of_round = draw.at(places)
        logits = penalized_products(of_round.operands, of_round.penalties, **options)
        own = of_round.at(lax.axis_index(axis) * share + jnp.arange(share, dtype=jnp.int32))
        whole = lax.all_to_all(logits, axis, 0, 1, tiled=True)[:, :vocabulary]
        of_rows = sampled_tokens(whole, own.keys, own.rates, None, **of_sample)
        return devices.of_all(of_rows).reshape(-1)

    return drawn_in_rounds(tokens, size * share, draw_at)
