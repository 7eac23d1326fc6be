"""Rotary position embedding: `rope(x)`."""

from tilekern.kernels.rope.api import rope
from tilekern.kernels.rope.kernel import rope_forward
from tilekern.kernels.rope.reference import reference

__all__ = ["reference", "rope", "rope_forward"]
