"""Softmax over an axis of any length: `softmax(x)`."""

from tilekern.kernels.softmax.api import softmax
from tilekern.kernels.softmax.kernel import softmax_forward
from tilekern.kernels.softmax.reference import reference

__all__ = ["reference", "softmax", "softmax_forward"]
