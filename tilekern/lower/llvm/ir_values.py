"""Types, registers and constants of LLVM IR, as they stand in its text."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from tilekern.ir.records import record


@record
class Type:
    """A type of LLVM: a scalar, or a vector of `lanes` scalars if `lanes` is not 0."""

    scalar: str
    lanes: int = 0

    def __str__(self) -> str:
        return f"<{self.lanes} x {self.scalar}>" if self.lanes else self.scalar

    @property
    def suffix(self) -> str:
        """Its spelling in names of intrinsics."""
        name = {"float": "f32", "double": "f64", "half": "f16", "bfloat": "bf16", "ptr": "p0"}.get(
            self.scalar, self.scalar
        )
        return f"v{self.lanes}{name}" if self.lanes else name

    @property
    def bits(self) -> int:
        """Bits of one lane."""
        return {"float": 32, "double": 64, "half": 16, "bfloat": 16, "ptr": 64}.get(self.scalar) or int(self.scalar[1:])

    @property
    def is_float(self) -> bool:
        """True if lanes are floats."""
        return self.scalar in ("float", "double", "half", "bfloat")

    def of(self, scalar: str) -> Type:
        """The type with as many lanes of another scalar."""
        return Type(scalar, self.lanes)

    @property
    def element(self) -> Type:
        """The type of one lane."""
        return Type(self.scalar)

    @property
    def integer(self) -> Type:
        """The type with integers of as many bits."""
        return self.of(f"i{self.bits}")


VOID, PTR, I1, I8, I16, I32, I64 = (Type(t) for t in ("void", "ptr", "i1", "i8", "i16", "i32", "i64"))
F32, F64 = Type("float"), Type("double")


@record
class Reg:
    """An SSA value or a constant, as it stands in the text."""

    text: str
    type: Type

    def __str__(self) -> str:
        return f"{self.type} {self.text}"


Operand = Reg | int | float


def constant(number: Any, type: Type) -> Reg:
    """A constant; for a vector type, in every lane."""
    scalar = type.scalar
    if scalar == "float":
        text = f"0x{struct.unpack('<Q', struct.pack('<d', float(np.float32(number))))[0]:016X}"
    elif scalar == "double":
        text = f"0x{struct.unpack('<Q', struct.pack('<d', float(number)))[0]:016X}"
    elif scalar == "half":
        text = f"0xH{np.float16(number).view(np.uint16):04X}"
    elif scalar == "bfloat":
        text = f"0xR{np.asarray(number).astype(ml_dtypes.bfloat16).view(np.uint16):04X}"
    elif scalar == "i1":
        text = "true" if number else "false"
    else:
        text = str(int(number))
    return Reg(f"splat ({scalar} {text})" if type.lanes else text, type)


def vector_constant(numbers: Sequence[Any], type: Type) -> Reg:
    """A constant vector."""
    return Reg("<" + ", ".join(str(constant(n, type.element)) for n in numbers) + ">", type)
