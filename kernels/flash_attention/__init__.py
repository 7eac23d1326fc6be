"""Flash attention: exact attention with memory linear in the sequence length."""

from tilekern.kernels.flash_attention.api import flash_attention
from tilekern.kernels.flash_attention.kernel import flash_attention_forward
from tilekern.kernels.flash_attention.reference import reference

__all__ = ["flash_attention", "flash_attention_forward", "reference"]
