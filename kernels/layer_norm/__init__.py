"""Layer normalisation: `layer_norm(x, weight, bias)`."""

from tilekern.kernels.conventions import moved
from tilekern.kernels.layer_norm.api import layer_norm
from tilekern.kernels.layer_norm.reference import reference

__all__ = ["layer_norm", "reference"]

__getattr__ = moved(__name__, layer_norm_forward="kernel")
