"""Group normalisation: `group_norm(x, weight, bias)`."""

from tilekern.kernels.group_norm.api import group_norm
from tilekern.kernels.group_norm.kernel import group_norm_forward
from tilekern.kernels.group_norm.reference import reference

__all__ = ["group_norm", "group_norm_forward", "reference"]
