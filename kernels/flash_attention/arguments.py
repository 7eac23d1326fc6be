"""Arguments of the kernels of flash attention besides query, key and value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Config:
    """The static arguments of an attention.

    Attributes:
      scale: of the dot products.
      causal: whether query i attends to keys j <= i + offset only.
      offset: the position of the first query among the keys, plus that of `Extras.q_offset`.
      window: query i attends to keys from i + offset - left to i + offset + right; None: unbounded.
      softcap: logits are softcap * tanh(logits / softcap).
      dropout_rate: the share of weights that are dropped.
      dropout_broadcast: whether all elements of the batch and all heads drop the same pairs of query and key.
      precision: of the products of query and key, and of weights and value, as for `tk.dot`.
      blocks: for the kernels of derivatives, as pairs of name and size.
    """

    scale: float
    causal: bool = False
    offset: int = 0
    window: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    dropout_rate: float = 0.0
    dropout_broadcast: bool = False
    precision: tuple[str | None, str | None] = (None, None)
    blocks: tuple[tuple[str, int], ...] = ()

    @property
    def positional(self) -> bool:
        """True if masks depend on the offset."""
        return self.causal or self.window != (None, None)


class Residuals(NamedTuple):
    """Two numbers for each row, [B, T, N] in the accumulator's dtype, from which `Scores.weights` computes its weights.

    A logsumexp in one number would be rounded to half a unit in its last place; with logits of 10^7 this changes
    weights by a factor of about e. A row that attends to nothing has zeros.

    Attributes:
      largest: the largest logit, as `Scores.logits` has it.
      log_sum: the base-2 logarithm of the sum of 2^(factor (logit - largest)).
    """

    largest: Any
    log_sum: Any

    def at(self, *index: Any) -> Residuals:
        """The residuals of some rows."""
        return Residuals(self.largest[index], self.log_sum[index])


class Extras(NamedTuple):
    """The arrays that scores depend on besides query and key; None where a call has none.

    Attributes:
      bias: float [B or 1, N or 1, T or 1, S or 1].
      mask: bool, of such a shape; True: attend.
      q_offset: int32[B].
      segments: (int32[B, T], int32[B, S]), equal ids attend.
      ranges: for each query the first key of its segment, and the last but one: int32[B, T] twice. For the kernel that
        loops over queries the same for each key.
      q_lengths: int32[B].
      kv_lengths: int32[B].
      sinks: float [N].
      dropout_key: uint32[2].
      mask_mod: a `jax.tree_util.Partial` of arrays.
      score_mod: a `jax.tree_util.Partial` of arrays.
      block_map: a `BlockMap` of `mask`, or of `mask_mod`.
    """

    bias: Any = None
    mask: Any = None
    q_offset: Any = None
    segments: Any = None
    ranges: Any = None
    q_lengths: Any = None
    kv_lengths: Any = None
    sinks: Any = None
    dropout_key: Any = None
    mask_mod: Any = None
    score_mod: Any = None
    block_map: Any = None


class Tangents(NamedTuple):
    """Tangents of the arrays that scores and values depend on, each like its primal; None is zero.

    Attributes:
      query: [B, T, N, H].
      key: [B, S, K, H].
      value: [B, S, K, Hv].
      bias: like `Extras.bias`.
      sinks: [N].
      carried: of the arrays that `Extras.score_mod` carries, in their order.
    """

    query: Any = None
    key: Any = None
    value: Any = None
    bias: Any = None
    sinks: Any = None
    carried: tuple[Any, ...] = ()
