"""Corrections of bfloat16 and float8, and of conversions between numbers, which follow NVIDIA GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilekern.ir.core import Array
from tilekern.ir.types import BF16, DTYPES, F64, DType, kind_of, round_to
from tilekern.lower.triton.dtypes import TRITON_DTYPES
from tilekern.lower.triton.interpreter.triton_interpreter import Correction, TritonInterpreter

_LARGEST = {DTYPES["f8e4m3fn"]: 448.0, DTYPES["f8e5m2"]: 57344.0}
"""The largest finite numbers (Micikevicius et al., "FP8 Formats for Deep Learning", 2022, table 1)."""


def _hold_numbers(triton: TritonInterpreter) -> None:
    """Tiles of bfloat16 and float8 are arrays of their own dtype, so NumPy's functions compute and round once.

    Triton's interpreter (3.6.0, 3.9.0) holds their bits as unsigned integers, and adds, compares, sorts and reduces
    these integers.
    """
    language = triton.language
    dtypes = {getattr(language, TRITON_DTYPES[name]): dtype for name, dtype in DTYPES.items()}

    def array_dtype(dtype: Any) -> DType:
        return DTYPES["u64"] if dtype.scalar.is_ptr() else dtypes[dtype.scalar]

    triton.module._get_np_dtype = array_dtype


def _have_bfloat16_constants(triton: TritonInterpreter) -> None:
    """Constants of bfloat16, for which 3.6.0 has no method."""

    def get_bf16(self: Any, value: float) -> Any:
        return triton.handle(round_to(np.array([value]), BF16), triton.language.bfloat16)

    triton.builder.get_bf16 = get_bf16


def _convert_like_the_device(triton: TritonInterpreter) -> None:
    """Conversions follow the GPU's `cvt` instruction.

    Triton's interpreter (3.6.0, 3.9.0) truncates float32 → bfloat16, and rounds ties to float8 away from zero. It
    leaves float → integer to the CPU, which turns numbers that do not fit into the smallest integer.
    """

    def cast(self: Any, value: Any, dtype: Any, *how: Any) -> Any:
        if triton.ir.ROUNDING_MODE.RTZ in how:
            raise NotImplementedError("the interpreter rounds to nearest even only")
        return triton.handle(convert(value.data, triton.module._get_np_dtype(dtype)), dtype)

    for name in (
        "si_to_fp",
        "ui_to_fp",
        "fp_to_si",
        "fp_to_ui",
        "fp_ext",
        "fp_trunc",
        "int_cast",
        "fp_to_fp",
    ):
        setattr(triton.builder, f"create_{name}", cast)


CORRECTIONS: tuple[Correction, ...] = (_hold_numbers, _have_bfloat16_constants, _convert_like_the_device)


def convert(x: Array, dtype: DType) -> Array:
    """Convert numbers to another dtype: floats round to nearest even, float8 saturates, integers wrap around.

    Source for numbers that do not fit: PTX ISA, "cvt". Triton converts to float8 by `cvt.rn.satfinite`, which
    turns ±inf into the largest finite number, too.
    """
    if kind_of(dtype) != "float":
        return _integers(x, dtype) if kind_of(x.dtype) == "float" else x.astype(dtype)
    if dtype in _LARGEST and x.dtype not in _LARGEST:
        limit = _LARGEST[dtype]
        x = np.clip(x.astype(F64), -limit, limit)
    return round_to(x, dtype)


def _integers(x: Array, dtype: DType) -> Array:
    """Round floats toward zero to integers; numbers that do not fit saturate to the range of the register.

    A register has at least 16 bits, and int8 takes the lower 8. NaN becomes 0. For float64 operands and for 64-bit
    integers, NaN becomes the number whose highest bit alone is set.
    """
    if dtype.itemsize == 1:
        return _integers(x, np.dtype(f"{dtype.kind}2")).astype(dtype)
    bits, limits = 8 * dtype.itemsize, np.iinfo(dtype)
    signed = dtype.kind == "i"
    whole = np.trunc(x.astype(F64))
    low, high = (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1)) if signed else (0.0, 2.0**bits)
    inside = (whole >= low) & (whole < high)
    integers = np.where(inside, whole, 0).astype(dtype)
    integers = np.where(whole < low, limits.min, np.where(whole >= high, limits.max, integers)).astype(dtype)
    if x.dtype == F64 or bits == 64:
        first = limits.min if signed else 1 << (bits - 1)
        return np.where(np.isnan(whole), np.asarray(first, dtype), integers)
    return integers
