"""Softmax over an axis of any length: `softmax(x)`, and its logarithm, `log_softmax(x)`."""

from tilekern.kernels.conventions import moved
from tilekern.kernels.softmax.api import log_softmax, softmax
from tilekern.kernels.softmax.reference import log_reference, reference

__all__ = ["log_reference", "log_softmax", "reference", "softmax"]

__getattr__ = moved(__name__, log_softmax_forward="log", softmax_forward="kernel")
