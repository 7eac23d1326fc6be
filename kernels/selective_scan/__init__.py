"""The selective scan of Mamba: `selective_scan(x, dt, a, b, c)`."""

from tilekern.kernels.selective_scan.api import selective_scan
from tilekern.kernels.selective_scan.kernel import selective_scan_forward
from tilekern.kernels.selective_scan.reference import reference

__all__ = ["reference", "selective_scan", "selective_scan_forward"]
