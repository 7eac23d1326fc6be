"""The short causal convolution of each channel: `causal_conv1d(x, weight, bias)`."""

from tilekern.kernels.causal_conv1d.api import causal_conv1d
from tilekern.kernels.causal_conv1d.reference import reference
from tilekern.kernels.conventions import moved

__all__ = ["causal_conv1d", "reference"]

__getattr__ = moved(__name__, causal_conv1d_forward="kernel")
