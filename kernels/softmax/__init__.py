"""Softmax over an axis of any length: `softmax(x)`, and its logarithm, `log_softmax(x)`."""

from tilekern.kernels.softmax.api import log_softmax, softmax
from tilekern.kernels.softmax.kernel import softmax_forward
from tilekern.kernels.softmax.log import log_softmax_forward
from tilekern.kernels.softmax.reference import log_reference, reference

__all__ = ["log_reference", "log_softmax", "log_softmax_forward", "reference", "softmax", "softmax_forward"]
