"""Divergences of a student's words from a teacher's, without the logits in memory: `distillation`."""

from tilekern.kernels.conventions import moved
from tilekern.kernels.distillation import derivatives as derivatives  # the rules of the kernels
from tilekern.kernels.distillation.api import distillation
from tilekern.kernels.distillation.reference import reference

__all__ = ["distillation", "reference"]

__getattr__ = moved(__name__, distillation_forward="kernel", distillation_parts="kernel")
