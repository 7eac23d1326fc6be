"""Group normalisation: `group_norm(x, weight, bias)`."""

from tilekern.kernels.conventions import moved
from tilekern.kernels.group_norm.api import group_norm
from tilekern.kernels.group_norm.reference import reference

__all__ = ["group_norm", "reference"]

__getattr__ = moved(__name__, group_norm_forward="kernel")
