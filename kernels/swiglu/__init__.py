"""The gated activation of most language models: `swiglu(gate, up)`."""

from tilekern.kernels.conventions import moved
from tilekern.kernels.swiglu.api import swiglu
from tilekern.kernels.swiglu.reference import reference

__all__ = ["reference", "swiglu"]

__getattr__ = moved(__name__, swiglu_forward="kernel")
