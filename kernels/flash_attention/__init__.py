"""Flash attention: exact attention with memory linear in the sequence length."""

from tilekern.kernels.conventions import moved
from tilekern.kernels.flash_attention import derivatives as derivatives  # the rules of the kernels
from tilekern.kernels.flash_attention.api import flash_attention
from tilekern.kernels.flash_attention.block_map import BlockMap, block_map
from tilekern.kernels.flash_attention.reference import reference

__all__ = [
    "BlockMap",
    "block_map",
    "flash_attention",
    "reference",
]

__getattr__ = moved(
    __name__, Config="arguments", Extras="arguments", Residuals="arguments", flash_attention_forward="kernel"
)
