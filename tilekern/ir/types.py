"""The types of the block IR: tiles and refs, and the short names of their dtypes."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any, Literal

import ml_dtypes
import numpy as np

from tilekern.ir.records import record

DType = np.dtype[Any]

# The short name of every dtype of the language; the text form and the error messages use these.
DTYPES: dict[str, DType] = {
    "f64": np.dtype(np.float64),
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f8e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "f8e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "i64": np.dtype(np.int64),
    "i32": np.dtype(np.int32),
    "i16": np.dtype(np.int16),
    "i8": np.dtype(np.int8),
    "u64": np.dtype(np.uint64),
    "u32": np.dtype(np.uint32),
    "u16": np.dtype(np.uint16),
    "u8": np.dtype(np.uint8),
    "bool": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

F64, F32, F16, BF16 = DTYPES["f64"], DTYPES["f32"], DTYPES["f16"], DTYPES["bf16"]
I32, BOOL = DTYPES["i32"], DTYPES["bool"]

# Maps each dtype of 4 bits, two to a byte in arrays, to the wider dtype of its tiles.
FOUR_BITS: dict[DType, DType] = {
    np.dtype(ml_dtypes.int4): DTYPES["i8"],
    np.dtype(ml_dtypes.uint4): DTYPES["u8"],
    np.dtype(ml_dtypes.float4_e2m1fn): DTYPES["f32"],
}

Kind = Literal["float", "signed", "unsigned", "bool"]


def dtype_name(dtype: DType) -> str:
    """The short name of a dtype, `bf16` for bfloat16; NumPy's name for a dtype that the language lacks."""
    try:
        return _NAMES.get(np.dtype(dtype)) or str(dtype)
    except TypeError:  # a dtype of JAX's own, of random keys for example
        return str(dtype)


def is_dtype(dtype: DType) -> bool:
    """True if `dtype` is a dtype of the language."""
    return dtype in _NAMES


def packed_type(shape: tuple[int, ...], dtype: DType) -> tuple[tuple[int, ...], DType]:
    """The shape and dtype of an array in memory: two 4-bit numbers of the last dim share a byte, the first one low."""
    return ((*shape[:-1], -(-shape[-1] // 2)), DTYPES["u8"]) if dtype in FOUR_BITS else (shape, dtype)


@cache
def kind_of(dtype: DType) -> Kind:
    """The kind of a dtype: one of four."""
    name = dtype_name(dtype)
    if name == "bool":
        return "bool"
    return "float" if name[0] in "fb" else "signed" if name[0] == "i" else "unsigned"


def is_float8(dtype: DType) -> bool:
    """True for 8-bit floats."""
    return kind_of(dtype) == "float" and dtype.itemsize == 1


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a row-major array, in elements."""
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))


def accumulator(dtype: DType) -> DType:
    """The dtype in which a dot of `dtype` operands accumulates: float32, float64 for float64, int32 for integers."""
    if kind_of(dtype) == "float":
        return F64 if dtype == F64 else F32
    return I32


def round_to(x: np.ndarray[Any, DType], dtype: DType) -> np.ndarray[Any, DType]:
    """Numbers (integers up to 53 bits) as floats of `dtype`, rounded once, to nearest even."""
    if dtype in (F64, F32, F16) or x.dtype.itemsize < 4 or x.dtype == F32:
        return x.astype(dtype)
    # ml_dtypes goes through float32, which would round twice. Inexact float32 values with an odd last bit (the other
    # neighbour of `wide` where the nearest one is even) never look like a tie to the second rounding.
    wide = x.astype(F64)
    single = wide.astype(F32)
    neighbour = np.nextafter(single, np.where(wide > single, np.inf, -np.inf).astype(F32))
    even = (single.view(np.uint32) & 1) == 0
    return np.where((wide != single) & even, neighbour, single).astype(dtype)


@record
class TileType:
    """A dense value of a program, `f32[128, 64]`; a scalar has the empty shape."""

    shape: tuple[int, ...]
    dtype: DType

    def __str__(self) -> str:
        return _text(self.shape, self.dtype)

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes that the value takes."""
        return self.size * self.dtype.itemsize


@cache  # checks that hold make messages, too: millions of texts of few types
def _text(shape: tuple[int, ...], dtype: DType) -> str:
    return f"{dtype_name(dtype)}[{', '.join(map(str, shape))}]"


Role = Literal["in", "inout", "out", "zeros", "sum"]
"""The use of an array by programs: "in" is loaded; "inout" is an input that is also stored to, and returned; "out" is
stored to, every element once; "zeros" starts at 0 and may stay so; "sum" starts at 0 and is added to."""


@record
class RefType:
    """An array in memory that programs load from and store to, `ref<f32[4096, 64], in>`."""

    shape: tuple[int, ...]
    dtype: DType
    role: Role

    def __str__(self) -> str:
        return f"ref<{TileType(self.shape, self.dtype)}, {self.role}>"


Type = TileType | RefType

INDEX = TileType((), I32)
"""The type of a position: an int32 scalar."""
