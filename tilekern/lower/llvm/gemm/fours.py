"""Products of fours of 8-bit integers, added up in int32, with the instructions of x86-64 and of ARM.

x86-64 (`vpdpbusd` of AVX512-VNNI and AVX-VNNI) multiplies unsigned by signed numbers. The microkernel flips the sign
bit of each number of the left operand: an int8 l becomes the uint8 l + 128, and a uint8 l the int8 l - 128. So each sum
is too large, or too small, by an offset that depends on its column only:

    Σ_k (l[m, k] + 128) r[k, n] = Σ_k l[m, k] r[k, n] + 128 Σ_k r[k, n].

The offset of a column is the sum for a row of zeros, which the same microkernel computes. All of it wraps around in
int32, as the result does, so the result is exact.
"""

from __future__ import annotations

import numpy as np

from tilekern.ir.types import DType
from tilekern.lower.llvm.ir_builder import Code
from tilekern.lower.llvm.ir_values import Reg
from tilekern.lower.llvm.runtime.machine import Machine

_I8 = np.dtype(np.int8)
BYTES = (_I8, np.dtype(np.uint8))
"""Dtypes of numbers that are multiplied in fours, and by tiles."""

_SIGN_BITS = -0x7F7F7F80  # 0x80808080 as an int32


def has_offsets(dtype: DType, machine: Machine) -> bool:
    """True if sums of products of words of `dtype` have an offset for each column."""
    return machine.is_x86 and dtype in BYTES


def left_word(code: Code, dtype: DType, word: Reg) -> Reg:
    """A word of the left operand in the form that `accumulate_fours` takes; a word of a wider dtype as it is.

    The word is no vector yet: LLVM 22 does not finish compiling products of vectors whose bits are flipped.
    """
    return code.binary("xor", word, _SIGN_BITS) if has_offsets(dtype, code.module.machine) else word


def accumulate_fours(code: Code, dtype: DType, total: Reg, left: Reg, right: Reg) -> Reg:
    """Register like `total`: total plus the sum of the four products of each word."""
    lanes = total.type.lanes
    if not code.module.machine.is_x86:
        name = f"llvm.aarch64.neon.{'sdot' if dtype == _I8 else 'udot'}.v{lanes}i32.v{4 * lanes}i8"
        return code.dot_words(name, "i8", total, left, right)
    unsigned, signed = (left, right) if dtype == _I8 else (right, left)
    return code.dot_words(f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", "i8", total, unsigned, signed)
