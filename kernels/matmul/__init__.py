"""Products of matrices: `matmul`, `fused_matmul` with an epilogue, `quantized_matmul`, `symmetric_matmul` of x xᵀ."""

from tilekern.kernels.conventions import moved
from tilekern.kernels.matmul import derivatives as derivatives  # the rules of the kernels
from tilekern.kernels.matmul import quantized_derivatives as quantized_derivatives
from tilekern.kernels.matmul.api import matmul
from tilekern.kernels.matmul.fused import fused_matmul
from tilekern.kernels.matmul.quantized import quantized_matmul
from tilekern.kernels.matmul.quantized_reference import quantized_reference
from tilekern.kernels.matmul.reference import fused_reference, reference, symmetric_reference
from tilekern.kernels.matmul.symmetric import symmetric_matmul

__all__ = [
    "fused_matmul",
    "fused_reference",
    "matmul",
    "quantized_matmul",
    "quantized_reference",
    "reference",
    "symmetric_matmul",
    "symmetric_reference",
]

__getattr__ = moved(__name__, fused_matmul_forward="fused", split_matmul="split", symmetric_matmul_forward="symmetric")
