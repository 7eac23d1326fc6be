"""Layer normalisation: `layer_norm(x, weight, bias)`."""

from tilekern.kernels.layer_norm.api import layer_norm
from tilekern.kernels.layer_norm.kernel import layer_norm_forward
from tilekern.kernels.layer_norm.reference import reference

__all__ = ["layer_norm", "layer_norm_forward", "reference"]
