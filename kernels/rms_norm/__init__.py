"""Root mean square normalisation: `rms_norm(x, weight)`, with a residual before it, or quantised behind it."""

from tilekern.kernels.conventions import moved
from tilekern.kernels.rms_norm.api import add_rms_norm, rms_norm
from tilekern.kernels.rms_norm.quantized import rms_norm_quantized
from tilekern.kernels.rms_norm.reference import add_reference, reference

__all__ = [
    "add_reference",
    "add_rms_norm",
    "reference",
    "rms_norm",
    "rms_norm_quantized",
]

__getattr__ = moved(
    __name__, add_rms_norm_forward="kernel", rms_norm_forward="kernel", rms_norm_quantized_forward="quantized"
)
