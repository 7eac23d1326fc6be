"""The arguments of the kernels: a number for each row, and what is known of the tokens before."""

from __future__ import annotations

from typing import Any, NamedTuple


class Rates(NamedTuple):
    """How the rows of the logits are sampled; None for a rate that no row has.

    Attributes:
      scale: float32[B], 2^20 log2(e) / temperature; inf for greedy rows.
      top_k: int32[B], at least 1.
      top_p: uint32[B], in units of 2^-16; 2^16 keeps all tokens.
      min_p: int32[B], log2 of the least probability beside the largest one, in units of 2^-20.
    """

    scale: Any
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None


class Penalties(NamedTuple):
    """What is done to the logits of tokens that occurred before; None for a penalty that no row has.

    Attributes:
      counts: int32[B, V], how often each token was generated; negative for a token of the prompt alone.
      repetition: float32[B, 2]: the factor of negative logits, and that of positive ones.
      presence: float32[B].
      frequency: float32[B, 2], the upper 12 bits of the penalty's significand, and the rest.
    """

    counts: Any
    repetition: Any = None
    presence: Any = None
    frequency: Any = None
