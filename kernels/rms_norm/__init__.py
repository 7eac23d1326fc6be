"""Root mean square normalisation: `rms_norm(x, weight)`."""

from tilekern.kernels.rms_norm.api import rms_norm
from tilekern.kernels.rms_norm.kernel import rms_norm_forward
from tilekern.kernels.rms_norm.reference import reference

__all__ = ["reference", "rms_norm", "rms_norm_forward"]
