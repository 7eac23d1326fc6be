"""The gated linear recurrence of Griffin: `rg_lru(x, input_gate, recurrence_gate, a_param)`."""

from tilekern.kernels.conventions import moved
from tilekern.kernels.rg_lru.api import rg_lru
from tilekern.kernels.rg_lru.reference import reference

__all__ = ["reference", "rg_lru"]

__getattr__ = moved(__name__, rg_lru_forward="kernel")
