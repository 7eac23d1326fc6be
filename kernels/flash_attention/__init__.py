"""Flash attention: exact attention with memory linear in the sequence length."""

from tilekern.kernels.flash_attention import derivatives as derivatives  # the rules of the kernels
from tilekern.kernels.flash_attention.api import flash_attention
from tilekern.kernels.flash_attention.arguments import Config, Extras, Residuals
from tilekern.kernels.flash_attention.block_map import BlockMap, block_map
from tilekern.kernels.flash_attention.kernel import flash_attention_forward
from tilekern.kernels.flash_attention.reference import reference

__all__ = [
    "BlockMap",
    "Config",
    "Extras",
    "Residuals",
    "block_map",
    "flash_attention",
    "flash_attention_forward",
    "reference",
]
