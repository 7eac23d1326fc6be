"""LLVM types of elements in registers and in memory."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from tilekern.ir.types import BOOL, DType, dtype_name, kind_of
from tilekern.lower.llvm.ir_builder import Code
from tilekern.lower.llvm.ir_values import Reg, Type, constant

_SCALARS = {
    "f64": "double",
    "f32": "float",
    "f16": "half",
    "bf16": "i16",
    "f8e4m3fn": "i8",
    "f8e5m2": "i8",
    "bool": "i1",
}


def register_type(dtype: DType, lanes: int = 0) -> Type:
    """The type of elements in registers. bfloat16 and 8-bit floats are integers with their bits."""
    return Type(_SCALARS.get(dtype_name(dtype), f"i{8 * dtype.itemsize}"), lanes)


def memory_type(dtype: DType, lanes: int = 0) -> Type:
    """The type of elements in memory. Bools are bytes."""
    return Type("i8", lanes) if dtype == BOOL else register_type(dtype, lanes)


def element_constant(number: Any, dtype: DType, lanes: int = 0) -> Reg:
    """A constant element, or a vector of it."""
    element = np.asarray(number).astype(dtype)
    if dtype == ml_dtypes.bfloat16 or (dtype.itemsize == 1 and kind_of(dtype) == "float"):
        element = element.view(f"u{dtype.itemsize}")
    return constant(element, register_type(dtype, lanes))


def from_memory(code: Code, x: Reg, dtype: DType) -> Reg:
    """Convert loaded elements to their type in registers."""
    return code.compare("icmp ne", x, 0) if dtype == BOOL else x


def to_memory(code: Code, x: Reg, dtype: DType) -> Reg:
    """Convert elements to their type in memory."""
    return code.cast("zext", x, "i8") if dtype == BOOL else x
