"""Matrix multiplication: `matmul(x, w)`, `fused_matmul(x, w, *operands, epilogue=function)`, `symmetric_matmul(x)`."""

from tilekern.kernels.matmul import derivatives as derivatives  # the rules of the kernels
from tilekern.kernels.matmul.api import matmul
from tilekern.kernels.matmul.fused import fused_matmul, fused_matmul_forward
from tilekern.kernels.matmul.reference import fused_reference, reference, symmetric_reference
from tilekern.kernels.matmul.split import split_matmul
from tilekern.kernels.matmul.symmetric import symmetric_matmul, symmetric_matmul_forward

__all__ = [
    "fused_matmul",
    "fused_matmul_forward",
    "fused_reference",
    "matmul",
    "reference",
    "split_matmul",
    "symmetric_matmul",
    "symmetric_matmul_forward",
    "symmetric_reference",
]
