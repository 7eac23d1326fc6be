"""Matrix multiplication: `matmul(x, w)`."""

from tilekern.kernels.matmul.kernel import matmul
from tilekern.kernels.matmul.reference import reference

__all__ = ["matmul", "reference"]
