"""Warp-specialised programs that are checked: attention, its gradients, and products, by the Gluon emitter."""

from __future__ import annotations

from functools import partial
from typing import Any

from bench.gpu import gradients, kernels, trained
from bench.gpu.gradients import Featured
from bench.gpu.kernels import Kernel, product, resized
from tilekern._machine import compute_capability
from tilekern.kernels.flash_attention import flash_attention
from tilekern.kernels.flash_attention.cases import Case
from tilekern.kernels.matmul import fused_matmul
from tilekern.kernels.matmul.cases import CASES
from tilekern.kernels.ragged_dot import ragged_dot

GLUON = "cuda:sm_90+gluon"
"""The target of warp-specialised programs."""

DTYPES = ("bfloat16", "float16")
"""The dtype of their operands."""

# Whole tiles; ragged ones, with heads that share keys; and all heads with the same keys.
ATTENTIONS = (
    *kernels.WHOLE,
    Case("grouped", 8, 2, 128, 128, 517, 517, causal=True, batch=2),
    Case("grouped_full", 4, 2, 64, 64, 300, 517),
    Case("multi_query", 8, 1, 256, 256, 512, 512, causal=True),
)
# Rows of 16 bytes, which the Tensor Memory Accelerator copies; ragged rows, inner dims and columns.
PRODUCTS = resized(
    CASES, {"rows": 517, "inner": 1000, "columns": 304}, {"rows": 1024, "inner": 512, "columns": 768}, {"columns": 4096}
)

# Scales of both operands or of the matrices, whose tiles are cast. Sums of integers and 4 bits are not taken.
SCALED = tuple(c for c in trained.large_scaled() if c.lhs_dtype != "int8" and c.rhs_dtype in ("int8", "float8_e4m3fn"))


def has_gluon() -> bool:
    """True if the machine's GPU runs warp-specialised programs, or if it has no GPU, as in a dry run."""
    return compute_capability() in (None, 90)


def _by_gluon(kernel: Kernel, call: Any, large: tuple[Any, ...], dtypes: tuple[str, ...] = DTYPES) -> Kernel:
    """A check of `call` on `large` cases, with the definition and the limits of `kernel`."""
    return Kernel(call, kernel.reference, (), large, kernel.length, kernel.dtyped, kernel.factor, dtypes)


OF_TRITON = kernels.KERNELS
KERNELS = {
    "flash_attention gluon": _by_gluon(
        OF_TRITON["flash_attention"],
        partial(flash_attention, return_logsumexp=True, target=GLUON),
        ATTENTIONS,
    ),
    "flash_attention_gradient gluon": _by_gluon(
        OF_TRITON["flash_attention_gradient"],
        partial(gradients.ours, target=GLUON),
        tuple(Featured(case) for case in ATTENTIONS if case.width < 256),  # wider heads need too many registers
        DTYPES[:1],
    ),
    "matmul gluon": _by_gluon(OF_TRITON["matmul"], partial(product, target=GLUON), PRODUCTS),
    # The schedule may choose clusters; these programs have none.
    "matmul gluon alone": _by_gluon(
        OF_TRITON["matmul"],
        partial(product, target=GLUON, block_m=64, block_n=128, block_k=64, num_warps=8, num_ctas=1),
        PRODUCTS,
    ),
    "fused_matmul gluon": _by_gluon(
        trained.FUSED["fused_matmul"],
        partial(fused_matmul, epilogue=trained.gelu_of_sum, target=GLUON),
        trained.derived_cases(trained.with_bias, PRODUCTS),
    ),
    "ragged_dot scales gluon": _by_gluon(
        trained.GROUPED["ragged_dot scales"],
        partial(trained.by_scales, ragged_dot, target=GLUON),
        trained.derived_cases(trained.flat, SCALED),
        DTYPES[:1],
    ),
}
