"""Matrix multiplication: `matmul(x, w)`, and `fused_matmul(x, w, *operands, epilogue=function)`."""

from tilekern.kernels.matmul.fused import fused_matmul, fused_matmul_forward
from tilekern.kernels.matmul.kernel import matmul
from tilekern.kernels.matmul.reference import fused_reference, reference

__all__ = ["fused_matmul", "fused_matmul_forward", "fused_reference", "matmul", "reference"]
