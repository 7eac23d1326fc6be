"""Rotary position embedding: `rope(x)`, and `rms_norm_rope(x, weight)` of normalised heads."""

from tilekern.kernels.conventions import moved
from tilekern.kernels.rope.api import rope
from tilekern.kernels.rope.normed import rms_norm_rope
from tilekern.kernels.rope.reference import normed_reference, reference

__all__ = ["normed_reference", "reference", "rms_norm_rope", "rope"]

__getattr__ = moved(__name__, rms_norm_rope_forward="normed", rope_forward="kernel")
