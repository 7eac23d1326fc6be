"""Attention to a cache in pages: `ragged_paged_attention` for any tokens, `paged_attention` for a step of decoding."""

from tilekern.kernels.paged_attention import schedules as schedules  # the blocks of the kernels
from tilekern.kernels.paged_attention.api import paged_attention, ragged_paged_attention
from tilekern.kernels.paged_attention.reference import reference

__all__ = ["paged_attention", "ragged_paged_attention", "reference"]
