"""Products of groups of rows: `ragged_dot` with a matrix each, `ragged_contracting_dot` into a matrix each."""

from tilekern.kernels.conventions import moved
from tilekern.kernels.ragged_dot import derivatives as derivatives  # the rules of the kernels
from tilekern.kernels.ragged_dot.api import ragged_contracting_dot, ragged_dot
from tilekern.kernels.ragged_dot.fused import fused_ragged_dot
from tilekern.kernels.ragged_dot.reference import contracting_reference, fused_reference, reference, scaled_reference

__all__ = [
    "contracting_reference",
    "fused_ragged_dot",
    "fused_reference",
    "ragged_contracting_dot",
    "ragged_dot",
    "reference",
    "scaled_reference",
]

__getattr__ = moved(
    __name__,
    fused_ragged_dot_forward="fused",
    ragged_contracting_forward="contracting",
    ragged_contracting_into="accumulated",
    ragged_dot_forward="kernel",
    ragged_dot_into="accumulated",
    scaled_ragged_dot_forward="scaled",
)
