"""Products of consecutive groups of rows with a matrix each: `ragged_dot(lhs, rhs, group_sizes)`."""

from tilekern.kernels.ragged_dot.api import ragged_dot
from tilekern.kernels.ragged_dot.kernel import ragged_dot_forward
from tilekern.kernels.ragged_dot.reference import reference

__all__ = ["ragged_dot", "ragged_dot_forward", "reference"]
