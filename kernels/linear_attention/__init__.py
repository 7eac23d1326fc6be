"""Linear attention with decays of heads or of tokens: `linear_attention(query, key, value, log_decay)`."""

from tilekern.kernels.conventions import moved
from tilekern.kernels.linear_attention.api import linear_attention
from tilekern.kernels.linear_attention.reference import reference
from tilekern.kernels.linear_attention.ssd import ssd

__all__ = ["linear_attention", "reference", "ssd"]

__getattr__ = moved(__name__, linear_attention_forward="kernel")
