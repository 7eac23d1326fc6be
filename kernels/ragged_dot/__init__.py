"""Products of groups of rows: `ragged_dot` with a matrix each, `ragged_contracting_dot` into a matrix each."""

from tilekern.kernels.ragged_dot import derivatives as derivatives  # the rules of the kernels
from tilekern.kernels.ragged_dot.accumulated import ragged_contracting_into, ragged_dot_into
from tilekern.kernels.ragged_dot.api import ragged_contracting_dot, ragged_dot
from tilekern.kernels.ragged_dot.contracting import ragged_contracting_forward
from tilekern.kernels.ragged_dot.fused import fused_ragged_dot, fused_ragged_dot_forward
from tilekern.kernels.ragged_dot.kernel import ragged_dot_forward
from tilekern.kernels.ragged_dot.reference import (
    contracting_reference,
    fused_reference,
    reference,
    scaled_reference,
)
from tilekern.kernels.ragged_dot.scaled import scaled_ragged_dot_forward

__all__ = [
    "contracting_reference",
    "fused_ragged_dot",
    "fused_ragged_dot_forward",
    "fused_reference",
    "ragged_contracting_dot",
    "ragged_contracting_forward",
    "ragged_contracting_into",
    "ragged_dot",
    "ragged_dot_forward",
    "ragged_dot_into",
    "reference",
    "scaled_ragged_dot_forward",
    "scaled_reference",
]
