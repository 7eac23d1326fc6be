"""The selective scan of Mamba: `selective_scan(x, dt, a, b, c)`."""

from tilekern.kernels.conventions import moved
from tilekern.kernels.selective_scan.api import selective_scan
from tilekern.kernels.selective_scan.reference import reference

__all__ = ["reference", "selective_scan"]

__getattr__ = moved(__name__, selective_scan_forward="kernel")
