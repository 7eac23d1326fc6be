"""Root mean square normalisation: `rms_norm(x, weight)`, with a residual before it, or quantised behind it."""

from tilekern.kernels.rms_norm.api import add_rms_norm, rms_norm
from tilekern.kernels.rms_norm.kernel import add_rms_norm_forward, rms_norm_forward
from tilekern.kernels.rms_norm.quantized import rms_norm_quantized, rms_norm_quantized_forward
from tilekern.kernels.rms_norm.reference import add_reference, reference

__all__ = [
    "add_reference",
    "add_rms_norm",
    "add_rms_norm_forward",
    "reference",
    "rms_norm",
    "rms_norm_forward",
    "rms_norm_quantized",
    "rms_norm_quantized_forward",
]
