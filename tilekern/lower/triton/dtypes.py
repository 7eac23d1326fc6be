"""Dtypes by their names in Triton's language."""

from __future__ import annotations

from tilekern.ir.types import DTYPES

TRITON_DTYPES: dict[str, str] = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f8e4m3fn": "float8e4nv",
    "f8e5m2": "float8e5",
    "i64": "int64",
    "i32": "int32",
    "i16": "int16",
    "i8": "int8",
    "u64": "uint64",
    "u32": "uint32",
    "u16": "uint16",
    "u8": "uint8",
    "bool": "int1",
}
"""Names of the dtypes in `triton.language`, by their short names."""
assert TRITON_DTYPES.keys() == DTYPES.keys()
