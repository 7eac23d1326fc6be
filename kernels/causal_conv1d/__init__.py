"""The short causal convolution of each channel: `causal_conv1d(x, weight, bias)`."""

from tilekern.kernels.causal_conv1d.api import causal_conv1d
from tilekern.kernels.causal_conv1d.kernel import causal_conv1d_forward
from tilekern.kernels.causal_conv1d.reference import reference

__all__ = ["causal_conv1d", "causal_conv1d_forward", "reference"]
