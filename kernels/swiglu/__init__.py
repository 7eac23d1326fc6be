"""The gated activation of most language models: `swiglu(gate, up)`."""

from tilekern.kernels.swiglu.api import swiglu
from tilekern.kernels.swiglu.kernel import swiglu_forward
from tilekern.kernels.swiglu.reference import reference

__all__ = ["reference", "swiglu", "swiglu_forward"]
