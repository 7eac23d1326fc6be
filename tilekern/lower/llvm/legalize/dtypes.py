"""The dtypes that the emitter computes in and casts."""

from __future__ import annotations

from tilekern.ir.types import BF16, F16, F32, DType, is_float8
from tilekern.lower.rewrite.capabilities import Capabilities


def has_cast(source: DType, target: DType) -> bool:
    """True if the emitter has a cast: of bfloat16 and float16 from and to float32 only, of 8-bit floats to float32."""
    if is_float8(source) or is_float8(target):
        return target == F32
    if target in (BF16, F16):
        return source == F32
    return source not in (BF16, F16) or target == F32


LLVM = Capabilities(casts=has_cast, reduction_bytes=1, reduces_bools=True)
"""The same for every CPU; only dots depend on it."""

LACKS = frozenset(("nextafter", "sign"))
"""The functions of bits that the emitter lacks: of `sign` those of integers."""
