"""Matrix multiplication: `matmul(x, w)`, `fused_matmul(x, w, *operands, epilogue=function)`, `symmetric_matmul(x)`."""

from tilekern.kernels.conventions import moved
from tilekern.kernels.matmul import derivatives as derivatives  # the rules of the kernels
from tilekern.kernels.matmul.api import matmul
from tilekern.kernels.matmul.fused import fused_matmul
from tilekern.kernels.matmul.reference import fused_reference, reference, symmetric_reference
from tilekern.kernels.matmul.symmetric import symmetric_matmul

__all__ = [
    "fused_matmul",
    "fused_reference",
    "matmul",
    "reference",
    "symmetric_matmul",
    "symmetric_reference",
]

__getattr__ = moved(__name__, fused_matmul_forward="fused", split_matmul="split", symmetric_matmul_forward="symmetric")
