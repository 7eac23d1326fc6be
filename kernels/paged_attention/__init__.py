"""Attention to a cache in pages: `ragged_paged_attention` for any tokens, `paged_attention` for a step of decoding.

`write_pages` appends keys and values to the cache, `copy_pages` copies whole pages.
"""

from tilekern.kernels.paged_attention import schedules as schedules  # the blocks of the kernels
from tilekern.kernels.paged_attention.api import paged_attention, ragged_paged_attention
from tilekern.kernels.paged_attention.pages import copy_pages, write_pages
from tilekern.kernels.paged_attention.reference import reference, write_reference

__all__ = ["copy_pages", "paged_attention", "ragged_paged_attention", "reference", "write_pages", "write_reference"]
