"""The dtypes that Triton computes in and casts."""

from __future__ import annotations

from tilekern.ir.types import BF16, BOOL, DTYPES, F16, F32, F64, I32, DType, is_float8, kind_of
from tilekern.lower.rewrite.capabilities import Capabilities

_NARROW = frozenset(("add", "sub", "mul", "neg", "abs", "eq", "ne", "lt", "le", "gt", "ge"))


def has_cast(source: DType, target: DType) -> bool:
    """True if Triton has a cast with the meaning of the language.

    Triton's casts of floats to integers do not saturate; casts to 8-bit floats do; casts to bfloat16 and float16 round
    once from float32 only.
    """
    if target == BOOL or is_float8(target):
        return False
    if source == BOOL:
        return target in (I32, F32, F64)
    if kind_of(target) != "float":
        return kind_of(source) != "float"
    if is_float8(source):
        # The bits of E5M2 are the upper half of the bits of float16.
        return target == F32 or (source, target) == (DTYPES["f8e5m2"], F16)
    return target in (F32, F64) or source == F32


TRITON = Capabilities(
    casts=has_cast,
    float8_casts=True,
    functions={BF16: _NARROW, F16: _NARROW},
    selects_float8=False,
)
"""The same on all GPUs: `refuse` refuses the dtypes that a GPU lacks."""
