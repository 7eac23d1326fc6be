"""DeepSeek's multi-head latent attention, absorbed, to a cache of latents in pages: `mla_attention`.

`write_latents` appends latents to the cache; `copy_pages` of paged attention copies whole pages.
"""

from tilekern.kernels.mla_attention import schedules as schedules  # the blocks of the kernels
from tilekern.kernels.mla_attention.api import mla_attention
from tilekern.kernels.mla_attention.pages import write_latents
from tilekern.kernels.mla_attention.reference import reference, write_reference

__all__ = ["mla_attention", "reference", "write_latents", "write_reference"]
