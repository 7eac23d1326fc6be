"""Linear attention with decays of heads or of tokens: `linear_attention(query, key, value, log_decay)`."""

from tilekern.kernels.linear_attention.api import linear_attention
from tilekern.kernels.linear_attention.kernel import linear_attention_forward
from tilekern.kernels.linear_attention.reference import reference
from tilekern.kernels.linear_attention.ssd import ssd

__all__ = ["linear_attention", "linear_attention_forward", "reference", "ssd"]
